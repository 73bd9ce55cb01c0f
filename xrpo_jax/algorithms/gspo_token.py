"""GSPO-token (2507.18071): the sequence's ratio with each token's own gradient."""

from __future__ import annotations

from xrpo_jax.algorithms.base import Algorithm, Budget
from xrpo_jax.explore.collect import Explore
from xrpo_jax.explore.planner import Fixed
from xrpo_jax.learn.clip import PPO
from xrpo_jax.learn.objective import Learn
from xrpo_jax.learn.ratio import SequenceToken


def make(budget: Budget, clip_low: float = 3e-4, clip_high: float = 4e-4) -> Algorithm:
    """Equal to `gspo` in value and gradient as long as a row's tokens share one advantage."""
    return Algorithm(
        explore=Explore(planner=Fixed(group=budget.group)),
        learn=Learn(ratio=SequenceToken(), clip=PPO(low=clip_low, high=clip_high)),
    )
