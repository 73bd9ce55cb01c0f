"""Advantages `(Batch, Groups) -> f32[n]`: how much better a row is than its group.

A row whose reward is not finite (it could not be graded) counts in no mean and gets 0, as padding.

Source: shared parts of GRPO (2402.03300), Dr.GRPO (2503.20783), RLOO.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from xrpo_jax.arrays import Batch
from xrpo_jax.learn.groups import Groups


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupZ:
    """GRPO: `(R - mean) / (std + eps)`; 0 in groups of one and where all rewards are equal."""

    ddof: int = 1
    eps: float = 1e-6

    def __call__(self, batch: Batch, groups: Groups) -> jax.Array:
        groups = groups.having(batch.reward)
        std = groups.std(batch.reward, self.ddof)
        centred = batch.reward - groups.mean(batch.reward)
        return jnp.where((std > 0) & (groups.weight > 0), centred / (std + self.eps), 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupMean:
    """Dr.GRPO: `R - mean`; exactly 0 where all rewards are equal."""

    def __call__(self, batch: Batch, groups: Groups) -> jax.Array:
        groups = groups.having(batch.reward)
        centred = batch.reward - groups.mean(batch.reward)
        mixed = groups.spread(batch.reward) > 0
        return jnp.where(mixed & (groups.weight > 0), centred, 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeaveOneOut:
    """RLOO: reward minus the mean of the others' rewards; 0 in groups of one."""

    def __call__(self, batch: Batch, groups: Groups) -> jax.Array:
        groups = groups.having(batch.reward)
        size = groups.size()
        others = (groups.total(batch.reward) - batch.reward) / jnp.maximum(size - 1.0, 1.0)
        mixed = groups.spread(batch.reward) > 0  # implies size > 1
        return jnp.where(mixed & (groups.weight > 0), batch.reward - others, 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tracker:
    """SPO (2509.13232): reward minus what the prompt's tracker foretold, whitened over the batch.

    The tracker's value is a chance of success from 0 to 1; `right` and `wrong` are the rewards of
    both outcomes. Exactly 0 where all differences are equal.
    """

    right: float = 1.0
    wrong: float = 0.0
    ddof: int = 1
    eps: float = 1e-8

    def difference(self, batch: Batch) -> jax.Array:
        """Reward minus foretold reward f32[n], before whitening."""
        return batch.reward - (self.wrong + (self.right - self.wrong) * batch.baseline)

    def __call__(self, batch: Batch, groups: Groups) -> jax.Array:
        everyone = groups.having(batch.reward).joined()
        difference = self.difference(batch)
        centred = difference - everyone.mean(difference)
        std = everyone.std(difference, self.ddof)
        return jnp.where((std > 0) & (everyone.weight > 0), centred / (std + self.eps), 0.0)

    def report(self, batch: Batch, groups: Groups) -> dict[str, jax.Array]:
        return {"tracker_gap": self.difference(batch)}
