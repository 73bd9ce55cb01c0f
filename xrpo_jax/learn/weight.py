"""Aggregation as a weight per token, `(Batch, Groups) -> f32[n,S]`, summing to 1 over all devices.

The weights are constants of the gradient, so micro-batches, packing, padding, row order and
device count cannot change the loss. They sum to 0 only when every token is masked.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from xrpo_jax.arrays import Batch
from xrpo_jax.learn.groups import Groups


def _rows(batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Trained tokens of each row f32[n], and whether there are any f32[n]."""
    length = jnp.sum(batch.mask, axis=1)
    return length, (length > 0).astype(jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenMean:
    """DAPO: every token of the update batch weighs the same."""

    def __call__(self, batch: Batch, groups: Groups) -> jax.Array:
        length, _ = _rows(batch)
        return batch.mask / jnp.maximum(groups.everything(length), 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceMean:
    """GRPO: every row weighs the same, and within it every token."""

    def __call__(self, batch: Batch, groups: Groups) -> jax.Array:
        length, present = _rows(batch)
        share = 1.0 / (jnp.maximum(length, 1.0) * jnp.maximum(groups.everything(present), 1.0))
        return batch.mask * share[:, None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConstantLength:
    """Dr.GRPO: token sums over the constant `limit` (tokens), averaged over rows.

    The one aggregation whose weights sum to less than 1, by the paper's intent.
    """

    limit: int

    def __call__(self, batch: Batch, groups: Groups) -> jax.Array:
        _, present = _rows(batch)
        return batch.mask / (self.limit * jnp.maximum(groups.everything(present), 1.0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptMean:
    """Every prompt weighs the same, within it every row, within that every token."""

    def __call__(self, batch: Batch, groups: Groups) -> jax.Array:
        length, present = _rows(batch)
        size = jnp.maximum(groups.total(present), 1.0)
        prompts = jnp.maximum(groups.everything(present / size), 1.0)
        share = present / (jnp.maximum(length, 1.0) * size * prompts)
        return batch.mask * share[:, None]
