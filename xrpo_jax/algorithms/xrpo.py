"""XRPO (2510.06672): plan rollouts by uncertainty, seed what only fails, sharpen rare success.

The three mechanisms stand on GSPO here and on GRPO in `xrpo_token`; each has a switch, and without
all three the algorithm is its base to the bit.
"""

from __future__ import annotations

import dataclasses

from xrpo_jax.algorithms.base import Algorithm, Budget
from xrpo_jax.explore.collect import Explore
from xrpo_jax.explore.planner import Uncertainty, Uniform
from xrpo_jax.explore.seeding import Exemplars, NoSeed
from xrpo_jax.learn.clip import PPO
from xrpo_jax.learn.keep import WithoutPlainFailures
from xrpo_jax.learn.objective import Learn
from xrpo_jax.learn.ratio import Sequence
from xrpo_jax.learn.shaping import Novelty


def make(
    budget: Budget, clip_low: float = 3e-4, clip_high: float = 4e-4, **mechanisms
) -> Algorithm:
    """XRPO on GSPO's sequence ratio; `mechanisms` are the settings of `compose`."""
    base = Learn(ratio=Sequence(), clip=PPO(low=clip_low, high=clip_high))
    return compose(budget, base, **mechanisms)


def compose(
    budget: Budget,
    base: Learn,
    *,
    planner: bool = True,
    seeding: bool = True,
    sharpening: bool = True,
    n_base: int = 0,
    rounds: int = 2,
    alpha: float = 0.05,
    explore: float = 0.1,
    bonus: str = "sqrt",
    solved_weight: float = 1.0,
    max_rollouts: int = 0,
    shots: int = 2,
    capacity: int = 1024,
    keep: str = "newest",
    loss_context: str = "plain",
    min_similarity: float = 0.4,
    max_similarity: float = 0.95,
    mask_plain_failures: bool = False,
    novelty_weight: float = 2.5,
    novelty_cap: float = 0.5,
    novelty_average: str = "group",
) -> Algorithm:
    """The mechanisms over the learn half `base`; `n_base` 0 means half of `rollout.group`.

    Without the planner the same phases get uniform shares, so that seeding has its later rounds.
    """
    phases = dict(group=budget.group, base=n_base or budget.group // 2, rounds=rounds)
    plan = Uniform(**phases)
    if planner:
        plan = Uncertainty(
            **phases,
            alpha=alpha,
            explore=explore,
            bonus=bonus,
            solved_weight=solved_weight,
            cap=max_rollouts,
        )
    seeder = NoSeed()
    if seeding:
        seeder = Exemplars(
            shots=shots,
            capacity=capacity,
            keep=keep,
            loss_context=loss_context,
            min_similarity=min_similarity,
            max_similarity=max_similarity,
        )
    novelty = Novelty(weight=novelty_weight, cap=novelty_cap, average=novelty_average)
    return Algorithm(
        explore=Explore(planner=plan, seeder=seeder),
        learn=dataclasses.replace(
            base,
            shaping=(novelty,) if sharpening else (),
            keep=(WithoutPlainFailures(),) if mask_plain_failures else (),
        ),
    )
