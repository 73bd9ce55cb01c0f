"""A random policy of a few thousand parameters, and a tokenizer with one token a character."""

from __future__ import annotations

import json
import pathlib
import tempfile

import jax
import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from xrpo_jax.model import export, params
from xrpo_jax.model.config import ModelConfig
from xrpo_jax.types import Conversation, text_of

SPECIAL = ("<pad>", "<bos>", "<eos>")
CHARACTERS = "abcdefghijklmnop:\n.!?"
VOCABULARY = {token: i for i, token in enumerate((*SPECIAL, *CHARACTERS))}
STOPS = ("<eos>", ".", "!")  # several, so that most rows stop within a few tokens

MODEL = ModelConfig(
    family="llama",
    vocab_size=len(VOCABULARY),
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=64,
    tie_word_embeddings=True,
    eos_token_ids=tuple(VOCABULARY[stop] for stop in STOPS),
    bos_token_id=VOCABULARY["<bos>"],
    pad_token_id=VOCABULARY["<pad>"],
)


def weights(model: ModelConfig = MODEL, seed: int = 0, scale: float = 0.3) -> dict:
    """Random parameters, made by NumPy so that nothing is compiled."""
    generator = np.random.default_rng(seed)

    def make(param):
        noise = scale * generator.standard_normal(param.shape)
        return (noise + (param.init == "ones")).astype(np.float32)

    return jax.tree.map(make, params.declare(model))


def encode(text: str) -> list[int]:
    """As the tokenizer below does."""
    return [VOCABULARY["<bos>"], *(VOCABULARY[character] for character in text)]


def encode_prompt(prompt: Conversation) -> list[int]:
    """As a run without a chat template does, for a conversation of one turn."""
    return encode(text_of(prompt))


def decode(tokens) -> str:
    """As the tokenizer below does."""
    return "".join((*SPECIAL, *CHARACTERS)[token] for token in tokens if token >= len(SPECIAL))


def save(path: str | pathlib.Path, model: ModelConfig = MODEL, seed: int = 0) -> pathlib.Path:
    """Write a Hugging Face directory and return it."""
    tokenizer = Tokenizer(models.WordLevel(vocab=VOCABULARY, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", VOCABULARY["<bos>"])]
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "clean_up_tokenization_spaces": False,
    }
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(f"{folder}/tokenizer.json")
        pathlib.Path(folder, "tokenizer_config.json").write_text(json.dumps(settings))
        export.save(path, model, weights(model, seed), tokenizer_dir=folder)
    return pathlib.Path(path)
