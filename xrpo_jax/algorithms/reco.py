"""ReCo (2607.26862): weigh against what the policy already finds likely.

A response weighs by its expected occurrence in the group, and a token's importance ratio becomes a
ratio of variances `p (1 - p)`. Both formulas are second-hand; see section (d) of the specification.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from xrpo_jax.algorithms.base import Algorithm, Budget
from xrpo_jax.arrays import Batch, TokenStats
from xrpo_jax.explore.collect import Explore
from xrpo_jax.explore.planner import Fixed
from xrpo_jax.learn.clip import PPO, Scored, Surrogate
from xrpo_jax.learn.groups import Groups
from xrpo_jax.learn.objective import Learn
from xrpo_jax.learn.penalty import ReferenceKL
from xrpo_jax.learn.ratio import Token
from xrpo_jax.learn.weight import PromptMean, SequenceMean, TokenMean

# --- responses: (Batch, Groups) -> f32[n], G times the weight of a row in its group of G ---------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Occurrence:
    """`G w = min(1 / π̄, cap)`, π̄ the geometric mean of the old policy's token probabilities.

    A group of G draws holds a response G π̄ times on average, so each distinct one counts once. The
    mean is inferred (the paper writes a bar), the cap ours.
    """

    cap: float = 5.0

    def __call__(self, batch: Batch, groups: Groups) -> jax.Array:
        length = jnp.maximum(jnp.sum(batch.mask, axis=1), 1.0)
        level = jnp.sum(jnp.where(batch.mask > 0, batch.old_logp, 0.0), axis=1) / length
        # fmin: a row of weight NaN would be left out in silence, instead of the whole update.
        return jnp.fmin(jnp.exp(-level), self.cap)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WherePositive:
    """`of` on rows of positive advantage, which are those above the group's mean; 1 on others."""

    of: Callable

    def __call__(self, batch: Batch, groups: Groups) -> jax.Array:
        groups = groups.having(batch.reward)
        # A mean of equal rewards may be rounded below them.
        mixed = groups.spread(batch.reward) > 0
        positive = mixed & (batch.reward > groups.mean(batch.reward))
        return jnp.where(positive, self.of(batch, groups), 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeanOne:
    """`of` over its mean in the group, so that a group's weights sum to 1."""

    of: Callable

    def __call__(self, batch: Batch, groups: Groups) -> jax.Array:
        groups = groups.only(jnp.sum(batch.mask, axis=1) > 0)
        values = self.of(batch, groups)
        return values / jnp.maximum(groups.mean(values), 1e-30)  # 0 where no row is trained


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reweighted:
    """Token weights of `base`, times the weight of the token's response.

    Over PromptMean a token weighs `w / |o|` over the number of prompts, where w takes the place of
    1 / G [inferred]; over TokenMean `G w / Σ|o|`. G are the rows of the prompt that are in the
    loss. The weights do not sum to 1.
    """

    base: Callable
    response: Callable
    reads_old_logp = True

    def __call__(self, batch: Batch, groups: Groups) -> jax.Array:
        return self.base(batch, groups) * self.response(batch, groups)[:, None]

    def report(self, batch: Batch, groups: Groups) -> dict[str, jax.Array]:
        trained = jnp.sum(batch.mask, axis=1) > 0
        return {"response_weight": jnp.where(trained, self.response(batch, groups), jnp.nan)}


# --- tokens --------------------------------------------------------------------------------------

SMALLEST = 1e-5  # probabilities are kept this far from 0 and 1 (a reproduction's)


def _log_variance(logp: jax.Array, batch: Batch) -> jax.Array:
    """`log p (1 - p)`, of p = 1/2 on padding."""
    logp = jnp.where(batch.mask > 0, logp, -math.log(2.0))
    logp = jnp.clip(logp, math.log(SMALLEST), math.log1p(-SMALLEST))
    return logp + jnp.log(-jnp.expm1(logp))  # 1 - exp(logp) would cancel near p = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variance:
    """Log of `p (1 - p) / (p_old (1 - p_old))`, p the drawn token's probability; at most 10.2."""

    second_update = True

    def __call__(self, stats: TokenStats, batch: Batch) -> jax.Array:
        return _log_variance(stats.logp, batch) - _log_variance(batch.old_logp, batch)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbsoluteVariance:
    """Log of `4 p (1 - p)`, which unlike the ratio acts in the first update too [exploratory]."""

    def __call__(self, stats: TokenStats, batch: Batch) -> jax.Array:
        return math.log(4.0) + _log_variance(stats.logp, batch)


def _report(log_ratio: jax.Array, *_) -> dict[str, jax.Array]:
    return {"variance_ratio": jnp.exp(log_ratio)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clamped:
    """`sg(clip(v, floor, cap)) A log π`, v the ratio of variances: no token is dropped.

    v is never differentiated: as a surrogate `v A` it would push likely tokens the wrong way.
    """

    by: Scored
    report = staticmethod(_report)

    def __call__(
        self, log_ratio: jax.Array, advantage: jax.Array, stats: TokenStats, batch: Batch
    ) -> Surrogate:
        return self.by(log_ratio, advantage, stats, batch)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Within:
    """The same on the tokens that `test` would not clip by their log `ratio`."""

    by: Scored
    test: PPO
    ratio: Callable
    report = staticmethod(_report)

    def __call__(
        self, log_ratio: jax.Array, advantage: jax.Array, stats: TokenStats, batch: Batch
    ) -> Surrogate:
        objective, _ = self.by(log_ratio, advantage, stats, batch)
        _, dropped = self.test(self.ratio(stats, batch), advantage, stats, batch)
        return jnp.where(dropped > 0, 0.0, objective), dropped


CLIP_MODES = ("clamp_ratio_mask", "ppo_on_rvar", "clamp_only")
HARD_CAP = 10.0  # of `ppo_on_rvar`, whose weight has no bound else [ours]


def make(
    budget: Budget,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_mode: str = "clamp_ratio_mask",
    response_cap: float = 5.0,
    response: bool = True,
    token: bool = True,
    mean_weights: bool = False,
    positive_only: bool = False,
    absolute: bool = False,
    token_level: bool = False,
    beta: float = 0.0,
) -> Algorithm:
    """`response` and `token` are the two corrections; without both it is GRPO to the bit.

    Without `token` it is PPO on the ratio, without `response` GRPO's weights. The token part acts
    only where a batch is used for several updates.

    The paper's clip was not recovered. `clip_mode` is `clamp_ratio_mask` (ours: v within the clip's
    bounds, on tokens whose true ratio PPO would not clip), `ppo_on_rvar` (a reproduction's: PPO's
    test on v, which falls as p rises past 1/2) or `clamp_only` (CISPO's way). Nor were the widths,
    the cap of the response weight (`response_cap` over G is ours) and the KL (`beta`, ours 0).

    `mean_weights` divides the response weights by their mean in the group, `positive_only` leaves
    1 / G on rows without positive advantage, `absolute` weighs a token by 4 p (1 - p) without a
    clamp [ours; it is the log's `variance_ratio` then], and `token_level` averages over tokens in
    place of rows.
    """
    if clip_mode not in CLIP_MODES:
        raise ValueError(f"algorithm.clip_mode={clip_mode!r}; allowed: {', '.join(CLIP_MODES)}")
    if response_cap <= 0:
        raise ValueError(f"algorithm.response_cap={response_cap}; allowed: above 0")
    if absolute and clip_mode == "ppo_on_rvar":
        raise ValueError(
            f"algorithm.clip_mode={clip_mode!r}; allowed: clamp_ratio_mask, clamp_only"
            " (algorithm.absolute has no ratio of variances to clip)"
        )
    for name, value, under, there in [
        ("mean_weights", mean_weights, "response", response),
        ("positive_only", positive_only, "response", response),
        ("absolute", absolute, "token", token),
    ]:
        if value and not there:
            raise ValueError(f"algorithm.{name}=True; allowed: False without algorithm.{under}")
    weight = TokenMean() if token_level else SequenceMean()
    if response:
        of = Occurrence(cap=response_cap)
        of = WherePositive(of=of) if positive_only else of
        of = MeanOne(of=of) if mean_weights else of
        weight = Reweighted(base=TokenMean() if token_level else PromptMean(), response=of)
    ratio, clip = Token(), PPO(low=clip_low, high=clip_high)
    if token:
        test, ratio = clip, AbsoluteVariance() if absolute else Variance()
        # 4 p (1 - p) is from 0 to 1 already: bounds about 1 would leave the lower one only.
        floor, cap = (0.0, 1.0) if absolute else (1.0 - clip_low, 1.0 + clip_high)
        bounded = Scored(floor=floor, cap=cap)
        clip = {
            "clamp_ratio_mask": Within(by=bounded, test=test, ratio=Token()),
            "ppo_on_rvar": Within(by=Scored(floor=0.0, cap=HARD_CAP), test=test, ratio=ratio),
            "clamp_only": Clamped(by=bounded),
        }[clip_mode]
    return Algorithm(
        explore=Explore(planner=Fixed(group=budget.group)),
        learn=Learn(
            ratio=ratio,
            clip=clip,
            penalties=(ReferenceKL(beta=beta),) if beta else (),
            weight=weight,
        ),
    )
