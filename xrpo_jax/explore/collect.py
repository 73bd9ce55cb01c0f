"""One step of exploration: rounds of requests, sampled and graded, then packed for the learner.

Shapes: G prompt slots · N rollout rows · P prompt length · T new tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import jax
import numpy as np

from xrpo_jax.arrays import Batch, Draw, Params
from xrpo_jax.explore.curriculum import Shuffled
from xrpo_jax.explore.planner import Fixed
from xrpo_jax.explore.reward import Correctness, Graded, reward_of
from xrpo_jax.explore.sample import sample
from xrpo_jax.explore.seeding import NoSeed
from xrpo_jax.explore.values import LogpOf, NoValues
from xrpo_jax.log import Clock
from xrpo_jax.types import Ledger, Progress, Rollout, Tools


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explore:
    """The host half: which prompts, how many rollouts, under which context, for which reward."""

    planner: Callable = Fixed(group=8)
    values: Callable = NoValues()
    curriculum: Callable = Shuffled()
    seeder: Callable = NoSeed()
    rewards: tuple[Callable, ...] = (Correctness(),)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """The fixed sizes of a step: prompts, rows, longest prompt and completion in tokens."""

    prompts: int
    rows: int  # that the learner gets at most
    prompt_length: int  # tokens of a plain prompt
    seeded_length: int  # tokens of a prompt with what a seeder adds; prompt_length without one
    max_new_tokens: int
    depth: int = 1  # segments of a rollout; above 1 the learner gets `Batch.ancestors`


def init_ledger(explore: Explore, num_prompts: int, max_new_tokens: int) -> Ledger:
    """The memory of every host part before the first step, and the tokens decoded so far."""
    return {
        "values": explore.values.init(num_prompts, max_new_tokens),
        "seeder": explore.seeder.init(max_new_tokens) if _remembers(explore) else {},
        "decoded": {"tokens": np.zeros((), np.int64)},
    }


def _remembers(explore: Explore) -> bool:
    return hasattr(explore.seeder, "observe")


def collect(
    explore: Explore,
    tools: Tools,
    draw: Draw,
    params: Params,
    ledger: Ledger,
    shape: Shape,
    seed: int,
    step: int,
    clock: Clock,
) -> tuple[Batch, Progress]:
    """Sample and grade one step: the learner's batch (NumPy) and all that was drawn."""
    pauses = getattr(explore.planner, "pauses", False)
    with clock("plan"):
        progress = _begin(explore, tools, ledger, shape, seed, step)
    for round in itertools.count():
        with clock("plan"):
            requests = explore.planner(progress, round)
            if not requests:
                break
            contexts = [
                explore.seeder(request, progress, ledger["seeder"], tools) for request in requests
            ]
        rows = sample(tools, draw, params, progress, requests, contexts, pauses, round, clock)
        with clock("verify"):
            progress = _extend(progress, [_rewarded(explore, shape, row) for row in rows])
    forget_paths([row for slot in (*progress.rollouts, *progress.drafts) for row in slot])
    with clock("plan"):
        batch = pack(progress, explore.planner.select(progress), shape)
    return batch, progress


def forget_paths(rows: list[Rollout]) -> None:
    """Free the device's memory that rows could go on from; it is wanted before they are gone."""
    caches = {id(row.path.cache): row.path.cache for row in rows if row.path is not None}
    for leaf in jax.tree.leaves(list(caches.values())):
        leaf.delete()


def remember(
    explore: Explore, ledger: Ledger, progress: Progress, batch: Batch, logp_of: LogpOf
) -> Ledger:
    """The ledger after a step whose batch the learner has annotated."""
    rows = [row for group in explore.planner.select(progress) for row in group]
    old_logp = {
        (row.slot, row.index): batch.old_logp[i, : len(row.tokens)] for i, row in enumerate(rows)
    }
    seeder = ledger["seeder"]
    if _remembers(explore):
        seeder = explore.seeder.observe(seeder, progress, progress.step)
    return {
        "values": explore.values.observe(ledger["values"], progress, old_logp, logp_of),
        "seeder": seeder,
        "decoded": {"tokens": ledger["decoded"]["tokens"] + progress.decoded},
    }


def _begin(
    explore: Explore, tools: Tools, ledger: Ledger, shape: Shape, seed: int, step: int
) -> Progress:
    value = explore.values.read(ledger["values"], len(tools.task))
    count = explore.planner.slots(shape.prompts)
    prompts = explore.curriculum(value, seed, step, count)
    return Progress(
        prompts=tuple(int(prompt) for prompt in prompts),
        rollouts=((),) * count,
        drafts=((),) * count,
        batch=shape.prompts,
        seed=seed,
        step=step,
        max_new_tokens=shape.max_new_tokens,
        values=ledger["values"],
        value=value[prompts],
    )


def _rewarded(explore: Explore, shape: Shape, row: Rollout) -> Rollout:
    """The row with its reward, unless it is a draft."""
    if row.draft:
        return row
    facts = Graded(
        verdict=row.verdict, text=row.text, tokens=len(row.tokens), limit=shape.max_new_tokens
    )
    reward, terms = reward_of(explore.rewards, facts)
    return dataclasses.replace(row, reward=reward, terms=terms)


def _extend(progress: Progress, rows: list[Rollout]) -> Progress:
    rollouts, drafts = list(progress.rollouts), list(progress.drafts)
    for row in rows:
        into = drafts if row.draft else rollouts
        into[row.slot] = (*into[row.slot], row)
    return dataclasses.replace(progress, rollouts=tuple(rollouts), drafts=tuple(drafts))


def pack(progress: Progress, groups: list[tuple[Rollout, ...]], shape: Shape) -> Batch:
    """Groups of rollouts as a NumPy batch of `shape.rows` rows, in their order.

    `group` counts them from 0. `old_logp` is 0 until the trainer annotates it.
    """
    rows = [(group, row) for group, members in enumerate(groups) for row in members]
    if len(rows) > shape.rows:
        raise ValueError(f"the planner drew {len(rows)} rollouts; the step has {shape.rows} rows")
    size, width = shape.rows, shape.max_new_tokens
    batch = Batch(
        prompt=np.zeros((size, shape.seeded_length), np.int32),
        prompt_length=np.zeros(size, np.int32),
        tokens=np.zeros((size, width), np.int32),
        length=np.zeros(size, np.int32),
        mask=np.zeros((size, width), np.float32),
        old_logp=np.zeros((size, width), np.float32),
        reward=np.zeros(size, np.float32),
        correct=np.zeros(size, np.float32),
        group=np.zeros(size, np.int32),
        kind=np.zeros(size, np.int32),
        stopped=np.zeros(size, np.float32),
        valid=np.zeros(size, np.float32),
        baseline=np.zeros(size, np.float32),
        ancestors=_ancestors(rows, shape) if shape.depth > 1 else None,
        sampler_logp=np.full((size, width), np.nan, np.float32),
    )
    for i, (group, row) in enumerate(rows):
        batch.prompt[i, : len(row.trained_prompt)] = row.trained_prompt
        batch.prompt_length[i] = len(row.trained_prompt)
        batch.tokens[i, : len(row.tokens)] = row.tokens
        batch.length[i] = len(row.tokens)
        batch.mask[i, : len(row.tokens)] = 1.0
        if row.trained_prompt is row.sampled_prompt:
            batch.sampler_logp[i, : len(row.tokens)] = row.logp
        batch.reward[i] = row.reward
        batch.correct[i] = row.verdict is not None and row.verdict.correct
        batch.baseline[i] = 0.0 if progress.value is None else progress.value[row.slot]
        batch.group[i] = group
        batch.kind[i] = row.kind
        batch.stopped[i] = row.stopped
        batch.valid[i] = 1.0
    return batch


def _ancestors(rows: list[tuple[int, Rollout]], shape: Shape) -> np.ndarray:
    """`Batch.ancestors`: the group, then the row of each further segment, numbered by column.

    A row without a segment there is alone; padding rows are 0.
    """
    out = np.zeros((shape.rows, shape.depth), np.int32)
    numbers: list[dict] = [{} for _ in range(shape.depth)]
    for i, (group, row) in enumerate(rows):
        nodes = lineage(row)
        for depth, known in enumerate(numbers):
            node = ("alone", i) if depth > len(nodes) else (group, nodes[depth - 1].index)
            node = group if depth == 0 else node
            out[i, depth] = known.setdefault(node, len(known))
    return out


def lineage(row: Rollout) -> list[Rollout]:
    """The drafts that a rollout goes on with, the first one first, and the rollout itself."""
    nodes = [row]
    while nodes[0].resumed:
        nodes.insert(0, nodes[0].source)
    return nodes
