"""A random policy of a few thousand parameters with a tokenizer of single characters."""

from __future__ import annotations

import json
import pathlib
import tempfile

import jax
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from xrpo_jax.model import hf, params
from xrpo_jax.model.config import ModelConfig

SPECIAL = ("<pad>", "<bos>", "<eos>")
CHARACTERS = "abcdefghijklmnop:\n.!?"
VOCABULARY = {token: i for i, token in enumerate((*SPECIAL, *CHARACTERS))}
STOPS = ("<eos>", ".", "!")  # several, so that many rows stop within a few tokens

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
    initializer_range=0.3,
    tie_word_embeddings=True,
    eos_token_ids=tuple(VOCABULARY[stop] for stop in STOPS),
    bos_token_id=VOCABULARY["<bos>"],
    pad_token_id=VOCABULARY["<pad>"],
)


def make_tokenizer() -> Tokenizer:
    """One token a character, after <bos>."""
    tokenizer = Tokenizer(models.WordLevel(vocab=VOCABULARY, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", VOCABULARY["<bos>"])]
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def save(path: str | pathlib.Path, model: ModelConfig = MODEL, seed: int = 0) -> pathlib.Path:
    """Write a Hugging Face directory and return it."""
    with tempfile.TemporaryDirectory() as folder:
        make_tokenizer().save(f"{folder}/tokenizer.json")
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": "<pad>",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "clean_up_tokenization_spaces": False,
        }
        pathlib.Path(folder, "tokenizer_config.json").write_text(json.dumps(settings))
        hf.save(path, model, params.init(model, jax.random.PRNGKey(seed)), tokenizer_dir=folder)
    return pathlib.Path(path)
