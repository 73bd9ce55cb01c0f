"""The learner's step: log-probs of the old policy, scores of whole groups, optimizer updates.

Rows with the same prompt share it: a micro-batch is a fixed number of prompts, each continued by
`share` rows, and has one of a few prompt and completion lengths, so nothing recompiles whatever the
batch holds. Every micro-batch is a `shard_map` over the mesh's `data` axis; their gradients add up
because weights were fixed before (learn/weight.py).

Shapes: N rows of the batch · b prompts and n = b x share rows of a micro-batch · P prompt length ·
T completion tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

from xrpo_jax import mesh as meshes
from xrpo_jax import rng
from xrpo_jax.arrays import Batch, Params, Scores, TokenStats, TrainState
from xrpo_jax.learn.groups import Groups
from xrpo_jax.learn.objective import Learn, loss, score, sums_of
from xrpo_jax.log import Clock
from xrpo_jax.policy import Policy, token_stats

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
    share: int  # rows that continue one copy of their prompt
    prompt_lengths: tuple[int, ...]  # ascending; the last holds the longest prompt
    lengths: tuple[int, ...]  # of completions, ascending; the last holds the longest
    groups: int  # prompts of a step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learner:
    """The learner's entry points; batches are NumPy, parameters are on the devices."""

    annotate: Callable  # (params, reference params or None, Batch) -> Batch
    logp: Callable  # (params, list of (prompt tokens, completion tokens)) -> list of f32[<=T]
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
        return meshes.program(mapped, **options)

    def local_stats(params, rows):
        return token_stats(policy, params, *rows)

    def local_score(batch):
        groups = Groups(batch.group, batch.valid, schedule.groups, meshes.AXIS)
        return score(learn, batch, groups)

    def local_accumulate(params, total, rows, batch, scores, scale):
        def scaled_loss(params):
            # The parameters are the same on all devices, so their gradient is summed over them.
            params = jax.lax.pcast(params, meshes.AXIS, to="varying")
            stats = token_stats(policy, params, *rows)
            value, sums = loss(learn, stats, batch, scores)
            return jax.lax.psum(value, meshes.AXIS) * scale, sums

        gradient, sums = jax.grad(scaled_loss, has_aux=True)(params)
        sums = jax.lax.psum(sums, meshes.AXIS)
        return jax.tree.map(jnp.add, total, (gradient, sums))

    stats_of = sharded(local_stats, (ALL, ROWS), ROWS)
    score_of = sharded(local_score, (ROWS,), ROWS)
    accumulate = sharded(local_accumulate, (ALL, ALL, ROWS, ROWS, ROWS, ALL), ALL, donate_argnums=1)

    names = sums_of(learn)

    # Placed as `accumulate` returns them, or it would compile again for its own result.
    @functools.partial(jax.jit, out_shardings=meshes.everywhere(mesh))
    def zeros(params):
        sums = {name: jnp.zeros(()) for name in names}
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
        """The batch with what the old policy and, if given, the initial one say of its tokens."""
        shape = batch.mask.shape
        found = [TokenStats(logp=np.zeros(shape, np.float32), entropy=np.zeros(shape, np.float32))]
        found += [jax.tree.map(np.zeros_like, found[0])] if reference is not None else []
        for part in micro_batches(batch, np.flatnonzero(batch.valid), schedule):
            filled = part.rows >= 0
            rows, width = part.rows[filled], part.width
            inputs = put(model_inputs(batch, part), meshes.rows)
            for out, weights in zip(found, (params, reference), strict=False):
                stats = jax.device_get(stats_of(weights, inputs))
                out.logp[rows, :width] = stats.logp[filled]
                out.entropy[rows, :width] = stats.entropy[filled]
        old, *initial = jax.tree.map(lambda values: values * batch.mask, found)
        batch = batch.replace(old_logp=old.logp, old_entropy=old.entropy)
        for ref in initial:
            batch = batch.replace(ref_logp=ref.logp, ref_entropy=ref.entropy)
        return batch

    def logp(params: Params, texts: list[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
        """Log-probs of the tokens of completions that no batch holds."""
        batch = _empty(len(texts), schedule.prompt_lengths[-1], schedule.lengths[-1], learn)
        batch = jax.tree.map(np.array, batch)  # each field its own memory
        for i, (prompt, tokens) in enumerate(texts):
            batch.prompt[i, : len(prompt)], batch.prompt_length[i] = prompt, len(prompt)
            batch.tokens[i, : len(tokens)], batch.length[i] = tokens, len(tokens)
            batch.mask[i, : len(tokens)], batch.valid[i] = 1.0, 1.0
        found = annotate(params, None, batch).old_logp
        return [found[i, : len(tokens)] for i, (_, tokens) in enumerate(texts)]

    def update(state: TrainState, batch: Batch, seed: int, step: int, clock: Clock | None = None):
        """All optimizer updates of one annotated batch; metrics are floats."""
        clock = clock or Clock()
        with clock("score"):
            scores = jax.device_get(score_of(put(_for_score(batch, learn), meshes.rows)))
        report = {name: values[batch.valid > 0] for name, values in scores.report.items()}
        scores, read = scores.replace(report={}), _for_loss(batch, learn)
        draw = rng.host(seed, step, "minibatch")
        scale = put(np.float32(schedule.minibatches), meshes.everywhere)
        totals = dict.fromkeys(names, 0.0)
        norms = []
        for _ in range(schedule.epochs):
            for minibatch in _minibatches(batch, learn.whole_groups, schedule.minibatches, draw):
                if not np.any(scores.weight[minibatch]):
                    continue  # nothing to learn from: momentum shall not move anything either
                total = zeros(state.params)
                for part in micro_batches(batch, minibatch, schedule):
                    total = accumulate(
                        state.params,
                        total,
                        put(model_inputs(batch, part), meshes.rows),
                        put(_take(read, part), meshes.rows),
                        put(_take(scores, part), meshes.rows),
                        scale,
                    )
                gradient, sums = total
                state, norm = apply(state, gradient)
                sums, norm = jax.device_get((sums, norm))
                norms.append(float(norm))
                totals = {name: totals[name] + float(sums[name]) for name in names}
        return state, _metrics(totals, norms, scores, schedule.epochs) | _spread(report)

    def warm_up(state: TrainState) -> list[Callable]:
        def inputs(prompt_width: int, width: int) -> tuple:
            batch = _empty(schedule.rows, prompt_width, width, learn)
            part = MicroBatch(
                rows=np.arange(schedule.rows),
                share=schedule.share,
                prompt_width=prompt_width,
                width=width,
            )
            scores = Scores(advantage=batch.mask, weight=batch.mask, accuracy=batch.mask[:, 0])
            rows = put(model_inputs(batch, part), meshes.rows)
            return rows, put(_for_loss(batch, learn), meshes.rows), put(scores, meshes.rows)

        def annotating(*widths: int) -> None:
            jax.block_until_ready(stats_of(state.params, inputs(*widths)[0]))

        def accumulating(*widths: int) -> None:
            scale = put(np.float32(1.0), meshes.everywhere)
            total = accumulate(state.params, zeros(state.params), *inputs(*widths), scale)
            jax.block_until_ready(total)

        def applying() -> None:
            jax.block_until_ready(apply(state, zeros(state.params)[0]))

        each = [
            functools.partial(job, prompt_width, width)
            for prompt_width in schedule.prompt_lengths
            for width in schedule.lengths
            for job in (accumulating, annotating)
        ]
        return [*each, applying]

    return Learner(annotate=annotate, logp=logp, update=update, warm_up=warm_up)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Rows (indices, -1 = padding) in blocks that share a prompt, and the widths of both parts."""

    rows: np.ndarray
    share: int
    prompt_width: int
    width: int


def micro_batches(batch: Batch, rows: np.ndarray, schedule: Schedule) -> list[MicroBatch]:
    """Cut `rows` (indices) into micro-batches of blocks of `schedule.share` rows of one prompt.

    Raises ValueError when a prompt or completion is longer than all of the schedule's lengths.
    """
    widths = []
    for name, length, allowed in (
        ("prompt", batch.prompt_length, schedule.prompt_lengths),
        ("completion", batch.length, schedule.lengths),
    ):
        longest = int(np.max(length[rows], initial=0))
        if longest > allowed[-1]:
            raise ValueError(
                f"a {name} of {longest} tokens; micro-batches hold at most {allowed[-1]}"
            )
        widths.append(np.searchsorted(allowed, length[rows]))
    alike: dict[tuple, list[int]] = {}  # (widths, prompt) -> rows
    for row, prompt_place, place in zip(rows.tolist(), *widths, strict=True):
        prompt = batch.prompt[row, : batch.prompt_length[row]].tobytes()
        alike.setdefault((prompt_place, place, prompt), []).append(row)
    blocks: dict[tuple, list[np.ndarray]] = {}  # widths -> blocks
    for (prompt_place, place, _), members in alike.items():
        for start in range(0, len(members), schedule.share):
            block = np.full(schedule.share, -1)
            block[: len(members) - start] = members[start : start + schedule.share]
            blocks.setdefault((prompt_place, place), []).append(block)
    parts = []
    at_once = schedule.rows // schedule.share
    for (prompt_place, place), found in sorted(blocks.items(), key=lambda item: item[0]):
        for start in range(0, len(found), at_once):
            chosen = np.full((at_once, schedule.share), -1)
            chosen[: len(found) - start] = found[start : start + at_once]
            parts.append(
                MicroBatch(
                    rows=chosen.reshape(-1),
                    share=schedule.share,
                    prompt_width=schedule.prompt_lengths[prompt_place],
                    width=schedule.lengths[place],
                )
            )
    return parts


def model_inputs(batch: Batch, part: MicroBatch) -> tuple[np.ndarray, ...]:
    """What `token_stats` reads: prompts i32[b,P] and their lengths, rows i32[n,T] and theirs."""
    first = part.rows[:: part.share]  # a block's first row is real if any is
    return (
        _rows_of(batch.prompt, first)[:, : part.prompt_width],
        _rows_of(batch.prompt_length, first),
        _rows_of(batch.tokens, part.rows)[:, : part.width],
        _rows_of(batch.length, part.rows),
    )


def _take(tree: Any, part: MicroBatch) -> Any:
    """The micro-batch's rows of every array, cut to its width."""
    return jax.tree.map(
        lambda leaf: _rows_of(leaf, part.rows)[(slice(None), slice(part.width))[: leaf.ndim]], tree
    )


def _rows_of(leaf: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """`leaf[rows]`, zero where a row is -1."""
    out = leaf[np.maximum(rows, 0)]
    out[rows < 0] = 0
    return out


# What the losses read of every batch; the rest is for the model or for the scores.
READ = ("tokens", "length", "mask", "old_logp", "kind")


def _for_loss(batch: Batch, learn: Learn) -> Batch:
    """The batch without what no part of the loss reads, so that its structure is known before."""
    unread = {field.name for field in dataclasses.fields(Batch)} - {*READ, *learn.needs}
    return batch.replace(**dict.fromkeys(unread))


def _for_score(batch: Batch, learn: Learn) -> Batch:
    """The batch without what only the model and the log read."""
    sampled = None if learn.importance is None else batch.sampler_logp
    return batch.replace(prompt=None, prompt_length=None, sampler_logp=sampled)


def _minibatches(
    batch: Batch, whole_groups: bool, number: int, draw: np.random.Generator
) -> list[np.ndarray]:
    """The valid rows (indices) in `number` parts, shuffled if there are several."""
    order = np.flatnonzero(batch.valid)
    if number == 1:
        return [order]
    if not whole_groups:
        return np.array_split(draw.permutation(order), number)
    prompts = draw.permutation(np.unique(batch.group[order]))
    return [order[np.isin(batch.group[order], some)] for some in np.array_split(prompts, number)]


def _empty(size: int, prompt_width: int, width: int, learn: Learn) -> Batch:
    """A micro-batch of padding rows."""
    wide = np.zeros((size, width), np.float32)
    flat, count = np.zeros(size, np.float32), np.zeros(size, np.int32)
    return Batch(
        prompt=np.zeros((size, prompt_width), np.int32),
        prompt_length=count,
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
        **dict.fromkeys(learn.needs, wide),
    )


def _metrics(
    totals: dict[str, float], norms: list[float], scores: Scores, epochs: int
) -> dict[str, float]:
    tokens = max(totals["tokens"], 1.0)
    finite = [norm for norm in norms if np.isfinite(norm)]
    means = {name: total / tokens for name, total in totals.items() if name != "tokens"}
    return means | {
        "loss": totals["loss"] / epochs,
        "gradient_norm": float(np.mean(finite)) if finite else 0.0,
        "skipped_updates": float(len(norms) - len(finite)),
        "empty_batch": float(not np.any(scores.weight)),
        "advantage_max": float(np.max(np.abs(scores.advantage), initial=0.0)),
    }


def _spread(report: dict[str, np.ndarray]) -> dict[str, float]:
    """Mean, least and largest finite value over rows of what the score's parts report."""
    metrics = {}
    for name, values in report.items():
        finite = values[np.isfinite(values)]
        if finite.size:
            metrics[name] = float(finite.mean())
            metrics[f"{name}_low"], metrics[f"{name}_high"] = map(
                float, (finite.min(), finite.max())
            )
    return metrics
