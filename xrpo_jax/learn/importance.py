"""Truncated importance weights from the policy that sampled to the one at the start of an update.

The two differ where rollouts were drawn some updates ago (train.async_rollouts), and in numerics.
A ratio part compares the current policy with the latter; this corrects for the former.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np

from xrpo_jax.arrays import Batch
from xrpo_jax.learn.ratio import LIMIT

LEVELS = ("none", "token", "sequence")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Truncated:
    """`min(pi_old / mu, cap)` of each token, or of the product over the row's tokens.

    mu is what the sampler said (`Batch.sampler_logp`), pi_old what the trainer says of the tokens
    before it updates (`Batch.old_logp`). 1 where the sampler saw another context than is trained
    on. As in "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (token) and
    TRL's and verl's truncated importance sampling (both).
    """

    level: str  # token or sequence
    cap: float
    reads_old_logp = True

    def __call__(self, batch: Batch) -> jax.Array:
        """Constants f32[n,T], by which the weights of the token losses are multiplied."""
        return jax.lax.stop_gradient(jnp.minimum(jnp.exp(self._log_ratio(batch, jnp)), self.cap))

    def statistics(self, batch: Batch) -> dict[str, float]:
        """For the log, over trained tokens of a NumPy batch: the weights' mean, and of the ratios
        the largest and the share that is truncated."""
        ratio = np.exp(self._log_ratio(batch, np))[batch.mask > 0]
        if not ratio.size:
            return {}
        return {
            "importance_mean": float(np.minimum(ratio, self.cap).mean()),
            "importance_max": float(ratio.max()),
            "importance_truncated": float((ratio > self.cap).mean()),
        }

    def _log_ratio(self, batch: Batch, numpy: ModuleType) -> jax.Array:
        seen = (batch.mask > 0) & numpy.isfinite(batch.sampler_logp)
        gap = numpy.where(seen, batch.old_logp - batch.sampler_logp, 0.0)
        if self.level == "sequence":
            gap = numpy.broadcast_to(numpy.sum(gap, axis=1, keepdims=True), gap.shape)
        return numpy.clip(gap, -LIMIT, LIMIT)
