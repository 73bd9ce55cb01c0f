"""GSPO (2507.18071): GRPO with one importance ratio for the whole sequence."""

from __future__ import annotations

from xrpo_jax.algorithms.base import Algorithm, Budget
from xrpo_jax.explore.collect import Explore
from xrpo_jax.explore.planner import Fixed
from xrpo_jax.learn.clip import PPO
from xrpo_jax.learn.objective import Learn
from xrpo_jax.learn.ratio import Sequence


def make(budget: Budget, clip_low: float = 3e-4, clip_high: float = 4e-4) -> Algorithm:
    """It differs from GRPO only where a batch is used for several updates."""
    return Algorithm(
        explore=Explore(planner=Fixed(group=budget.group)),
        learn=Learn(ratio=Sequence(), clip=PPO(low=clip_low, high=clip_high)),
    )
