"""Token losses that are added to the surrogate: `(TokenStats, Batch, Scores) -> f32[n,S]`.

The estimators take `d = log π_ref - log π` (shared parts, KL).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from xrpo_jax.arrays import Batch, Scores, TokenStats


def k1(d: jax.Array) -> jax.Array:
    """`-d`: unbiased value, zero expected gradient."""
    return -d


def k2(d: jax.Array) -> jax.Array:
    """`d²/2`: biased value, gradient of the exact KL."""
    return 0.5 * jnp.square(d)


def k3(d: jax.Array) -> jax.Array:
    """`exp(d) - 1 - d`: unbiased value, never negative; gradient of KL(π_ref ‖ π) instead."""
    return jnp.expm1(jnp.clip(d, -20.0, 20.0)) - d


ESTIMATORS: dict[str, Callable] = {"k1": k1, "k2": k2, "k3": k3}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferenceKL:
    """`beta` times an estimate of KL(π ‖ π_ref) on each token (GRPO, 2402.03300)."""

    beta: float
    estimator: Callable = k3
    needs = ("ref_logp",)

    def __call__(self, stats: TokenStats, batch: Batch, scores: Scores) -> jax.Array:
        d = jnp.where(batch.mask > 0, batch.ref_logp - stats.logp, 0.0)
        return self.beta * self.estimator(d)
