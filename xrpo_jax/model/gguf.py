"""A GGUF file's architecture as a config.json, and its tensors as Hugging Face's."""

import functools
import re
from pathlib import Path
from typing import Any

import numpy as np

from xrpo_jax.model import gguf_file
from xrpo_jax.model.files import Stored
from xrpo_jax.model.gguf_file import Header
from xrpo_jax.model.rope_factors import scaling_of

FAMILIES = ("llama", "qwen2", "qwen3")
_EMBED, _HEAD, _FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
_TOP = {
    _EMBED: "model.embed_tokens.weight",
    _HEAD: "lm_head.weight",
    "output_norm.weight": "model.norm.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Settings under which these families compute something else than Hugging Face's code for them.
_REFUSED = ("expert_count", "attention.sliding_window", "attention.scale", "logit_scale")


def read(file: Path) -> Header:
    """Reads the header of a model; ValueError names a damaged file or what is not supported."""
    header = gguf_file.read(file)
    family = header.fields.get("general.architecture")
    if family not in FAMILIES:
        raise ValueError(f"{file} holds a model of architecture {family!r}; allowed: {FAMILIES}")
    parts = header.fields.get("split.count", 1)
    if parts > 1:
        raise ValueError(f"{file} is one of {parts} parts; join them with llama-gguf-split --merge")
    for name in _REFUSED:
        if header.fields.get(f"{family}.{name}"):
            value = header.fields[f"{family}.{name}"]
            raise ValueError(f"{file} has {family}.{name} = {value}; allowed: none")
    if _EMBED not in header.tensors:
        raise ValueError(f"{file} has no tensor {_EMBED}; take a file that holds the whole model")
    return header


def config(header: Header) -> dict[str, Any]:
    """Returns the dict of a Hugging Face config.json for the model; ValueError names the field."""
    family = header.fields["general.architecture"]
    get = functools.partial(_get, header)

    def whole(name: str, default: int | None = None) -> int:
        value = get(name, default)
        if not isinstance(value, int):
            raise ValueError(f"{header.file} has {family}.{name} = {value!r}; allowed: a number")
        return value

    heads, width = whole("attention.head_count"), whole("embedding_length")
    head_dim = whole("attention.key_length", width // heads)
    for name in ("rope.dimension_count", "attention.value_length"):
        if get(name, head_dim) != head_dim:
            raise ValueError(
                f"{header.file} has {family}.{name} = {get(name)}; allowed: {head_dim}, the size "
                "of a head"
            )
    theta = get("rope.freq_base", 10000.0)
    return {
        "model_type": family,
        # Of the table, which may be longer than the vocabulary.
        "vocab_size": header.tensors[_EMBED].shape[0],
        "hidden_size": width,
        "intermediate_size": whole("feed_forward_length"),
        "num_hidden_layers": whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": whole("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rope_theta": theta,
        "rope_scaling": _scaling(header, theta, head_dim),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon", 1e-6),
        "tie_word_embeddings": _HEAD not in header.tensors,
        "attention_bias": family != "qwen2" and "blk.0.attn_q.bias" in header.tensors,
        "max_position_embeddings": whole("context_length"),
        "bos_token_id": header.fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": header.fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": header.fields.get("tokenizer.ggml.padding_token_id"),
    }


def tensors(file: Path) -> dict[str, Stored]:
    """Describes every tensor under Hugging Face's name and in its layout; the errors of `read`."""
    header = read(file)
    return {
        _hf_name(name): Stored(
            file=file,
            dtype="F32",  # as it is read
            shape=entry.shape,
            read=functools.partial(_tensor, header, name),
        )
        for name, entry in header.tensors.items()
        if name != _FACTORS  # they became the config's rope_scaling
    }


def _get(header: Header, name: str, default: Any = None) -> Any:
    """Returns the metadata `<family>.<name>`."""
    return header.fields.get(f"{header.fields['general.architecture']}.{name}", default)


def _hf_name(name: str) -> str:
    part = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if part and part[2] in _LAYER:
        return f"model.layers.{part[1]}.{_LAYER[part[2]]}.{part[3]}"
    return _TOP.get(name, name)


def _tensor(header: Header, name: str) -> np.ndarray:
    found = gguf_file.tensor(header, name)
    part = re.fullmatch(r"blk\.\d+\.attn_(q|k)\.(weight|bias)", name)
    if not part or header.fields["general.architecture"] != "llama":
        return found
    heads = _get(header, "attention.head_count")
    if part[1] == "k":
        heads = _get(header, "attention.head_count_kv", heads)
    # llama.cpp rotates the pairs (2i, 2i + 1) of a head where Hugging Face rotates (i, i + E/2).
    pairs = found.reshape(heads, -1, 2, *found.shape[1:])
    return pairs.swapaxes(1, 2).reshape(found.shape)


def _scaling(header: Header, theta: float, head_dim: int) -> dict[str, Any] | None:
    """Returns the config's rope_scaling from the metadata or from the tensor of factors."""
    kind = _get(header, "rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        return {"rope_type": kind}  # which the config refuses by name
    if _FACTORS in header.tensors:
        length = _get(header, "rope.scaling.original_context_length", 8192)
        factors = gguf_file.tensor(header, _FACTORS)
        return scaling_of(factors, theta, head_dim, length, f"{_FACTORS} of {header.file}")
    factor = _get(header, "rope.scaling.factor", _get(header, "rope.scale_linear", 1.0))
    return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}
