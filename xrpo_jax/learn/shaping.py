"""Shapings `(advantage f32[n], Batch, Groups) -> f32[n]`, applied in order after the advantage."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from xrpo_jax.arrays import Batch
from xrpo_jax.learn.groups import Groups

AVERAGES = ("group", "correct")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Novelty:
    """XRPO's sharpening: correct rows that are rare under the old policy gain advantage.

    With `s` the row's mean old log-prob and `η = exp(s - mean s)`, a correct row's advantage grows
    by `min(max(weight (1 - η), 0), cap A)` (2510.06672; the equation is second-hand). The mean is
    over the whole group (paper) or over its correct rows (`average="correct"`, ours). A correct
    row whose advantage is negative is left alone [ours].
    """

    weight: float = 2.5
    cap: float = 0.5
    average: str = "group"
    reads_old_logp = True

    def __post_init__(self):
        if self.average not in AVERAGES:
            raise ValueError(
                f"algorithm.novelty_average={self.average!r}; allowed: {', '.join(AVERAGES)}"
            )

    def __call__(self, advantage: jax.Array, batch: Batch, groups: Groups) -> jax.Array:
        length = jnp.maximum(jnp.sum(batch.mask, axis=1), 1.0)
        level = jnp.sum(jnp.where(batch.mask > 0, batch.old_logp, 0.0), axis=1) / length
        among = jnp.ones_like(batch.correct) if self.average == "group" else batch.correct
        centre = groups.total(level * among) / jnp.maximum(groups.total(among), 1.0)
        rarity = 1.0 - jnp.exp(jnp.minimum(level - centre, 0.0))  # max(1 - η, 0) without overflow
        bonus = jnp.minimum(self.weight * rarity, self.cap * jnp.maximum(advantage, 0.0))
        return jnp.where(batch.correct > 0, advantage + bonus, advantage)
