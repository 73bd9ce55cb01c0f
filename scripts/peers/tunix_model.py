"""A Hugging Face Llama as a Tunix model, and the tokenizer that Tunix asks for."""

from __future__ import annotations

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from bench_work import Work
from tokenizers import Tokenizer
from tunix.models.llama3 import model as llama
from tunix.models.llama3 import params as llama_params

AXES = ("fsdp", "tp")


def mesh() -> jax.sharding.Mesh:
    """All axes that Tunix names, over the one CPU device."""
    return jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), AXES)


def load(folder: str, dtype: str) -> llama.Llama3:
    """The model of a directory; its parameters, and what it computes in, are of `dtype`.

    Tunix 0.1.7 rotates by its own base whatever the config says (apply_rope is called without it):
    the same work, but other numbers than the model's.
    """
    raw = json.loads((pathlib.Path(folder) / "config.json").read_text())
    config = llama.ModelConfig(
        num_layers=raw["num_hidden_layers"],
        vocab_size=raw["vocab_size"],
        embed_dim=raw["hidden_size"],
        hidden_dim=raw["intermediate_size"],
        num_heads=raw["num_attention_heads"],
        head_dim=raw["head_dim"],
        num_kv_heads=raw["num_key_value_heads"],
        rope_theta=int(raw["rope_theta"]),
        norm_eps=raw["rms_norm_eps"],
        weight_tying=raw["tie_word_embeddings"],
    )
    return llama_params.create_model_from_safe_tensors(
        folder, config, mesh(), dtype=jnp.dtype(dtype)
    )


class Words:
    """The model's tokenizer by Tunix's five methods.

    Tunix takes every pad token for padding, so the pad token must be one that no prompt has. No
    token ends a row: `eos_id` is none of the vocabulary's.
    """

    def __init__(self, folder: str, work: Work):
        self._tokenizer = Tokenizer.from_file(str(pathlib.Path(folder) / "tokenizer.json"))
        self._pad = next(
            token for token in range(100) if all(token not in prompt for prompt in work.prompts)
        )
        for text, tokens in zip(work.texts, work.prompts, strict=True):
            if tuple(self.encode(text)) != tokens:
                raise RuntimeError(f"the tokenizers differ on {text!r}")

    def encode(self, text: str, **_) -> list[int]:
        return self._tokenizer.encode(text).ids

    def decode(self, ids, **_) -> str:
        return self._tokenizer.decode([int(token) for token in ids])

    def bos_id(self) -> int:
        return 0  # Tunix prepends one unless it is 0; the encoder has done so

    def eos_id(self) -> int:
        return -1

    def pad_id(self) -> int:
        return self._pad
