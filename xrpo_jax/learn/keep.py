"""Which rows are trained on, `(Batch, Groups) -> f32[n]` of 0 and 1.

A row that is not kept leaves numerator and denominator of the loss alike; it still counts in its
group's mean and standard deviation.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from xrpo_jax.arrays import Batch
from xrpo_jax.learn.groups import Groups
from xrpo_jax.types import Kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stopped:
    """Drops rows cut off by the token limit (DAPO's overlong filtering, 2503.14476)."""

    def __call__(self, batch: Batch, groups: Groups) -> jax.Array:
        return batch.stopped


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixed:
    """Drops rows of groups whose rewards are all equal.

    SKPO's segments are compared with their tracker, not with the group: they stay, and their reward
    says nothing of the answers'.
    """

    def __call__(self, batch: Batch, groups: Groups) -> jax.Array:
        segment = batch.kind == Kind.UPSTREAM
        mixed = groups.only(~segment).having(batch.reward).spread(batch.reward) > 0
        return (mixed | segment).astype(jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithoutPlainFailures:
    """Drops plain failures of a prompt that only seeded rollouts solved [ours]."""

    def __call__(self, batch: Batch, groups: Groups) -> jax.Array:
        plain = (batch.kind == Kind.PLAIN).astype(jnp.float32)
        rescued = (groups.total(batch.correct * (1 - plain)) > 0) & (
            groups.total(batch.correct * plain) == 0
        )
        return jnp.where(rescued & (plain > 0), 0.0, 1.0)
