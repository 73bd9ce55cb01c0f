"""GGUF files written here: weights, config and tokenizer against the model they were made from."""

import dataclasses
import json
import sys

import jax
import numpy as np
import pytest
from test_export import SIZES
from tiny import policy as tiny
from tokenizers import Tokenizer, pre_tokenizers

from xrpo_jax import tokenizer
from xrpo_jax.model import compare, export, files, gguf_file, hf, rope_factors, transformer
from xrpo_jax.model.config import LinearScaling, Llama3Scaling, ModelConfig
from xrpo_jax.model.source import find

package = pytest.importorskip("gguf", reason="the gguf package is not installed")

WIDE = {**SIZES, "hidden_size": 64, "intermediate_size": 32, "head_dim": 16, "rms_norm_eps": 1e-5}
LLAMA3 = Llama3Scaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)
MODELS = {
    "llama": ModelConfig(family="llama", **WIDE),
    "llama_tied": ModelConfig(
        family="llama",
        tie_word_embeddings=True,
        rope_theta=500000.0,
        rope_scaling=LLAMA3,
        **{**WIDE, "max_position_embeddings": 131072},
    ),
    "llama_biases": ModelConfig(
        family="llama",
        attention_bias=True,
        output_bias=True,
        rope_scaling=LinearScaling(factor=4.0),
        **WIDE,
    ),
    "qwen2": ModelConfig(family="qwen2", attention_bias=True, rope_theta=1e6, **WIDE),
    "qwen3": ModelConfig(family="qwen3", qk_norm=True, tie_word_embeddings=True, **WIDE),
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
KINDS = {"F32": 0, "F16": 1, "Q8_0": 8, "BF16": 30}
# Every byte, the pieces below, and what the special tokens are.
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["1 2", "12 3", "Ġ Ġ", "Ġ a", "a b", "ab c", "Ġ 1"]
SPECIAL = ["<|begin|>", "<|end|>", "<|turn|>", "<think>"]
TOKENS = [*BYTES, *(merge.replace(" ", "") for merge in MERGES), "xyz", *SPECIAL]


def permuted(tensor: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter does with the query and key of a Llama."""
    halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def byte_level(writer, cut: str = "llama-bpe", padding: int = 2) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(cut)
    writer.add_token_list([*TOKENS, *(f"[PAD{n}]" for n in range(padding))])
    kinds = [1] * (len(TOKENS) - 4) + [3, 3, 3, 4] + [5] * padding
    writer.add_token_types(kinds)
    writer.add_token_merges(MERGES)
    for name, token in (("bos", "<|begin|>"), ("eos", "<|end|>"), ("eot", "<|turn|>")):
        getattr(writer, f"add_{name}_token_id")(TOKENS.index(token))
    writer.add_chat_template("{{ messages[0]['content'] }}")


def write(path, config: ModelConfig, tensors: dict, kind: str = "F32", tokens=byte_level, **fields):
    """Writes a GGUF as llama.cpp's converter would; `fields` overrides metadata of the family."""
    writer = package.GGUFWriter(path, config.family)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if isinstance(config.rope_scaling, LinearScaling):
        writer.add_rope_scaling_type(package.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_scaling.factor)
    for name, value in fields.items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(name, value)
    tokens(writer)
    for name, tensor in gguf_tensors(config, tensors).items():
        kind_here = KINDS[kind] if tensor.ndim > 1 else 0
        quantized = package.quantize(tensor, package.GGMLQuantizationType(kind_here))
        writer.add_tensor(name, quantized, raw_dtype=package.GGMLQuantizationType(kind_here))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensors(config: ModelConfig, tensors: dict) -> dict:
    found = {}
    for name, tensor in tensors.items():
        stem, _, suffix = name.rpartition(".")
        if stem.startswith("model.layers."):
            _, _, layer, stem = stem.split(".", 3)
            new = f"blk.{layer}.{NAMES[stem]}.{suffix}"
        else:
            new = f"{NAMES[stem]}.{suffix}"
        if config.family == "llama" and "attn_q." in new:
            tensor = permuted(tensor, config.num_heads)
        if config.family == "llama" and "attn_k." in new:
            tensor = permuted(tensor, config.num_kv_heads)
        found[new] = np.ascontiguousarray(tensor)
    if isinstance(config.rope_scaling, Llama3Scaling):
        found["rope_freqs.weight"] = factors(config)
    return found


def factors(config: ModelConfig) -> np.ndarray:
    """What llama.cpp divides the frequencies by, from the model's own formula."""
    plain = ModelConfig(**{**vars(config), "rope_scaling": None})
    found = transformer.frequencies(plain) / transformer.frequencies(config)
    return found.astype(np.float32)


def torch_layout(config: ModelConfig, weights: dict) -> dict:
    """The tensors as they would be in a safetensors file."""
    flat = {"/".join(path): leaf for path, leaf in _flat(weights)}
    found = {}
    for name, place in hf.table(config).items():
        tensor = flat["/".join(place.path)]
        tensor = np.asarray(tensor if place.layer is None else tensor[place.layer])
        if place.inputs:
            tensor = tensor.reshape(place.hf_shape[::-1]).T
        found[name] = tensor.reshape(place.hf_shape)
    return found


def _flat(tree: dict, prefix: tuple = ()):
    for key, value in tree.items():
        yield from (
            _flat(value, (*prefix, key)) if isinstance(value, dict) else [((*prefix, key), value)]
        )


def make(name: str, vocabulary: int = len(TOKENS) + 2) -> tuple[ModelConfig, dict]:
    raw = {**vars(MODELS[name]), "vocab_size": vocabulary}
    ids = {"bos_token_id": TOKENS.index("<|begin|>"), "eos_token_ids": (TOKENS.index("<|end|>"),)}
    config = ModelConfig(**{**raw, **ids})
    return config, tiny.weights(config)


@pytest.fixture
def file(tmp_path):
    config, weights = make("llama")
    return write(tmp_path / "model.gguf", config, torch_layout(config, weights))


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("name", sorted(MODELS))
def test_weights_and_config_are_those_that_were_written(name, kind, tmp_path):
    config, weights = make(name)
    path = write(tmp_path / "model.gguf", config, torch_layout(config, weights), kind)
    source = find(str(path))
    again, loaded = hf.load(source)
    assert again == config and source.gguf == path
    kept = {"F32": 0, "F16": 1e-3, "BF16": 1e-2, "Q8_0": 2e-2}[kind]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=kept, rtol=0), loaded, weights)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(loaded))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_transformers_reads_the_same_file_alike(name, tmp_path):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config, _ = make(name)
    if name == "qwen3":  # whose size of a head transformers does not read from the file
        config = dataclasses.replace(config, head_dim=128)
    weights = tiny.weights(config)
    path = write(tmp_path / "model.gguf", config, torch_layout(config, weights), "Q8_0")
    ours = torch_layout(config, hf.load(find(str(path)))[1])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf")
    state = theirs.state_dict()
    for tensor in ours:
        np.testing.assert_allclose(ours[tensor], state[tensor].float().numpy(), atol=1e-6)


def test_the_whole_way_to_an_export(file, tmp_path):
    source = find(str(file))
    config, weights = hf.load(source)
    export.save(tmp_path / "out", config, weights, tokenizer_dir=source.folder)
    assert compare.check(tmp_path / "out", config, weights, "float32").reloaded == 0
    ends = {TOKENS.index("<|end|>"), TOKENS.index("<|turn|>")}
    assert set(tokenizer.load(tmp_path / "out").stop_ids) == ends
    raw = json.loads((tmp_path / "out" / files.GENERATION).read_text())
    assert set(raw["eos_token_id"]) == ends


def test_padding_of_the_table_is_no_token(file):
    words = tokenizer.load(find(str(file)).folder)
    assert words.vocab_size == len(TOKENS)
    assert len(words.encode("[PAD0]", begin=False)) == 6


# What each cut makes of numbers and of spaces before them, by hand from its expression.
ONE_BY_ONE = ["1", "2", "3", "Ġ", "1", "Ġa", "b"]
CUTS = {
    "gpt-2": ["123", "Ġ1", "Ġa", "b", "Ġ", "Ġ1"],
    "smollm": [*ONE_BY_ONE, "ĠĠ", "1"],
    "qwen2": [*ONE_BY_ONE, "Ġ", "Ġ", "1"],
    "deepseek-r1-qwen": [*ONE_BY_ONE, "Ġ", "Ġ", "1"],
    "llama-bpe": ["123", "Ġ", "1", "Ġa", "b", "Ġ", "Ġ", "1"],
    "llama3": ["123", "Ġ", "1", "Ġa", "b", "Ġ", "Ġ", "1"],
}


@pytest.mark.parametrize("cut", sorted(CUTS))
def test_text_is_cut_as_the_name_says(cut, tmp_path):
    config, weights = make("llama")
    tensors = torch_layout(config, weights)
    path = tmp_path / "model.gguf"
    write(path, config, tensors, tokens=lambda writer: byte_level(writer, cut))
    core = Tokenizer.from_file(str(find(str(path)).folder / "tokenizer.json"))
    assert core.encode("123 1 ab  1", add_special_tokens=False).tokens == CUTS[cut]
    for text in ("a 'LL\n\n x!\n", "naïve ½ ２ 日本", "  <|end|> <think>x"):
        assert core.decode(core.encode(text, add_special_tokens=False).ids, False) == text
    begins = core.encode("a").tokens == ["<|begin|>", "a"]
    whole = core.encode("xyz", add_special_tokens=False).tokens == ["xyz"]  # no merge makes it
    assert begins == whole == (cut in ("llama-bpe", "llama3"))


def test_special_tokens_by_their_kind(file):
    folder = find(str(file)).folder
    core = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = core.encode("a<|turn|><think>", add_special_tokens=False).ids
    assert ids == [TOKENS.index(token) for token in ("a", "<|turn|>", "<think>")]
    assert core.decode(ids) == "a<think>"  # only <|turn|> is special
    raw = json.loads((folder / "tokenizer_config.json").read_text())
    assert (raw["bos_token"], raw["eos_token"]) == ("<|begin|>", "<|end|>")
    assert raw["chat_template"] == "{{ messages[0]['content'] }}"
    assert tokenizer.load(folder).encode("a") == [TOKENS.index("<|begin|>"), TOKENS.index("a")]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("begin", [True, False])
def test_the_begin_of_sequence_is_added_as_the_file_says(family, begin, tmp_path):
    config, weights = make(family)

    def tokens(writer):
        byte_level(writer, "deepseek-r1-qwen")
        writer.add_add_bos_token(begin)

    path = tmp_path / "model.gguf"
    write(path, config, torch_layout(config, weights), tokens=tokens)
    words = tokenizer.load(find(str(path)).folder)
    first = [TOKENS.index("<|begin|>")] if begin else []
    assert words.encode("1 2") == [*first, *(TOKENS.index(token) for token in ("1", "Ġ", "2"))]


def test_the_end_of_sequence_is_added_when_the_file_says_so(tmp_path):
    config, weights = make("qwen2")

    def tokens(writer):
        byte_level(writer, "qwen2")
        writer.add_add_eos_token(True)

    path = tmp_path / "model.gguf"
    write(path, config, torch_layout(config, weights), tokens=tokens)
    core = Tokenizer.from_file(str(find(str(path)).folder / "tokenizer.json"))
    assert core.encode("a").tokens == ["a", "<|end|>"]
    assert core.encode("a", "1").tokens == ["a", "<|end|>", "1", "<|end|>"]


def test_normal_form_c_is_qwens_alone(tmp_path):
    config, weights = make("llama")
    found = {}
    for cut in ("qwen2", "llama-bpe"):
        path = tmp_path / f"{cut}.gguf"
        tensors = torch_layout(config, weights)
        write(path, config, tensors, tokens=lambda writer, cut=cut: byte_level(writer, cut))
        core = Tokenizer.from_file(str(find(str(path)).folder / "tokenizer.json"))
        found[cut] = len(core.encode("e\N{COMBINING ACUTE ACCENT}", add_special_tokens=False).ids)
    assert found == {"qwen2": 2, "llama-bpe": 3}


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
PIECES += ["▁a", "▁b", "ab", "▁ab", "▁abc", "▁", "a", "b", "c", "ba"]


def pieces(writer) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(PIECES)
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (len(PIECES) - 259))
    writer.add_token_scores([0.0] * 259 + [-float(n) for n in range(len(PIECES) - 259)])
    for name, number in (("unk", 0), ("bos", 1), ("eos", 2)):
        getattr(writer, f"add_{name}_token_id")(number)


def test_sentence_pieces(tmp_path):
    config, weights = make("llama", len(PIECES))
    path = tmp_path / "model.gguf"
    write(path, config, torch_layout(config, weights), tokens=pieces)
    words = tokenizer.load(find(str(path)).folder)

    def tokens(text: str) -> list[str]:
        return [PIECES[token] for token in words.encode(text)]

    assert tokens("ba") == ["<s>", "▁b", "a"]  # "▁b" has a better score than "ba"
    assert tokens("abc ab") == ["<s>", "▁abc", "▁ab"]
    assert tokens("b a") == ["<s>", "▁b", "▁a"]
    assert tokens("cé") == ["<s>", "▁", "c", "<0xC3>", "<0xA9>"]
    for text in ("abc  ab", " a", "é\n日本"):
        assert words.decode(words.encode(text)) == text


FACTORS = {
    "Llama-3.1-8B": (500000.0, 128, 8.0, 1.0, 4.0, 8192),
    "Llama-3.2-1B": (500000.0, 64, 32.0, 1.0, 4.0, 8192),
    "other bounds": (10000.0, 64, 4.0, 0.5, 3.0, 8192),
}


@pytest.mark.parametrize("name", sorted(FACTORS))
def test_scaling_is_found_again_in_its_factors(name):
    theta, size, factor, low, high, length = FACTORS[name]
    scaling = Llama3Scaling(
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=length,
    )
    config = ModelConfig(
        **{**vars(MODELS["llama"]), "rope_theta": theta, "head_dim": size, "rope_scaling": scaling}
    )
    found = rope_factors.scaling_of(factors(config), theta, size, length, "it")
    again = ModelConfig.from_hf({**config.to_hf(), "rope_scaling": found})
    np.testing.assert_allclose(
        transformer.frequencies(again), transformer.frequencies(config), rtol=1e-5
    )
    if name.startswith("Llama"):
        assert again == config


def test_factors_of_another_formula_are_refused():
    with pytest.raises(ValueError, match="it does not follow Llama 3.1's formula"):
        rope_factors.scaling_of(np.linspace(1, 8, 32), 500000.0, 64, 8192, "it")
    with pytest.raises(ValueError, match="it does not follow"):
        rope_factors.scaling_of(np.ones(16), 500000.0, 64, 8192, "it")


def repeated(writer) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(["a", "b", "a"])
    writer.add_token_types([1, 1, 1])
    writer.add_token_merges(MERGES)


REFUSED = {
    "twice": ({"tokens": repeated}, "lists a token twice; take another conversion"),
    "cut": (
        {"tokens": lambda writer: byte_level(writer, "poro-chat")},
        "tokenizer.ggml.pre = 'poro-chat'.*allowed: gpt-2, smollm, .*Hugging Face directory",
    ),
    "no_cut": (
        {"tokens": lambda writer: byte_level(writer, "default")},
        "tokenizer.ggml.pre = 'default'",
    ),
    "wordpiece": (
        {"tokens": lambda writer: writer.add_tokenizer_model("bert")},
        "has a tokenizer of kind 'bert'; allowed: 'gpt2', 'llama'",
    ),
    "no_tokenizer": ({"tokens": lambda writer: None}, "has a tokenizer of kind None"),
    "experts": ({"llama.expert_count": 8}, "has llama.expert_count = 8; allowed: none"),
    "part": ({"split.count": 3}, "is one of 3 parts; join them with llama-gguf-split --merge"),
    "yarn": ({"llama.rope.scaling.type": "yarn"}, "rope_type = 'yarn' is not supported"),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_not_supported_is_refused_by_name(name, tmp_path):
    settings, message = REFUSED[name]
    config, weights = make("llama")
    path = write(tmp_path / "model.gguf", config, torch_layout(config, weights), **settings)
    with pytest.raises(ValueError, match=message) as caught:
        hf.load(find(str(path)))
    assert "model.gguf" in str(caught.value)


def test_another_architecture_is_refused_by_name(tmp_path):
    writer = package.GGUFWriter(tmp_path / "model.gguf", "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"architecture 'gemma3'; allowed: \('llama', 'qwen2'"):
        find(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize("name", ["rope.dimension_count", "attention.value_length"])
def test_a_part_of_a_head_is_refused(name, tmp_path, monkeypatch):
    config, weights = make("llama")
    method = {"rope.dimension_count": "add_rope_dimension_count"}.get(name, "add_value_length")
    genuine = getattr(package.GGUFWriter, method)
    monkeypatch.setattr(package.GGUFWriter, method, lambda writer, size: genuine(writer, size // 2))
    path = write(tmp_path / "model.gguf", config, torch_layout(config, weights))
    with pytest.raises(ValueError, match=f"has llama.{name} = 8; allowed: 16, the size of a head"):
        find(str(path))


@pytest.mark.parametrize("part", [0, 3, 20, 400, 0.5, 0.999])
def test_a_truncated_file_is_named_with_the_cure(file, part):
    data = file.read_bytes()
    file.write_bytes(data[: int(part * len(data)) if isinstance(part, float) else part])
    with pytest.raises(ValueError, match="model.gguf is damaged .*; copy or download it again"):
        find(str(file))


def test_damage_anywhere_in_the_header_is_an_error_that_names_the_file(file):
    data = bytearray(file.read_bytes())
    header = gguf_file.read(file)
    end = min(entry.offset for entry in header.tensors.values())
    generator = np.random.default_rng(0)
    named = 0
    for _ in range(60):
        broken = data.copy()
        at = generator.integers(4, end)
        broken[at : at + 8] = generator.integers(0, 256, 8, np.uint8).tobytes()
        file.write_bytes(broken)
        try:
            hf.load(find(str(file)))
        except ValueError as error:
            named += "model.gguf" in str(error)
            assert "model.gguf" in str(error), error
    assert named > 5


def test_tensors_of_another_shape_or_name_are_named(tmp_path):
    config, weights = make("llama")
    tensors = torch_layout(config, weights)
    path = tmp_path / "model.gguf"
    name = "model.layers.1.mlp.up_proj.weight"
    write(path, config, {**tensors, name: tensors[name][:-2]})
    with pytest.raises(ValueError, match=rf"{name} has shape \(30, 64\) in .*model.gguf"):
        hf.load(find(str(path)))
    write(path, config, {key: value for key, value in tensors.items() if key != name})
    with pytest.raises(ValueError, match=f"model.gguf does not hold .*missing tensors {name}"):
        hf.load(find(str(path)))
    write(path, config, {**tensors, "model.layers.0.mlp.up_proj.bias": np.ones(32, np.float32)})
    with pytest.raises(ValueError, match="unknown tensors model.layers.0.mlp.up_proj.bias"):
        hf.load(find(str(path)))


def test_a_quantisation_that_cannot_be_read_is_named(file):
    header = gguf_file.read(file)
    entry = header.tensors["blk.0.attn_q.weight"]
    named = b"blk.0.attn_q.weight" + (2).to_bytes(4, "little")
    data = file.read_bytes()
    at = data.index(named) + len(named) + 16
    assert data[at : at + 4] == entry.kind.to_bytes(4, "little")
    for kind in (24, 99):  # I8, which is no quantisation, and one that does not exist
        file.write_bytes(data[:at] + kind.to_bytes(4, "little") + data[at + 4 :])
        with pytest.raises(ValueError, match="blk.0.attn_q.weight in .*model.gguf is quantized"):
            find(str(file))


def test_a_missing_package_is_named(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match="needs the gguf package .*pip install gguf"):
        find(str(file))
