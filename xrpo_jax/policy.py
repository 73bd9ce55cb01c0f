"""Log-probs and entropies of given tokens under the policy, chunked over positions.

Shapes: b prompts · P prompt length · n rows · T completion tokens · V vocabulary.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from xrpo_jax.arrays import Params, TokenStats
from xrpo_jax.model import transformer
from xrpo_jax.model.config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """What a forward pass of the trainer needs beside parameters; static under jit."""

    model: ModelConfig
    temperature: float = 1.0
    dtype: str = "float32"  # of the computation; parameters stay float32
    remat: bool = False
    chunk: int = 128  # positions whose logits are in memory at one time


def token_stats(
    policy: Policy,
    params: Params,
    prompt: jax.Array,
    prompt_length: jax.Array,
    tokens: jax.Array,
    length: jax.Array,
) -> TokenStats:
    """Log-prob and entropy f32[n,T] of each completion token given all before it.

    Rows continue prompts i32[b,P], n / b of them each, in order; `tokens` i32[n,T] are real up to
    `length` i32[n], prompts up to `prompt_length` i32[b], at least 1. At the policy's temperature;
    0 on padding.
    """
    rows, width = tokens.shape
    x, hidden = transformer.continued(
        params,
        policy.model,
        prompt,
        prompt_length,
        tokens,
        length,
        dtype=jnp.dtype(policy.dtype),
        remat=policy.remat,
    )
    last = jnp.maximum(prompt_length - 1, 0)[:, None, None]
    first = jnp.take_along_axis(x, last, axis=1)  # what predicts the first token of a completion
    first = jnp.repeat(first, rows // prompt.shape[0], axis=0)
    hidden = jnp.concatenate([first, hidden[:, :-1]], axis=1)

    def one_chunk(hidden: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores = transformer.logits(params, policy.model, hidden) / policy.temperature
        logp = jax.nn.log_softmax(scores, axis=-1)
        # 0 log 0 is 0, in the gradient too: a token may be impossible.
        finite = jnp.maximum(logp, jnp.finfo(jnp.float32).min)
        entropy = -jnp.sum(jnp.exp(logp) * finite, axis=-1)
        return jnp.take_along_axis(logp, target[..., None], axis=-1)[..., 0], entropy

    if policy.chunk < width:  # the backward pass recomputes a chunk's logits, never keeps them
        one_chunk = jax.checkpoint(one_chunk)
    parts = [
        one_chunk(hidden[:, start:stop], tokens[:, start:stop])
        for start in range(0, width, policy.chunk)
        for stop in [min(start + policy.chunk, width)]
    ]
    real = jnp.arange(width)[None, :] < length[:, None]

    def joined(pieces: list[jax.Array]) -> jax.Array:
        return jnp.where(real, jnp.concatenate(pieces, axis=1), 0.0)

    return TokenStats(
        logp=joined([logp for logp, _ in parts]),
        entropy=joined([entropy for _, entropy in parts]),
    )
