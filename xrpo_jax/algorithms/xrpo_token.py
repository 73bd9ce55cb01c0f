"""XRPO (2510.06672) on GRPO's token ratio, the form that the paper compares with GRPO."""

from __future__ import annotations

from xrpo_jax.algorithms.base import Algorithm, Budget
from xrpo_jax.algorithms.xrpo import compose
from xrpo_jax.learn.clip import PPO
from xrpo_jax.learn.objective import Learn


def make(budget: Budget, clip_low: float = 0.2, clip_high: float = 0.2, **mechanisms) -> Algorithm:
    """`mechanisms` are the settings of `xrpo.compose`."""
    return compose(budget, Learn(clip=PPO(low=clip_low, high=clip_high)), **mechanisms)
