"""The learner's step: log-probs of the old policy, scores of whole groups, optimizer updates.

Every micro-batch (learn/batches.py) is a `shard_map` over the mesh's `data` axis; their gradients
add up because weights were fixed before (learn/weight.py).

Shapes: N rows of the batch · n rows of a micro-batch · P prompt length · T completion tokens.
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
from xrpo_jax.arrays import Batch, Params, Scores, TokenStats, TrainState
from xrpo_jax.learn.batches import (
    MicroBatch,
    Schedule,
    blank,
    empty,
    for_loss,
    for_score,
    micro_batches,
    minibatches,
    model_inputs,
    take,
)
from xrpo_jax.learn.groups import Groups
from xrpo_jax.learn.metrics import metrics_of, spread_of
from xrpo_jax.learn.objective import Learn, loss, score, sums_of
from xrpo_jax.log import Clock
from xrpo_jax.policy import Policy, packed_stats

ROWS, ALL = PartitionSpec(meshes.AXIS), PartitionSpec()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learner:
    """The learner's entry points; batches are NumPy, parameters are on the devices."""

    annotate: Callable  # (params, reference params or None, Batch) -> Batch
    logp: Callable  # (params, list of (prompt tokens, completion tokens)) -> list of f32[<=T]
    # (TrainState, Batch, seed, step, Clock) -> (TrainState, metrics, Batch); the state is consumed
    update: Callable
    warm_up: Callable  # (TrainState) -> jobs that compile everything a step can need


def make_learner(
    learn: Learn,
    policy: Policy,
    optimizer: optax.GradientTransformation,
    schedule: Schedule,
    mesh: Mesh,
    deferred: bool = False,
) -> Learner:
    """The learner of one algorithm for one model on one mesh.

    With `deferred`, which only an algorithm allows whose scores and memories read no old log-probs,
    `annotate` leaves these as NaN, and the forward of the first minibatch says what they are: until
    then the policy is the one at the start of the update. The batch that `update` returns has them,
    but for rows that no gradient comes from. Raises ValueError for a schedule whose buffers cannot
    hold a block of rows.
    """
    if deferred and learn.reads_old_logp:
        raise ValueError("deferred=True; allowed: False where the scores read old log-probs")

    def sharded(function, in_specs, out_specs, **options):
        # check_vma stays on: without it the loss is right and the gradient silently wrong.
        mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
        return jax.jit(mapped, **options)

    def local_stats(params, rows):
        return packed_stats(policy, params, rows)

    def local_score(batch):
        groups = Groups(batch.group, batch.valid, schedule.groups, meshes.AXIS)
        return score(learn, batch, groups)

    def local_accumulate(params, total, rows, batch, scores, scale, own):
        # Varying before they are differentiated, so that each device adds to a sum of its own:
        # devices speak once an update, not once a micro-batch.
        params = jax.lax.pcast(params, meshes.AXIS, to="varying")

        def scaled_loss(params):
            with jax.named_scope("forward"):
                stats = packed_stats(policy, params, rows)
            now = jax.lax.stop_gradient(stats)
            old = {"old_logp": now.logp}
            old |= {"old_entropy": now.entropy} if "old_entropy" in learn.needs else {}
            read = batch.replace(
                **{name: jnp.where(own, new, getattr(batch, name)) for name, new in old.items()}
            )
            with jax.named_scope("loss"):
                value, sums = loss(learn, stats, read, scores)
            return value * scale, (sums, now)

        gradient, (sums, now) = jax.grad(scaled_loss, has_aux=True)(params)
        with jax.named_scope("accumulate"):
            return jax.tree.map(lambda old, new: old + new[None], total, (gradient, sums)), now

    stats_of = sharded(local_stats, (ALL, ROWS), ROWS)
    score_of = meshes.in_order(sharded(local_score, (ROWS,), ROWS))
    accumulate = sharded(
        local_accumulate,
        (ALL, ROWS, ROWS, ROWS, ROWS, ALL, ALL),
        (ROWS, ROWS),
        donate_argnums=1,
    )

    names = sums_of(learn)

    # Placed as `accumulate` returns them, or it would compile again for its own result.
    @functools.partial(jax.jit, out_shardings=meshes.rows(mesh))
    def zeros(params):
        """What each device adds its gradient and sums to: one leading entry a device."""
        sums = {name: jnp.zeros(mesh.size) for name in names}
        return jax.tree.map(lambda leaf: jnp.zeros((mesh.size, *leaf.shape)), params), sums

    # The total is not given away: nothing that is returned would need a third such buffer.
    @functools.partial(jax.jit, donate_argnums=0, out_shardings=meshes.everywhere(mesh))
    def apply(state: TrainState, total) -> tuple[TrainState, jax.Array, dict]:
        with jax.named_scope("optimizer"):
            gradient, sums = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), total)
            norm = optax.tree.norm(gradient)
            change, memory = optimizer.update(gradient, state.optimizer, state.params)
            moved = TrainState(params=optax.apply_updates(state.params, change), optimizer=memory)
            # A step whose gradient is not finite would ruin the run: it is left out and counted.
            finite = jnp.isfinite(norm)
            state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), moved, state)
            return state, norm, sums

    schedule = dataclasses.replace(schedule, devices=mesh.size)
    schedule.shapes()  # refuses a buffer that is too small
    ready = _Programs()

    def put(tree, where):
        return jax.device_put(tree, where(mesh))

    def annotate(params: Params, reference: Params | None, batch: Batch):
        """The batch with what the old policy and, if given, the initial one say of its tokens."""
        everything = np.flatnonzero(batch.valid)
        unknown = np.full(batch.mask.shape, np.nan, np.float32)
        batch = batch.replace(old_logp=unknown, old_entropy=unknown.copy())
        if not deferred:
            old = looked_at(params, batch, everything)
            batch = batch.replace(old_logp=old.logp, old_entropy=old.entropy)
        if reference is not None:
            initial = looked_at(reference, batch, everything)
            batch = batch.replace(ref_logp=initial.logp, ref_entropy=initial.entropy)
        return batch

    def looked_at(params: Params, batch: Batch, rows: np.ndarray) -> TokenStats:
        """What a policy says of the tokens of `rows` f32[N,T]; 0 in other rows."""
        nothing = np.zeros(batch.mask.shape, np.float32)
        found = TokenStats(logp=nothing, entropy=nothing.copy())
        for part in micro_batches(batch, rows, schedule):
            inputs = put(model_inputs(batch, part), meshes.rows)
            _fill(found, part, ready(stats_of, params, inputs)(params, inputs))
        return jax.tree.map(lambda values: values * batch.mask, found)

    def logp(params: Params, texts: list[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
        """Log-probs of the tokens of completions that no batch holds."""
        batch = empty(len(texts), schedule.prompt_lengths[-1], schedule.lengths[-1], frozenset())
        batch = jax.tree.map(np.array, batch)  # each field its own memory
        for i, (prompt, tokens) in enumerate(texts):
            batch.prompt[i, : len(prompt)], batch.prompt_length[i] = prompt, len(prompt)
            batch.tokens[i, : len(tokens)], batch.length[i] = tokens, len(tokens)
            batch.mask[i, : len(tokens)] = 1.0
        found = looked_at(params, batch, np.arange(len(texts))).logp
        return [found[i, : len(tokens)] for i, (_, tokens) in enumerate(texts)]

    def update(state: TrainState, batch: Batch, seed: int, step: int, clock: Clock | None = None):
        """All optimizer updates of one annotated batch; metrics are floats."""
        clock = clock or Clock()
        with clock("score"):
            scores = jax.device_get(score_of(put(for_score(batch, learn, deferred), meshes.rows)))
        report = {name: values[batch.valid > 0] for name, values in scores.report.items()}
        scores = scores.replace(report={})
        draw = rng.host(seed, step, "minibatch")
        updates = [
            rows
            for _ in range(schedule.epochs)
            for rows in minibatches(batch, learn.whole_groups, schedule.minibatches, draw)
            # Where no row counts, momentum shall not move anything either.
            if np.any(scores.weight[rows])
        ]
        pulling = _pulling(learn, scores)
        if deferred and updates:
            batch = batch.replace(
                old_logp=batch.old_logp.copy(), old_entropy=batch.old_entropy.copy()
            )
            later = np.setdiff1d(np.concatenate(updates), updates[0])
            later = later[pulling[later]]
            old = looked_at(state.params, batch, later)
            batch.old_logp[later], batch.old_entropy[later] = old.logp[later], old.entropy[later]
        scale = put(np.float32(schedule.minibatches), meshes.everywhere)
        totals = dict.fromkeys(names, 0.0)
        norms = []
        for number, rows in enumerate(updates):
            own = put(np.bool_(deferred and number == 0), meshes.everywhere)
            read, total, found = for_loss(batch, learn.needs), zeros(state.params), []
            for part in micro_batches(batch, rows[pulling[rows]], schedule):
                arguments = (
                    state.params,
                    total,
                    *put(
                        (model_inputs(batch, part), take(read, part), take(scores, part)),
                        meshes.rows,
                    ),
                    scale,
                    own,
                )
                total, stats = ready(accumulate, *arguments)(*arguments)
                if deferred and number == 0:
                    found.append((part, stats))
            for part, stats in found:
                _fill(TokenStats(logp=batch.old_logp, entropy=batch.old_entropy), part, stats)
            state, *said = ready(apply, state, total)(state, total)
            norm, sums = jax.device_get(said)
            norms.append(float(norm))
            totals = {name: totals[name] + float(sums[name]) for name in names}
        return state, metrics_of(totals, norms, scores, schedule.epochs) | spread_of(report), batch

    def warm_up(state: TrainState) -> list[Callable]:
        def like(tree, where):
            return jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where(mesh)),
                tree,
            )

        params = like(state.params, meshes.everywhere)
        total = like(jax.eval_shape(zeros, state.params), meshes.rows)

        def inputs(prompt_width: int, width: int, slots: int) -> tuple:
            batch = empty(1, prompt_width, width, learn.needs)
            part = blank(schedule, prompt_width, width, slots)
            scores = Scores(advantage=batch.mask, weight=batch.mask, accuracy=batch.mask[:, 0])
            read = take((for_loss(batch, learn.needs), scores), part)
            return like((model_inputs(batch, part), *read), meshes.rows)

        def annotating(*shape: int) -> None:
            ready(stats_of, params, inputs(*shape)[0])

        def accumulating(*shape: int) -> None:
            flags = like((np.float32(1.0), np.bool_(False)), meshes.everywhere)
            ready(accumulate, params, total, *inputs(*shape), *flags)

        def applying() -> None:
            ready(apply, like(state, meshes.everywhere), total)
            jax.block_until_ready(zeros(state.params))

        each = [
            functools.partial(job, *shape)
            for shape in schedule.shapes()
            for job in (accumulating, annotating)
        ]
        return [*each, applying]

    return Learner(annotate=annotate, logp=logp, update=update, warm_up=warm_up)


class _Programs(dict):
    """Compiled programs by function and shapes, so that they compile before there is any data."""

    def __call__(self, function: Callable, *arguments) -> Callable:
        """`function` compiled for arrays, or shapes with their placement, such as these."""
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(arguments))
        key = function, shapes
        if key not in self:
            self[key] = meshes.in_order(function.lower(*arguments).compile())
        return self[key]


def _pulling(learn: Learn, scores: Scores) -> np.ndarray:
    """Rows bool[N] that a gradient can come from.

    A surrogate is a product with the advantage (tested of every algorithm), a penalty is not.
    """
    if learn.penalties:
        return np.ones(len(scores.weight), bool)
    return np.any(scores.weight * scores.advantage != 0, axis=1)


def _fill(into: TokenStats, part: MicroBatch, stats: TokenStats) -> None:
    """Write a micro-batch's stats into the rows f32[N,T] of the batch that it holds."""
    filled, width = part.rows >= 0, part.width
    for whole, values in zip(jax.tree.leaves(into), jax.tree.leaves(stats), strict=True):
        whole[part.rows[filled]] = 0.0
        whole[part.rows[filled], :width] = np.asarray(values)[filled]
