"""GRPO (2402.03300) with an entropy bonus, the baseline that TEPO (2604.12736) argues against."""

from __future__ import annotations

import dataclasses

import jax

from xrpo_jax.algorithms.base import Algorithm, Budget
from xrpo_jax.arrays import Batch, Scores, TokenStats
from xrpo_jax.explore.collect import Explore
from xrpo_jax.explore.planner import Fixed
from xrpo_jax.learn.clip import PPO
from xrpo_jax.learn.objective import Learn


@dataclasses.dataclass(frozen=True, kw_only=True)
class EntropyBonus:
    """Minus `coefficient` times the exact entropy of the policy where a token was drawn.

    Its gradient is that of the entropy itself, over the whole vocabulary.
    """

    coefficient: float

    def __call__(self, stats: TokenStats, batch: Batch, scores: Scores) -> jax.Array:
        return -self.coefficient * stats.entropy


def make(
    budget: Budget, clip_low: float = 0.2, clip_high: float = 0.2, coefficient: float = 1e-3
) -> Algorithm:
    """`coefficient` (per nat, ours) 0 is GRPO without a KL."""
    bonus = EntropyBonus(coefficient=coefficient)
    return Algorithm(
        explore=Explore(planner=Fixed(group=budget.group)),
        learn=Learn(
            clip=PPO(low=clip_low, high=clip_high), penalties=(bonus,) if coefficient else ()
        ),
    )
