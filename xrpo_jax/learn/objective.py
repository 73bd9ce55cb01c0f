"""The loss of a learn half: scores once on whole groups, then a weighted sum of token losses."""

from __future__ import annotations

import dataclasses
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
    """The device half; static under jit, so every part is hashable."""

    advantage: Callable = GroupZ()
    shaping: tuple[Callable, ...] = ()
    ratio: Callable = Token()
    clip: Callable = PPO()
    penalties: tuple[Callable, ...] = ()
    weight: Callable = SequenceMean()
    keep: tuple[Callable, ...] = ()

    @property
    def needs_reference(self) -> bool:
        """Whether a penalty reads the initial policy's log-probs."""
        return any(getattr(penalty, "needs_reference", False) for penalty in self.penalties)


def score(learn: Learn, batch: Batch, groups: Groups) -> Scores:
    """Advantages and weights f32[n,S] of a batch that holds whole groups (over the mesh axis)."""
    advantage = learn.advantage(batch, groups)
    for shaping in learn.shaping:
        advantage = shaping(advantage, batch, groups)
    kept = batch
    for keep in learn.keep:
        kept = kept.replace(mask=kept.mask * keep(batch, groups)[:, None])
    weight = learn.weight(kept, groups)
    advantage = jnp.broadcast_to(advantage[:, None], batch.mask.shape)
    return jax.lax.stop_gradient(Scores(advantage=advantage, weight=weight))


def loss(
    learn: Learn, stats: TokenStats, batch: Batch, scores: Scores
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Sum of weight x token loss over these rows, and sums over trained tokens for the log.

    Rows may be any part of the batch that was scored: parts' losses and gradients add up.
    """
    log_ratio = learn.ratio(stats, batch)
    objective, clipped = learn.clip(log_ratio, scores.advantage, stats, batch)
    token_loss = -objective
    for penalty in learn.penalties:
        token_loss = token_loss + penalty(stats, batch, scores)
    # where, not a product: 0 x inf on a masked token would be NaN.
    total = jnp.sum(jnp.where(scores.weight > 0, scores.weight * token_loss, 0.0))
    trained = batch.mask > 0
    back = jnp.where(trained, batch.old_logp - stats.logp, 0.0)
    kl = jnp.expm1(jnp.clip(back, -20.0, 20.0)) - back  # k3 of KL(current || old)
    sums = {
        "loss": total,
        "tokens": jnp.sum(batch.mask),
        "clipped": jnp.sum(jnp.where(trained, clipped, 0.0)),
        "kl_old": jnp.sum(kl),
        "entropy": jnp.sum(jnp.where(trained, stats.entropy, 0.0)),
    }
    return total, jax.lax.stop_gradient(sums)
