"""The tokenizer record, on a tiny byte-pair tokenizer built here."""

import json
import subprocess
import sys

import numpy as np
import pytest

from xrpo_jax import tokenizer

TEXT = ["the cat sat on the mat", "what is 12 + 34 ? it is 46 .", "don't , he said"]


def build(folder, *, bos=None, pad=None, eos="<|end|>"):
    """Writes a tokenizer in the format of the Hub; `bos` is prepended to every text."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>", "<|turn|>", "<|begin|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    core.train_from_iterator(TEXT, trainer)
    if bos is not None:
        core.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, core.token_to_id(bos))]
        )
    named = {"eos_token": eos, "bos_token": bos, "pad_token": pad}
    named = {key: value for key, value in named.items() if value is not None}
    # Files that ask for the clean-up, in the words that transformers 5 wants for byte pairs.
    named["clean_up_tokenization_spaces"] = True
    named["clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"] = True
    PreTrainedTokenizerFast(tokenizer_object=core, **named).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return build(tmp_path_factory.mktemp("plain"))


def test_text_survives_the_round_trip(plain):
    tok = tokenizer.load(plain)
    for text in [*TEXT, "  two  spaces , don 't\n\n", "naïve 数学 ∑", ""]:
        ids = tok.encode(text)
        assert all(type(each) is int and 0 <= each < tok.vocab_size for each in ids)
        assert tok.decode(ids) == text  # a clean-up would turn " ," into ","
        assert tok.decode(np.array(ids, np.int32)) == text


def test_nothing_is_added_unless_the_tokenizer_adds_it(plain, tmp_path):
    bare = tokenizer.load(plain)
    begins = tokenizer.load(build(tmp_path, bos="<|begin|>"))
    assert bare.encode("the cat")[0] > 2
    assert begins.encode("the cat") == [2, *bare.encode("the cat")]
    assert begins.decode([2, *bare.encode("the cat"), 0]) == "the cat"


def test_stop_ids_come_from_all_three_files(tmp_path):
    folder = build(tmp_path)
    assert tokenizer.load(folder).stop_ids == (0,)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "eos_token_id": 7}))
    assert tokenizer.load(folder).stop_ids == (0, 7)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 0]}))
    assert tokenizer.load(folder).stop_ids == (0, 1, 7)


def test_vocabulary_counts_added_tokens(plain):
    tok = tokenizer.load(plain)
    data = json.loads((plain / "tokenizer.json").read_text())
    assert tok.vocab_size == len(data["model"]["vocab"])


def test_errors_name_the_directory(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no tokenizer; needed is one of"):
        tokenizer.load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="names no end of sequence"):
        tokenizer.load(build(tmp_path, eos=None))


def test_import_does_not_pull_in_transformers():
    code = "import sys, xrpo_jax.tokenizer; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_damaged_json_file_is_named(tmp_path):
    folder = build(tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": 1,')
    with pytest.raises(ValueError, match="generation_config.json is damaged .*; copy or download"):
        tokenizer.load(folder)


def test_llamas_template_sees_no_clock(tmp_path):
    """A prompt is the same on every day that a run goes on."""
    folder = build(tmp_path)
    (folder / "chat_template.jinja").write_text(
        "{%- if not date_string is defined %}{%- set date_string = strftime_now('%d %b %Y') %}"
        "{%- endif %}{{ date_string }} {{ messages[0]['content'] }}"
    )
    render = tokenizer.load(folder).render
    assert render([{"role": "user", "content": "hi"}]) == "26 Jul 2024 hi"
