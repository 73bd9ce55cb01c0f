"""TreePO (2508.17445): rollouts branch from one another, and each is compared at every branching.

Rows that go on from one beginning share its keys and values, which are computed once. A rollout's
advantage is the mean, over the groups of rollouts that share its first d segments, of its reward
minus the group's mean; it is whitened over the batch's tokens. The loss is DAPO's.

The paper leaves open, with our reading: the segment's length (`segment_length` 0: a quarter of
`rollout.max_new_tokens`, rounded up; the paper's 512 of 7168 tokens are 14 segments), how many rows
leave a finished rollout or begin anew (as many as begin the tree, `width_step`, if so many are
missing), which finished rollout is cut (uniformly one of those with more than one segment, then
uniformly one of its boundaries), and the constant under the standard deviation (1e-8). A group of
equal rewards counts among a rollout's groups, with 0. Whitening moves prompts of equal rewards,
too, to minus the batch's mean: advantages have mean 0 over tokens, not over rows.

Leaves are no independent draws: those of a tree resemble one another, and a restart cuts long ones
more often. The log's `reward` and `accuracy` compare between trees, `eval/pass@1` with others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from xrpo_jax.algorithms.base import Algorithm, Budget
from xrpo_jax.arrays import Batch
from xrpo_jax.explore.collect import Explore
from xrpo_jax.explore.planner import Fixed
from xrpo_jax.explore.tree import Tree
from xrpo_jax.learn.advantage import GroupMean
from xrpo_jax.learn.clip import PPO
from xrpo_jax.learn.groups import Groups
from xrpo_jax.learn.objective import Learn
from xrpo_jax.learn.weight import TokenMean


def plain(size: jax.Array) -> jax.Array:
    """Each of a rollout's groups weighs the same."""
    return jnp.ones_like(size)


def by_size(size: jax.Array) -> jax.Array:
    """Each weighs by its rollouts."""
    return size


DEPTH_AVERAGES: dict[str, Callable] = {"plain": plain, "size": by_size}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ancestors:
    """Mean over depths d of `R - mean` among the rows that share their first d segments.

    Depth 0 is the prompt. A group of one does not count; that of a prompt would add 0.
    """

    average: Callable = plain
    inside: GroupMean = GroupMean()

    def __call__(self, batch: Batch, groups: Groups) -> jax.Array:
        total, weights = jnp.zeros_like(batch.reward), jnp.zeros_like(batch.reward)
        for shared in _by_depth(batch, groups):
            size = shared.having(batch.reward).size()
            weight = jnp.where(size > 1, self.average(size), 0.0)
            total = total + weight * self.inside(batch, shared)
            weights = weights + weight
        return total / jnp.maximum(weights, 1.0)


def _by_depth(batch: Batch, groups: Groups) -> Iterator[Groups]:
    """The groups of the prompts, then of those that share one segment, two, and so on."""
    yield groups
    rows = batch.ancestors.shape[0]
    if groups.axis is not None:
        rows *= jax.lax.axis_size(groups.axis)  # numbers run over the whole batch
    for depth in range(1, batch.ancestors.shape[1]):
        yield groups.replace(ids=batch.ancestors[:, depth], number=rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Whitened:
    """`of` minus its mean over its standard deviation, both over all tokens of the batch.

    Exactly 0 where nothing varies.
    """

    of: Callable
    ddof: int = 1
    eps: float = 1e-8

    def __call__(self, batch: Batch, groups: Groups) -> jax.Array:
        advantage = self.of(batch, groups)
        tokens = groups.having(batch.reward).joined()
        tokens = tokens.replace(weight=tokens.weight * jnp.sum(batch.mask, axis=1))
        std = tokens.std(advantage, self.ddof)
        centred = advantage - tokens.mean(advantage)
        return jnp.where((std > 0) & (tokens.weight > 0), centred / (std + self.eps), 0.0)


def make(
    budget: Budget,
    branching: bool = True,
    width_step: int = 2,
    segment_length: int = 0,
    subgroups: bool = True,
    depth_average: str = "plain",
    whiten: bool = True,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> Algorithm:
    """`branching`, `subgroups` and `whiten` are the ablations.

    Without `branching` the rollouts of a prompt are drawn independently; then, or without
    `subgroups`, a rollout is compared with its prompt's others alone. `depth_average` is how the
    groups of a rollout weigh: plain or by size.
    """
    if depth_average not in DEPTH_AVERAGES:
        raise ValueError(
            f"algorithm.depth_average={depth_average!r}; allowed: {', '.join(DEPTH_AVERAGES)}"
        )
    if depth_average != "plain" and not (branching and subgroups):
        raise ValueError(
            f"algorithm.depth_average={depth_average!r}; allowed: plain without "
            f"algorithm.{'subgroups' if branching else 'branching'}"
        )
    if segment_length and not branching:
        raise ValueError(
            f"algorithm.segment_length={segment_length}; allowed: 0 without algorithm.branching"
        )
    segment = segment_length or -(-budget.max_new_tokens // 4)
    if branching and segment >= budget.max_new_tokens:
        raise ValueError(
            f"algorithm.segment_length={segment_length} (0: a quarter, rounded up); allowed: below "
            f"rollout.max_new_tokens={budget.max_new_tokens}"
        )
    planner, advantage = Fixed(group=budget.group), GroupMean()
    if branching:
        planner = Tree(
            group=budget.group,
            width_step=width_step,
            segment_length=segment,
            max_new_tokens=budget.max_new_tokens,
        )
        if subgroups:
            advantage = Ancestors(average=DEPTH_AVERAGES[depth_average])
    return Algorithm(
        explore=Explore(planner=planner),
        learn=Learn(
            advantage=Whitened(of=advantage) if whiten else advantage,
            clip=PPO(low=clip_low, high=clip_high),
            weight=TokenMean(),
        ),
    )
