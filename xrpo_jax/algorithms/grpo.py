"""GRPO (DeepSeekMath, 2402.03300): group z-scores, token ratio, each row weighs the same."""

from __future__ import annotations

from xrpo_jax.algorithms.base import Algorithm, Budget
from xrpo_jax.explore.collect import Explore
from xrpo_jax.explore.planner import Fixed
from xrpo_jax.learn.clip import PPO, Dual
from xrpo_jax.learn.objective import Learn
from xrpo_jax.learn.penalty import ESTIMATORS, ReferenceKL


def make(
    budget: Budget,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 0.0,
    beta: float = 0.0,
    kl_estimator: str = "k3",
) -> Algorithm:
    """`beta` 0 (ours; the paper's is .04) runs no reference model; `dual_clip` 0 is off."""
    if kl_estimator not in ESTIMATORS:
        raise ValueError(
            f"algorithm.kl_estimator={kl_estimator!r}; allowed: {', '.join(ESTIMATORS)}"
        )
    if dual_clip and dual_clip <= 1:
        raise ValueError(f"algorithm.dual_clip={dual_clip}; allowed: 0 (off) or above 1")
    clip = PPO(low=clip_low, high=clip_high)
    if dual_clip:
        clip = Dual(low=clip_low, high=clip_high, bound=dual_clip)
    penalty = ReferenceKL(beta=beta, estimator=ESTIMATORS[kl_estimator])
    return Algorithm(
        explore=Explore(planner=Fixed(group=budget.group)),
        learn=Learn(clip=clip, penalties=(penalty,) if beta else ()),
    )
