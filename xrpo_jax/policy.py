"""Log-probs and entropies of given tokens under the policy, chunked over positions.

Shapes: n rows · S tokens of a row · V vocabulary.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from xrpo_jax.model import transformer
from xrpo_jax.model.config import ModelConfig
from xrpo_jax.types import Params, TokenStats


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """What a forward pass of the trainer needs beside parameters; static under jit."""

    model: ModelConfig
    temperature: float = 1.0
    dtype: str = "float32"  # of the computation; parameters stay float32
    remat: bool = False
    chunk: int = 128  # positions whose logits are in memory at one time


def token_stats(policy: Policy, params: Params, tokens: jax.Array, length: jax.Array) -> TokenStats:
    """Log-prob and entropy f32[n,S] of each token given those before it, at the temperature.

    `tokens` i32[n,S] start at column 0 and are real up to `length` i32[n]. Column 0, which nothing
    predicts, and padding are 0.
    """
    rows, width = tokens.shape
    columns = jnp.broadcast_to(jnp.arange(width)[None, :], (rows, width))
    valid = columns < length[:, None]
    hidden = transformer.forward(
        params,
        policy.model,
        tokens,
        columns,
        valid,
        dtype=jnp.dtype(policy.dtype),
        remat=policy.remat,
    )

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
        one_chunk(hidden[:, start:stop], tokens[:, start + 1 : stop + 1])
        for start in range(0, width - 1, policy.chunk)
        for stop in [min(start + policy.chunk, width - 1)]
    ]
    real = valid[:, 1:]

    def joined(pieces: list[jax.Array]) -> jax.Array:
        values = jnp.where(real, jnp.concatenate(pieces, axis=1), 0.0)
        return jnp.pad(values, ((0, 0), (1, 0)))

    return TokenStats(
        logp=joined([logp for logp, _ in parts]),
        entropy=joined([entropy for _, entropy in parts]),
    )
