"""DAPO (2503.14476): clip-higher, token mean, dynamic sampling, soft overlong punishment."""

from __future__ import annotations

from xrpo_jax.algorithms.base import Algorithm, Budget
from xrpo_jax.explore.collect import Explore
from xrpo_jax.explore.planner import Refill
from xrpo_jax.explore.reward import Correctness, Overlong
from xrpo_jax.learn.clip import PPO
from xrpo_jax.learn.objective import Learn
from xrpo_jax.learn.weight import TokenMean


def make(
    budget: Budget,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    max_generation_batches: int = 10,
    overlong_cache: int = 0,
) -> Algorithm:
    """`overlong_cache` is in tokens; 0 means a fifth of `rollout.max_new_tokens`, as in the paper.

    The paper's overlong filtering, the alternative to the punishment, is `train.mask_truncated`.
    """
    cache = overlong_cache or max(budget.max_new_tokens // 5, 1)
    if not 0 < cache <= budget.max_new_tokens:
        raise ValueError(
            f"algorithm.overlong_cache={overlong_cache}; allowed: 0 (a fifth) to "
            f"rollout.max_new_tokens={budget.max_new_tokens}"
        )
    return Algorithm(
        explore=Explore(
            planner=Refill(group=budget.group, bound=max_generation_batches),
            rewards=(Correctness(right=1.0, wrong=-1.0), Overlong(cache=cache)),
        ),
        learn=Learn(clip=PPO(low=clip_low, high=clip_high), weight=TokenMean()),
    )
