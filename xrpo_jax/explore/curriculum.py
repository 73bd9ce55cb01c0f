"""Curricula `(value f64[num_prompts], seed, step, count) -> i64[count]`: the prompts of a step.

They are functions of their arguments alone, so data order needs no saving.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from xrpo_jax import rng


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shuffled:
    """Every prompt once an epoch, in an order of its own each epoch."""

    def __call__(self, value: np.ndarray, seed: int, step: int, count: int) -> np.ndarray:
        size = len(value)
        epoch, offset = divmod(step * count, size)
        order = rng.host(seed, epoch, "data").permutation(size)
        chosen = order[offset : offset + count]
        if len(chosen) < count:  # the step runs over the epoch's end
            following = rng.host(seed, epoch + 1, "data").permutation(size)
            fresh = following[~np.isin(following, chosen)]
            chosen = np.concatenate([chosen, fresh[: count - len(chosen)]])
        return chosen.astype(np.int64)
