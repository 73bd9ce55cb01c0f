"""CISPO (2506.13585): the clipped ratio only scales the gradient, no token loses it."""

from __future__ import annotations

from xrpo_jax.algorithms.base import Algorithm, Budget
from xrpo_jax.explore.collect import Explore
from xrpo_jax.explore.planner import Fixed
from xrpo_jax.learn.clip import Scored
from xrpo_jax.learn.objective import Learn
from xrpo_jax.learn.weight import TokenMean


def make(budget: Budget, cap: float = 5.0) -> Algorithm:
    """`cap` is absolute (4, 5 and 8 are reported to work alike); there is no lower bound."""
    if cap <= 0:
        raise ValueError(f"algorithm.cap={cap}; allowed: above 0, else nothing is learnt")
    return Algorithm(
        explore=Explore(planner=Fixed(group=budget.group)),
        learn=Learn(clip=Scored(cap=cap), weight=TokenMean()),
    )
