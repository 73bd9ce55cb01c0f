"""The models that are measured, and the work for each; made with this library's own parts."""

from __future__ import annotations

import dataclasses
import pathlib

import jax
from bench_work import Work, limits, texts

from xrpo_jax import config, tokenizer
from xrpo_jax.model import export, params
from xrpo_jax.model.config import ModelConfig

SHORTEST_PROMPT, LONGEST_PROMPT = 32, 41
SMOLLM2 = pathlib.Path("checkpoints/SmolLM2-135M-Instruct")


def tiny(**changes) -> ModelConfig:
    """A Llama of .8 M parameters at the embedded policy's vocabulary; `changes` replace fields."""
    model = ModelConfig(
        family="llama",
        vocab_size=416,
        hidden_size=128,
        intermediate_size=384,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        eos_token_ids=(2,),
        bos_token_id=1,
        pad_token_id=0,
    )
    return dataclasses.replace(model, **changes)


def model_folder(name: str, folder: pathlib.Path, **changes) -> str:
    """The Hugging Face directory of `smollm2` or `tiny`; the latter is made in `folder`.

    Raises FileNotFoundError without the former.
    """
    if name == "smollm2":
        if not (SMOLLM2 / "config.json").is_file():
            raise FileNotFoundError(f"{SMOLLM2} is not there; run bash scripts/fetch_smollm2.sh")
        return str(SMOLLM2.absolute())
    parts = (f"{key}={value}" for key, value in sorted(changes.items()))
    target = folder / ",".join(["tiny", *parts])
    if not (target / "config.json").is_file():
        model = tiny(**changes)
        drawn = params.init(model, jax.random.PRNGKey(0))
        export.save(target, model, drawn, tokenizer_dir=config.EMBEDDED)
    return str(target.absolute())


def make_work(
    kind: str,
    model: str,
    dtype: str,
    *,
    prompts: int = 8,
    samples: int = 8,
    new_tokens: int = 64,
    prompt_length: tuple[int, int] = (SHORTEST_PROMPT, LONGEST_PROMPT),
) -> Work:
    """The work of a kind for the model in the directory `model`."""
    words = tokenizer.load(model)
    said = texts(words.encode, prompts, *prompt_length)
    return Work(
        kind=kind,
        model=model,
        dtype=dtype,
        texts=said,
        prompts=tuple(tuple(words.encode(text)) for text in said),
        samples=samples,
        limits=limits(kind, prompts * samples, new_tokens),
    )
