"""Dr.GRPO (2503.20783): no division by the standard deviation nor by the row's length."""

from __future__ import annotations

from xrpo_jax.algorithms.base import Algorithm, Budget
from xrpo_jax.explore.collect import Explore
from xrpo_jax.explore.planner import Fixed
from xrpo_jax.learn.advantage import GroupMean
from xrpo_jax.learn.clip import PPO
from xrpo_jax.learn.objective import Learn
from xrpo_jax.learn.weight import ConstantLength


def make(budget: Budget, clip_low: float = 0.2, clip_high: float = 0.2) -> Algorithm:
    """Token sums are divided by `rollout.max_new_tokens`."""
    return Algorithm(
        explore=Explore(planner=Fixed(group=budget.group)),
        learn=Learn(
            advantage=GroupMean(),
            clip=PPO(low=clip_low, high=clip_high),
            weight=ConstantLength(limit=budget.max_new_tokens),
        ),
    )
