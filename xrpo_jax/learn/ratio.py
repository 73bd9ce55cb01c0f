"""Log importance ratios `(TokenStats, Batch) -> f32[n,S]` of the current over the old policy.

They are clamped to ±20 before anyone takes `exp`.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from xrpo_jax.arrays import Batch, TokenStats

LIMIT = 20.0


def _delta(stats: TokenStats, batch: Batch) -> jax.Array:
    return jnp.where(batch.mask > 0, stats.logp - batch.old_logp, 0.0)


def _sequence_mean(delta: jax.Array, batch: Batch) -> jax.Array:
    length = jnp.maximum(jnp.sum(batch.mask, axis=1, keepdims=True), 1.0)
    return jnp.broadcast_to(jnp.sum(delta, axis=1, keepdims=True) / length, delta.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Token:
    """GRPO: `log π(o_t) - log π_old(o_t)`."""

    def __call__(self, stats: TokenStats, batch: Batch) -> jax.Array:
        return jnp.clip(_delta(stats, batch), -LIMIT, LIMIT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequence:
    """GSPO (2507.18071): the mean over the row's tokens, the same for each of them."""

    def __call__(self, stats: TokenStats, batch: Batch) -> jax.Array:
        return jnp.clip(_sequence_mean(_delta(stats, batch), batch), -LIMIT, LIMIT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceToken:
    """GSPO-token (2507.18071): the sequence's value with the token's own gradient."""

    def __call__(self, stats: TokenStats, batch: Batch) -> jax.Array:
        delta = _delta(stats, batch)
        level = jax.lax.stop_gradient(_sequence_mean(delta, batch))
        own = delta - jax.lax.stop_gradient(delta)  # exactly 0, so the value stays `level`
        return jnp.clip(level, -LIMIT, LIMIT) + own
