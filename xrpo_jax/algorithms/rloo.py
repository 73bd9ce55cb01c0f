"""RLOO (2402.14740): each rollout's baseline is the mean reward of the others."""

from __future__ import annotations

from xrpo_jax.algorithms.base import Algorithm, Budget
from xrpo_jax.explore.collect import Explore
from xrpo_jax.explore.planner import Fixed
from xrpo_jax.learn.advantage import LeaveOneOut
from xrpo_jax.learn.clip import PPO
from xrpo_jax.learn.objective import Learn


def make(budget: Budget, clip_low: float = 0.2, clip_high: float = 0.2) -> Algorithm:
    """With one update a batch it is REINFORCE with a leave-one-out baseline."""
    return Algorithm(
        explore=Explore(planner=Fixed(group=budget.group)),
        learn=Learn(advantage=LeaveOneOut(), clip=PPO(low=clip_low, high=clip_high)),
    )
