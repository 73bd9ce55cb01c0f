"""Curricula `(value f64[num_prompts], seed, step, count) -> i64[count]`: the prompts of a step.

They are functions of their arguments alone, so data order needs no saving. `value` is what the
values part says of each prompt; `report(value)`, where there is one, adds to the log.
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


IMPOSSIBLE = -1e9  # log weight of prompts that are drawn, at random, only when no other is left


def draw(log_weight: np.ndarray, seed: int, step: int, count: int) -> np.ndarray:
    """`count` different prompts i64, drawn one after the other by their weight; f64[n] are logs.

    By the largest of log weight plus Gumbel noise, so that one random number a prompt is all.
    Logs, since a narrow window's weights may all be too small for a float.
    """
    noise = rng.host(seed, step, "data").gumbel(size=len(log_weight))
    order = np.argsort(-(np.maximum(log_weight, IMPOSSIBLE) + noise), kind="stable")
    return order[:count].astype(np.int64)


def evenness(weight: np.ndarray) -> float:
    """Effective share of the prompts that `weight` draws from: (Σw)² / (n Σw²), 1 = uniform."""
    squares = np.sum(np.square(weight))
    return float(np.square(np.sum(weight)) / (len(weight) * squares)) if squares > 0 else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prioritized:
    """SPO's draw (2509.13232): weight `√(v(1 - v)) + floor`, without replacement within a step."""

    floor: float = 0.05

    def weight(self, value: np.ndarray) -> np.ndarray:
        """f64[num_prompts]."""
        return np.sqrt(np.clip(value * (1.0 - value), 0.0, None)) + self.floor

    def __call__(self, value: np.ndarray, seed: int, step: int, count: int) -> np.ndarray:
        with np.errstate(divide="ignore"):
            return draw(np.log(self.weight(value)), seed, step, count)

    def report(self, value: np.ndarray) -> dict[str, float]:
        return {"draw_evenness": evenness(self.weight(value))}
