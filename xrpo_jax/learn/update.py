"""The learner's step: log-probs of the old policy, scores of whole groups, optimizer updates.

Rows are grouped into micro-batches of a fixed number of rows and one of a few lengths, so nothing
recompiles whatever the batch holds. Every micro-batch is a `shard_map` over the mesh's `data` axis;
their gradients add up because weights were fixed before (learn/weight.py).

Shapes: N rows of the batch · n rows of a micro-batch · S tokens of a row.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

from xrpo_jax import mesh as meshes
from xrpo_jax import rng
from xrpo_jax.learn.groups import Groups
from xrpo_jax.learn.objective import Learn, loss, score
from xrpo_jax.log import Clock
from xrpo_jax.policy import Policy, token_stats
from xrpo_jax.types import Batch, Params, Scores, TrainState

SUMS = ("loss", "tokens", "clipped", "kl_old", "entropy")
ROWS, ALL = PartitionSpec(meshes.AXIS), PartitionSpec()


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW; the warm-up counts updates."""

    learning_rate: float = 3e-4
    warmup: int = 5
    clip_norm: float = 1.0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """How a batch is cut: optimizer updates an epoch, epochs, rows and lengths of a micro-batch."""

    minibatches: int
    epochs: int
    rows: int  # over all devices
    lengths: tuple[int, ...]  # ascending; the last holds the longest row
    groups: int  # prompts of a step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learner:
    """The learner's three entry points; batches are NumPy, parameters are on the devices."""

    annotate: Callable  # (params, reference params or None, Batch) -> (Batch, entropy f32[N,S])
    update: Callable  # (TrainState, Batch, seed, step, Clock) -> (TrainState, metrics)
    warm_up: Callable  # (TrainState) -> jobs that compile everything a step can need


def make_optimizer(settings: OptimizerSettings) -> optax.GradientTransformation:
    """AdamW with a linear warm-up (in updates) and clipping by global norm."""
    rate = optax.linear_schedule(
        settings.learning_rate / (settings.warmup + 1), settings.learning_rate, settings.warmup
    )
    return optax.chain(
        optax.clip_by_global_norm(settings.clip_norm),
        optax.adamw(rate, b1=settings.beta1, b2=settings.beta2, weight_decay=settings.weight_decay),
    )


def make_learner(
    learn: Learn,
    policy: Policy,
    optimizer: optax.GradientTransformation,
    schedule: Schedule,
    mesh: Mesh,
) -> Learner:
    """The learner of one algorithm for one model on one mesh."""

    def sharded(function, in_specs, out_specs, **options):
        # check_vma stays on: without it the loss is right and the gradient silently wrong.
        mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
        return jax.jit(mapped, **options)

    def local_stats(params, tokens, length):
        return token_stats(policy, params, tokens, length)

    def local_score(batch):
        groups = Groups(batch.group, batch.valid, schedule.groups, meshes.AXIS)
        return score(learn, batch, groups)

    def local_accumulate(params, total, batch, scores, scale):
        def scaled_loss(params):
            stats = token_stats(policy, params, batch.tokens, batch.length)
            value, sums = loss(learn, stats, batch, scores)
            return value * scale, sums

        # The parameters are the same on all devices, so their gradient is summed over them.
        gradient, sums = jax.grad(scaled_loss, has_aux=True)(params)
        sums = jax.lax.psum(sums, meshes.AXIS)
        return jax.tree.map(jnp.add, total, (gradient, sums))

    stats_of = sharded(local_stats, (ALL, ROWS, ROWS), ROWS)
    score_of = sharded(local_score, (ROWS,), ROWS)
    accumulate = sharded(local_accumulate, (ALL, ALL, ROWS, ROWS, ALL), ALL, donate_argnums=1)

    # Placed as `accumulate` returns them, or it would compile again for its own result.
    @functools.partial(jax.jit, out_shardings=meshes.everywhere(mesh))
    def zeros(params):
        sums = {name: jnp.zeros(()) for name in SUMS}
        return jax.tree.map(jnp.zeros_like, params), sums

    @jax.jit
    def apply(state: TrainState, gradient) -> tuple[TrainState, jax.Array]:
        norm = optax.tree.norm(gradient)
        change, memory = optimizer.update(gradient, state.optimizer, state.params)
        moved = TrainState(params=optax.apply_updates(state.params, change), optimizer=memory)
        # A step whose gradient is not finite would ruin the run: it is left out and counted.
        finite = jnp.isfinite(norm)
        return jax.tree.map(lambda new, old: jnp.where(finite, new, old), moved, state), norm

    def put(tree, where):
        return jax.device_put(tree, where(mesh))

    def annotate(params: Params, reference: Params | None, batch: Batch):
        """The batch with `old_logp` (and `ref_logp`), and the policy's entropy f32[N,S]."""
        old, entropy = np.zeros_like(batch.old_logp), np.zeros_like(batch.old_logp)
        ref = None if reference is None else np.zeros_like(batch.old_logp)
        for rows, width in micro_batches(np.flatnonzero(batch.valid), batch.length, schedule):
            tokens = put(_take(batch.tokens, rows, schedule.rows, width), meshes.rows)
            length = put(_take(batch.length, rows, schedule.rows), meshes.rows)
            stats = jax.device_get(stats_of(params, tokens, length))
            old[rows, :width] = stats.logp[: len(rows)]
            entropy[rows, :width] = stats.entropy[: len(rows)]
            if ref is not None:
                stats = jax.device_get(stats_of(reference, tokens, length))
                ref[rows, :width] = stats.logp[: len(rows)]
        trained = batch.mask
        ref = None if ref is None else ref * trained
        return batch.replace(old_logp=old * trained, ref_logp=ref), entropy * trained

    def update(state: TrainState, batch: Batch, seed: int, step: int, clock: Clock | None = None):
        """All optimizer updates of one annotated batch; metrics are floats."""
        clock = clock or Clock()
        batch = batch.replace(sampler_logp=None)
        with clock("score"):
            scores = jax.device_get(score_of(put(batch, meshes.rows)))
        draw = rng.host(seed, step, "minibatch")
        scale = put(np.float32(schedule.minibatches), meshes.everywhere)
        totals = dict.fromkeys(SUMS, 0.0)
        norms = []
        for _ in range(schedule.epochs):
            order = np.flatnonzero(batch.valid)
            if schedule.minibatches > 1:
                order = draw.permutation(order)
            for minibatch in np.array_split(order, schedule.minibatches):
                if not np.any(scores.weight[minibatch]):
                    continue  # nothing to learn from: momentum shall not move anything either
                total = zeros(state.params)
                for rows, width in micro_batches(minibatch, batch.length, schedule):
                    part, weights = (
                        jax.tree.map(
                            lambda leaf, rows=rows, width=width: _take(
                                leaf, rows, schedule.rows, width if leaf.ndim > 1 else None
                            ),
                            tree,
                        )
                        for tree in (batch, scores)
                    )
                    total = accumulate(
                        state.params,
                        total,
                        put(part, meshes.rows),
                        put(weights, meshes.rows),
                        scale,
                    )
                gradient, sums = total
                state, norm = apply(state, gradient)
                sums, norm = jax.device_get((sums, norm))
                norms.append(float(norm))
                totals = {name: totals[name] + float(sums[name]) for name in SUMS}
        return state, _metrics(totals, norms, scores, schedule.epochs)

    def warm_up(state: TrainState) -> list[Callable]:
        def micro_batch(width: int) -> tuple:
            batch = _empty(schedule.rows, width, learn.needs_reference)
            scores = Scores(advantage=batch.mask, weight=batch.mask)
            return put(batch, meshes.rows), put(scores, meshes.rows)

        def annotating(width: int) -> None:
            batch, _ = micro_batch(width)
            jax.block_until_ready(stats_of(state.params, batch.tokens, batch.length))

        def accumulating(width: int) -> None:
            scale = put(np.float32(1.0), meshes.everywhere)
            total = accumulate(state.params, zeros(state.params), *micro_batch(width), scale)
            jax.block_until_ready(total)

        def applying() -> None:
            jax.block_until_ready(apply(state, zeros(state.params)[0]))

        each = [
            functools.partial(job, width)
            for width in schedule.lengths
            for job in (accumulating, annotating)
        ]
        return [*each, applying]

    return Learner(annotate=annotate, update=update, warm_up=warm_up)


def micro_batches(
    rows: np.ndarray, length: np.ndarray, schedule: Schedule
) -> list[tuple[np.ndarray, int]]:
    """Cut `rows` (indices) into parts of at most `schedule.rows` that share a padded length.

    Raises ValueError when a row is longer than all of them.
    """
    longest = int(np.max(length[rows], initial=0))
    if longest > schedule.lengths[-1]:
        raise ValueError(
            f"a row of {longest} tokens; micro-batches hold at most {schedule.lengths[-1]}"
        )
    bucket = np.searchsorted(schedule.lengths, length[rows])
    parts = []
    for place, width in enumerate(schedule.lengths):
        members = rows[bucket == place]
        for start in range(0, len(members), schedule.rows):
            parts.append((members[start : start + schedule.rows], width))
    return parts


def _take(leaf: np.ndarray, rows: np.ndarray, size: int, width: int | None = None) -> np.ndarray:
    """`leaf[rows]`, cut to `width` columns and padded with zero rows to `size`."""
    out = np.zeros((size, *leaf.shape[1:]), leaf.dtype)
    out[: len(rows)] = leaf[rows]
    return out if width is None else out[:, :width]


def _empty(size: int, width: int, reference: bool) -> Batch:
    """A micro-batch of padding rows."""
    wide = np.zeros((size, width), np.float32)
    flat, count = np.zeros(size, np.float32), np.zeros(size, np.int32)
    return Batch(
        tokens=wide.astype(np.int32),
        length=count,
        mask=wide,
        old_logp=wide,
        reward=flat,
        correct=flat,
        group=count,
        kind=count,
        stopped=flat,
        valid=flat,
        ref_logp=wide if reference else None,
    )


def _metrics(
    totals: dict[str, float], norms: list[float], scores: Scores, epochs: int
) -> dict[str, float]:
    tokens = max(totals["tokens"], 1.0)
    finite = [norm for norm in norms if np.isfinite(norm)]
    return {
        "loss": totals["loss"] / epochs,
        "entropy": totals["entropy"] / tokens,
        "kl_old": totals["kl_old"] / tokens,
        "clip_fraction": totals["clipped"] / tokens,
        "gradient_norm": float(np.mean(finite)) if finite else 0.0,
        "skipped_updates": float(len(norms) - len(finite)),
        "empty_batch": float(not np.any(scores.weight)),
        "advantage_max": float(np.max(np.abs(scores.advantage), initial=0.0)),
    }
