"""Surrogates `(log_ratio, advantage, TokenStats, Batch) -> (objective, clipped)`, both f32[n,S].

The objective is to be maximised; `clipped` is 1 where the clip took the token's gradient away.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from xrpo_jax.arrays import Batch, TokenStats
from xrpo_jax.types import Kind

Surrogate = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPO:
    """`min(r A, clip(r, 1 - low, 1 + high) A)`."""

    low: float = 0.2
    high: float = 0.2

    def __call__(
        self, log_ratio: jax.Array, advantage: jax.Array, stats: TokenStats, batch: Batch
    ) -> Surrogate:
        ratio = jnp.exp(log_ratio)
        clipped = jnp.clip(ratio, 1.0 - self.low, 1.0 + self.high)
        objective = jnp.minimum(ratio * advantage, clipped * advantage)
        active = clipped * advantage < ratio * advantage
        return objective, active.astype(jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dual:
    """PPO with a floor of `bound * A` where the advantage is negative (1912.09729)."""

    low: float = 0.2
    high: float = 0.2
    bound: float = 3.0

    def __call__(
        self, log_ratio: jax.Array, advantage: jax.Array, stats: TokenStats, batch: Batch
    ) -> Surrogate:
        objective, clipped = PPO(low=self.low, high=self.high)(log_ratio, advantage, stats, batch)
        floor = self.bound * advantage
        below = (advantage < 0) & (objective < floor)
        return jnp.where(below, floor, objective), jnp.maximum(clipped, below.astype(jnp.float32))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scored:
    """CISPO (2506.13585): `sg(clip(r, floor, cap)) A log π`; the bounds are absolute."""

    cap: float = 5.0
    floor: float = 0.0

    def __call__(
        self, log_ratio: jax.Array, advantage: jax.Array, stats: TokenStats, batch: Batch
    ) -> Surrogate:
        ratio = jax.lax.stop_gradient(jnp.exp(log_ratio))
        objective = jnp.clip(ratio, self.floor, self.cap) * advantage * stats.logp
        return objective, ((ratio > self.cap) | (ratio < self.floor)).astype(jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByKind:
    """One surrogate for the rows of a kind and another for the rest."""

    kind: Kind
    yes: Callable
    no: Callable

    def __call__(
        self, log_ratio: jax.Array, advantage: jax.Array, stats: TokenStats, batch: Batch
    ) -> Surrogate:
        chosen = (batch.kind == self.kind)[:, None]
        pairs = zip(
            self.yes(log_ratio, advantage, stats, batch),
            self.no(log_ratio, advantage, stats, batch),
            strict=True,
        )
        return tuple(jnp.where(chosen, yes, no) for yes, no in pairs)
