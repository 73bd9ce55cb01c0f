"""EXPO / FG-ExPO (2605.09923, 2605.11403): prompts of middling accuracy, KL by accuracy.

Two modules on GRPO with a token mean and the population standard deviation. GCS draws prompts with
a Gaussian weight of their running accuracy; AKL multiplies the penalty to the frozen initial policy
by an increasing function of the batch's accuracy.

The paper leaves open, with our reading: whether a batch may hold a prompt twice (no), one clip
width or clip-higher (`clip_low`, `clip_high`: Eq. 2 has one width, .2), token or row mean
(`token_mean`), and the constant under the standard deviation (1e-6). An epoch means nothing here:
`train.steps` counts, and the reference is never refreshed. Dynamic sampling and the overlong
penalty are off. Accuracy is of verdicts, whatever reward terms there are, over all
rollouts of the step.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from xrpo_jax.algorithms.base import Algorithm, Budget
from xrpo_jax.arrays import Batch, Scores, TokenStats
from xrpo_jax.explore.collect import Explore
from xrpo_jax.explore.curriculum import Shuffled, draw, evenness
from xrpo_jax.explore.planner import Fixed
from xrpo_jax.explore.values import Running
from xrpo_jax.learn.advantage import GroupZ
from xrpo_jax.learn.clip import PPO
from xrpo_jax.learn.objective import Learn
from xrpo_jax.learn.penalty import ReferenceKL
from xrpo_jax.learn.weight import SequenceMean, TokenMean

MATCHED = 0.7  # of beta: what AKL's factor is on average at a batch accuracy of .3 to .6
BETA_RULES = ("accuracy", "akl_matched_const", "constant")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gaussian:
    """GCS (2605.11403, Eq. 7): weight `exp(-(v - center)² / (2 width²))`, without replacement."""

    center: float = 0.5
    width: float = 0.35

    def log_weight(self, value: np.ndarray) -> np.ndarray:
        """f64[num_prompts]."""
        return -np.square(value - self.center) / (2.0 * self.width**2)

    def weight(self, value: np.ndarray) -> np.ndarray:
        """f64[num_prompts]."""
        return np.exp(self.log_weight(value))

    def __call__(self, value: np.ndarray, seed: int, step: int, count: int) -> np.ndarray:
        return draw(self.log_weight(value), seed, step, count)

    def report(self, value: np.ndarray) -> dict[str, float]:
        return {"draw_evenness": evenness(self.weight(value))}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AccuracyK3:
    """AKL (2605.11403, Eq. 4 and 8): `beta (tanh(accuracy) + 1) / 2` times k3 to the first policy.

    The accuracy is an array, so that nothing recompiles when it changes.
    """

    beta: float
    needs = ("ref_logp",)

    def coefficient(self, scores: Scores) -> jax.Array:
        """f32[n], the same in every row."""
        return self.beta * 0.5 * (jnp.tanh(scores.accuracy) + 1.0)

    def __call__(self, stats: TokenStats, batch: Batch, scores: Scores) -> jax.Array:
        k3 = ReferenceKL(beta=1.0)(stats, batch, scores)
        return self.coefficient(scores)[:, None] * k3

    def report(self, stats: TokenStats, batch: Batch, scores: Scores) -> dict[str, jax.Array]:
        return {
            "beta_effective": jnp.broadcast_to(self.coefficient(scores)[:, None], batch.mask.shape),
            "kl_reference": ReferenceKL(beta=1.0)(stats, batch, scores),
        }


def make(
    budget: Budget,
    beta: float = 0.02,
    beta_rule: str = "accuracy",
    curriculum: bool = True,
    center: float = 0.5,
    width: float = 0.35,
    retention: float = 0.9,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    token_mean: bool = True,
) -> Algorithm:
    """`beta_rule` is AKL (accuracy), its control of the same mean, or constant: `beta` throughout.

    `curriculum=False` draws uniformly; with a constant beta as well, this is the paper's GRPO.
    `retention` is the tracker's share of its old value: .5 shows sooner what .9 shows.
    """
    if beta_rule not in BETA_RULES:
        raise ValueError(f"algorithm.beta_rule={beta_rule!r}; allowed: {', '.join(BETA_RULES)}")
    if width <= 0:
        raise ValueError(f"algorithm.width={width}; allowed: above 0 (a large one is uniform)")
    if retention >= 1:
        raise ValueError(
            f"algorithm.retention={retention}; allowed: 0 to below 1, else no value ever changes"
        )
    penalty = AccuracyK3(beta=beta)
    if beta_rule != "accuracy":
        matched = MATCHED if beta_rule == "akl_matched_const" else 1.0
        penalty = ReferenceKL(beta=matched * beta)
    return Algorithm(
        explore=Explore(
            planner=Fixed(group=budget.group),
            values=Running(keep=retention),
            curriculum=Gaussian(center=center, width=width) if curriculum else Shuffled(),
        ),
        learn=Learn(
            advantage=GroupZ(ddof=0),
            clip=PPO(low=clip_low, high=clip_high),
            penalties=(penalty,) if beta else (),
            weight=TokenMean() if token_mean else SequenceMean(),
        ),
    )
