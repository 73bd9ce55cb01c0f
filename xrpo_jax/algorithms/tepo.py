"""TEPO (2510.09369, 2604.12736): GSPO's ratio, DAPO's token mean, and a KL on few tokens.

The KL acts where the advantage is positive and the policy's entropy fell. The papers' objective was
not to be had: the construction is section (c) of the specification, and what it leaves open is said
at the setting. Without one [ours]: the KL is estimated by k3, and divided by all tokens like the
rest of the loss, so that it weakens where the mask is rare.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from xrpo_jax.algorithms.base import Algorithm, Budget
from xrpo_jax.arrays import Batch, Scores, TokenStats
from xrpo_jax.explore.collect import Explore
from xrpo_jax.explore.planner import Fixed
from xrpo_jax.learn.clip import PPO
from xrpo_jax.learn.objective import Learn
from xrpo_jax.learn.penalty import k3
from xrpo_jax.learn.ratio import Sequence, Token
from xrpo_jax.learn.weight import SequenceMean, TokenMean

# --- where entropy falls: (TokenStats, Batch) -> bool[n,S] ---------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fell:
    """The entropy is more than `band` (nats) below the one that the batch has under `than`."""

    than: str
    band: float

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.than,)

    def __call__(self, stats: TokenStats, batch: Batch) -> jax.Array:
        return stats.entropy - getattr(batch, self.than) < -self.band


@dataclasses.dataclass(frozen=True, kw_only=True)
class WillFall:
    """More of this token lowers the entropy to first order: `-log π < H` [ours].

    It is `∂H/∂z = -p (log p + H) < 0`, the papers' equation 1 with its sign corrected.
    """

    needs = ()

    def __call__(self, stats: TokenStats, batch: Batch) -> jax.Array:
        return -stats.logp < stats.entropy


# --- the KL --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllTokens:
    """Every token: the ablation without a mask."""

    needs = ()

    def __call__(self, stats: TokenStats, batch: Batch, scores: Scores) -> jax.Array:
        return batch.mask


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardedFall:
    """Tokens of positive advantage whose entropy falls, f32[n,S] of 0 and 1, without gradient."""

    falls: Callable

    @property
    def needs(self) -> tuple[str, ...]:
        return self.falls.needs

    def __call__(self, stats: TokenStats, batch: Batch, scores: Scores) -> jax.Array:
        falls = self.falls(jax.lax.stop_gradient(stats), batch)
        return jnp.where(falls & (scores.advantage > 0), batch.mask, 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedK3:
    """`beta M k3`, of KL(π ‖ the policy whose log-probs the batch has under `anchor`)."""

    beta: float
    anchor: str
    mask: Callable

    @property
    def second_update(self) -> bool:
        """Nothing differs from the old policy before the batch's second update."""
        return self.anchor == "old_logp"

    @property
    def needs(self) -> tuple[str, ...]:
        usual = ("old_logp",)  # every batch has these
        return tuple(name for name in (self.anchor, *self.mask.needs) if name not in usual)

    def _values(self, stats: TokenStats, batch: Batch, scores: Scores) -> dict[str, jax.Array]:
        d = jnp.where(batch.mask > 0, getattr(batch, self.anchor) - stats.logp, 0.0)
        mask = self.mask(stats, batch, scores)
        return {"mask_share": mask, "masked_kl": mask * k3(d)}

    def __call__(self, stats: TokenStats, batch: Batch, scores: Scores) -> jax.Array:
        return self.beta * self._values(stats, batch, scores)["masked_kl"]

    def report(self, stats: TokenStats, batch: Batch, scores: Scores) -> dict[str, jax.Array]:
        """Share of masked tokens and, without `beta`, the KL; both over all trained tokens."""
        return self._values(stats, batch, scores)


READINGS = ("old", "ref", "predicted")


def make(
    budget: Budget,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    beta: float = 1.0,
    entropy_drop: str = "old",
    entropy_band: float = 1e-4,
    sequence_ratio: bool = True,
    masked: bool = True,
    token_level: bool = True,
    token_clip_low: float = 0.2,
    token_clip_high: float = 0.28,
) -> Algorithm:
    """What the papers leave open, and the ablations.

    The widths `clip_low` and `clip_high` are GSPO's [ours]. `beta` was not recovered: 1 is ours and
    meant for a KL to the old policy; with `entropy_drop="ref"` begin at .01; 0 leaves the KL out.
    `entropy_drop` says what a falling entropy is compared with, and the KL is to the same policy:
    `old`, which drew the batch (inferred; nothing falls before the batch's second update), `ref`,
    the initial one (second-hand), or `predicted`, by the token's own gradient (ours; KL to `old`).
    A fall counts beyond `entropy_band` nats [ours]: two passes of one policy differ by rounding,
    which would draw the mask of the first update by lot; 0 is the literal reading.

    Ablations: `sequence_ratio=False` has each token's ratio, clipped at `token_clip_low` and
    `token_clip_high` (DAPO's [ours]: a token's ratio strays a hundred times as far from 1 as the
    row's mean), `masked=False` the KL on all tokens, `token_level=False` weighs rows alike, which
    with `beta` 0 is GSPO.
    """
    if entropy_drop not in READINGS:
        raise ValueError(f"algorithm.entropy_drop={entropy_drop!r}; allowed: {', '.join(READINGS)}")
    if entropy_drop == "predicted":
        falls = WillFall()
    else:
        falls = Fell(than=f"{entropy_drop}_entropy", band=entropy_band)
    penalty = MaskedK3(
        beta=beta,
        anchor="ref_logp" if entropy_drop == "ref" else "old_logp",
        mask=RewardedFall(falls=falls) if masked else AllTokens(),
    )
    if sequence_ratio:
        ratio, clip = Sequence(), PPO(low=clip_low, high=clip_high)
    else:
        ratio, clip = Token(), PPO(low=token_clip_low, high=token_clip_high)
    return Algorithm(
        explore=Explore(planner=Fixed(group=budget.group)),
        learn=Learn(
            ratio=ratio,
            clip=clip,
            penalties=(penalty,) if beta else (),
            weight=TokenMean() if token_level else SequenceMean(),
        ),
    )
