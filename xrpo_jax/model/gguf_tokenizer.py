"""The tokenizer of a GGUF file as Hugging Face's tokenizer.json and tokenizer_config.json.

A GGUF file keeps tokens and merges; how text is cut before merging it keeps as a name only. Those
that are listed here are known; another one is refused, since a wrong cut gives other tokens than
the model was trained on, and nothing would say so.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers import decoders as decode
from tokenizers import models as model
from tokenizers import normalizers as normalize
from tokenizers import pre_tokenizers as cut
from tokenizers import processors as process

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED = 1, 2, 3, 4, 5  # and 6, a byte
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
_QWEN = ("qwen2", "deepseek-r1-qwen")
CUTS = ("gpt-2", "smollm", *_QWEN, *_LLAMA3)
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # what stands for a space in SentencePiece
_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write(file: Path, fields: dict[str, Any], folder: Path) -> None:
    """Writes the tokenizer in the metadata of `file` to `folder`; ValueError when it is unknown."""
    form = fields.get("tokenizer.ggml.model")
    if form not in ("gpt2", "llama"):
        raise ValueError(f"{file} has a tokenizer of kind {form!r}; allowed: 'gpt2', 'llama'")
    tokens = fields["tokenizer.ggml.tokens"]
    kinds = fields.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    used = [
        (token, number, kind)
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind != _UNUSED  # such a token only fills up the model's table
    ]
    vocabulary = {token: number for token, number, _ in used}
    if len(vocabulary) < len(used):
        raise ValueError(f"{file} lists a token twice; take another conversion of the model")
    special = {
        name: tokens[number]
        for name, key in (
            ("bos_token", "bos"),
            ("eos_token", "eos"),
            ("unk_token", "unknown"),
            ("pad_token", "padding"),
        )
        if (number := fields.get(f"tokenizer.ggml.{key}_token_id")) is not None
    }
    if form == "gpt2":
        tokenizer = _byte_level(file, fields, vocabulary)
    else:
        tokenizer = _sentence_piece(fields, vocabulary, special.get("unk_token", tokens[0]))
    for token, _, kind in used:
        if kind in (_UNKNOWN, _CONTROL):
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    tokenizer.post_processor = _framing(fields, vocabulary, special)
    tokenizer.save(str(folder / "tokenizer.json"))
    raw = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    raw |= special
    if "tokenizer.chat_template" in fields:
        raw["chat_template"] = fields["tokenizer.chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(raw, indent=2) + "\n")


def _byte_level(file: Path, fields: dict[str, Any], vocabulary: dict[str, int]) -> Tokenizer:
    """Returns a BPE over bytes, which are written as printable characters."""
    name = fields.get("tokenizer.ggml.pre")
    if name not in CUTS:
        raise ValueError(
            f"{file} has tokenizer.ggml.pre = {name!r}, a way to cut text that is not known here; "
            f"allowed: {', '.join(CUTS)}. Take the model's Hugging Face directory, or a newer "
            "conversion when there is none"
        )
    tokenizer = Tokenizer(
        model.BPE(
            vocab=vocabulary,
            merges=[tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]],
            ignore_merges=name in _LLAMA3,
        )
    )
    if name in _QWEN:
        tokenizer.normalizer = normalize.NFC()
    if name in _QWEN or name in _LLAMA3:
        pieces = _PIECES.format(digits="{1,3}" if name in _LLAMA3 else "")
        cuts = [cut.Split(Regex(pieces), behavior="isolated")]
    else:
        cuts = [cut.Digits(individual_digits=True)] if name == "smollm" else []
    own = not (name in _QWEN or name in _LLAMA3)  # GPT-2's own expression
    cuts.append(cut.ByteLevel(add_prefix_space=False, use_regex=own))
    tokenizer.pre_tokenizer = cut.Sequence(cuts)
    tokenizer.decoder = decode.ByteLevel()
    return tokenizer


def _sentence_piece(fields: dict[str, Any], vocabulary: dict[str, int], unknown: str) -> Tokenizer:
    """Returns Llama 2's BPE over characters, whose merges follow from the scores of its tokens."""
    scores = fields["tokenizer.ggml.scores"]
    merges = []
    for token, number in vocabulary.items():
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in vocabulary and right in vocabulary:
                order = (-scores[number], vocabulary[left], vocabulary[right])
                merges.append((order, (left, right)))
    tokenizer = Tokenizer(
        model.BPE(
            vocab=vocabulary,
            merges=[pair for _, pair in sorted(merges)],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = fields.get("tokenizer.ggml.add_space_prefix", True)
    before = [normalize.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalize.Sequence([*before, normalize.Replace(" ", _SPACE)])
    after = [decode.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decode.Sequence(
        [decode.Replace(_SPACE, " "), decode.ByteFallback(), decode.Fuse(), *after]
    )
    return tokenizer


def _framing(fields: dict[str, Any], vocabulary: dict[str, int], special: dict[str, str]):
    """Returns what puts the begin and end of sequence around a text, as the model has it."""
    # Files that do not say so are of models whose tokenizer always begins with it.
    by_default = (
        fields["tokenizer.ggml.model"] == "llama" or fields.get("tokenizer.ggml.pre") in _LLAMA3
    )
    first = [special["bos_token"]] if fields.get("tokenizer.ggml.add_bos_token", by_default) else []
    last = [special["eos_token"]] if fields.get("tokenizer.ggml.add_eos_token", False) else []
    if not first and not last:
        return process.ByteLevel(trim_offsets=False)
    return process.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *last, *(f"{token}:1" for token in first), "$B:1"]
        + [f"{token}:1" for token in last],
        special_tokens=[(token, vocabulary[token]) for token in {*first, *last}],
    )
