"""Curricula `(value f64[num_prompts], seed, step, count) -> i64[count]`: the prompts of a step.

They are functions of their arguments alone, so data order needs no saving.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from xrpo_jax import rng


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shuffled:
    """Every prompt at most once an epoch, in an order of its own each epoch.

    What is left of an epoch when it no longer fills a step is left out. A planner that may look at
    many prompts a step (DAPO's refill) passes over those that it did not need.
    """

    def __call__(self, value: np.ndarray, seed: int, step: int, count: int) -> np.ndarray:
        epoch, place = divmod(step, len(value) // count)
        order = rng.host(seed, epoch, "data").permutation(len(value))
        return order[place * count : (place + 1) * count].astype(np.int64)
