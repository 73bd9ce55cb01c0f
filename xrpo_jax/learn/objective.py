"""The loss of a learn half: scores once on whole groups, then a weighted sum of token losses."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from xrpo_jax.arrays import Batch, Scores, TokenStats
from xrpo_jax.learn.advantage import GroupZ
from xrpo_jax.learn.clip import PPO
from xrpo_jax.learn.groups import Groups
from xrpo_jax.learn.ratio import Token
from xrpo_jax.learn.weight import SequenceMean


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learn:
    """The device half; static under jit, so every part is hashable.

    A part may have `needs`, names of Batch fields that are made for it alone, and `report`: given
    what its call is given, arrays by name whose means the log shows (docs at `reported`). One of
    the score's that reads old log-probs says so by `reads_old_logp`; another is given None.
    """

    advantage: Callable = GroupZ()
    shaping: tuple[Callable, ...] = ()
    ratio: Callable = Token()
    clip: Callable = PPO()
    penalties: tuple[Callable, ...] = ()
    weight: Callable = SequenceMean()
    keep: tuple[Callable, ...] = ()
    importance: Callable | None = None  # corrects for who sampled; reads Batch.sampler_logp
    whole_groups: bool = False  # a minibatch holds all rows of a prompt or none

    @property
    def needs(self) -> frozenset[str]:
        """Fields of Batch beyond the usual that the loss reads."""
        parts = (self.ratio, self.clip, *self.penalties)
        return frozenset(name for part in parts for name in getattr(part, "needs", ()))

    @property
    def second_update(self) -> bool:
        """Whether a part does nothing before the policy has moved from the one that sampled."""
        parts = (self.ratio, self.clip, *self.penalties)
        return any(getattr(part, "second_update", False) for part in parts)

    @property
    def reads_old_logp(self) -> bool:
        """Whether the scores cannot be made before the old policy has looked at the batch."""
        parts = (self.advantage, *self.shaping, self.weight, *self.keep, self.importance)
        return any(getattr(part, "reads_old_logp", False) for part in parts)

    @property
    def needs_reference(self) -> bool:
        """Whether the initial policy has to look at each batch."""
        return not self.needs.isdisjoint(("ref_logp", "ref_entropy"))


def reported(part: Callable, *arguments) -> dict[str, jax.Array]:
    """What a part adds to the log; {} where it has no `report`."""
    return part.report(*arguments) if hasattr(part, "report") else {}


def score(learn: Learn, batch: Batch, groups: Groups) -> Scores:
    """Advantages and weights f32[n,T] of a batch that holds whole groups (over the mesh axis)."""
    advantage = learn.advantage(batch, groups)
    report = reported(learn.advantage, batch, groups)
    for shaping in learn.shaping:
        advantage = shaping(advantage, batch, groups)
    kept = batch
    for keep in learn.keep:
        kept = kept.replace(mask=kept.mask * keep(batch, groups)[:, None])
    weight = learn.weight(kept, groups)
    report |= reported(learn.weight, kept, groups)
    if learn.importance is not None:
        weight = weight * learn.importance(batch)
    advantage = jnp.broadcast_to(advantage[:, None], batch.mask.shape)
    graded = groups.having(batch.reward)
    right = graded.everything(batch.correct) / jnp.maximum(graded.everything(graded.weight), 1.0)
    scores = Scores(
        advantage=advantage,
        weight=weight,
        accuracy=jnp.broadcast_to(right, batch.reward.shape),
        report=report,
    )
    return jax.lax.stop_gradient(scores)


def loss(
    learn: Learn, stats: TokenStats, batch: Batch, scores: Scores
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Sum of weight x token loss over these rows, and sums over trained tokens for the log.

    Rows may be any part of the batch that was scored: parts' losses and gradients add up.
    """
    log_ratio = learn.ratio(stats, batch)
    objective, clipped = learn.clip(log_ratio, scores.advantage, stats, batch)
    seen = {"clip_fraction": clipped, "entropy": stats.entropy}
    seen |= reported(learn.clip, log_ratio, scores.advantage, stats, batch)
    token_loss = -objective
    for penalty in learn.penalties:
        token_loss = token_loss + penalty(stats, batch, scores)
        seen |= reported(penalty, stats, batch, scores)
    # where, not a product: 0 x inf on a masked token would be NaN.
    total = jnp.sum(jnp.where(scores.weight > 0, scores.weight * token_loss, 0.0))
    trained = batch.mask > 0
    back = jnp.where(trained, batch.old_logp - stats.logp, 0.0)
    seen["kl_old"] = jnp.expm1(jnp.clip(back, -20.0, 20.0)) - back  # k3 of KL(current || old)
    sums = {name: jnp.sum(jnp.where(trained, values, 0.0)) for name, values in seen.items()}
    sums |= {"loss": total, "tokens": jnp.sum(batch.mask)}
    return total, jax.lax.stop_gradient(sums)


def sums_of(learn: Learn) -> tuple[str, ...]:
    """Names of the sums that `loss` gives."""
    wide, flat = jax.ShapeDtypeStruct((1, 1), jnp.float32), jax.ShapeDtypeStruct((1,), jnp.float32)
    count = jax.ShapeDtypeStruct((1,), jnp.int32)
    batch = Batch(
        prompt=None,
        prompt_length=None,
        tokens=jax.ShapeDtypeStruct((1, 1), jnp.int32),
        length=count,
        mask=wide,
        old_logp=wide,
        reward=None,
        correct=None,
        group=None,
        kind=count,
        stopped=None,
        valid=None,
        **dict.fromkeys(learn.needs, wide),
    )
    stats, scores = TokenStats(logp=wide, entropy=wide), Scores(wide, wide, flat)
    _, sums = jax.eval_shape(functools.partial(loss, learn), stats, batch, scores)
    return tuple(sorted(sums))
