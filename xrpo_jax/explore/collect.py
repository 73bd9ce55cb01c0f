"""One step of exploration: rounds of requests, sampled and graded, then packed for the learner.

Shapes: G prompt slots · N rollout rows · P prompt length · T new tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np

from xrpo_jax import rng
from xrpo_jax.arrays import Batch, Draw, Params
from xrpo_jax.explore.curriculum import Shuffled
from xrpo_jax.explore.planner import Fixed
from xrpo_jax.explore.reward import Correctness, Graded, reward_of
from xrpo_jax.explore.seeding import NoSeed
from xrpo_jax.explore.values import NoValues
from xrpo_jax.log import Clock
from xrpo_jax.types import Context, Ledger, Progress, Request, Rollout, Tools, Verdict


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
    rows: int
    prompt_length: int  # tokens of a plain prompt
    seeded_length: int  # tokens of a prompt with exemplars; equals prompt_length without a seeder
    max_new_tokens: int

    @property
    def row_length(self) -> int:
        """Tokens of the longest row."""
        return self.seeded_length + self.max_new_tokens


def init_ledger(explore: Explore, num_prompts: int, max_new_tokens: int) -> Ledger:
    """The memory of every host part before the first step."""
    return {
        "values": explore.values.init(num_prompts),
        "seeder": explore.seeder.init(max_new_tokens),
    }


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
) -> tuple[Batch, Ledger, Progress]:
    """Sample and grade one step: the learner's batch (NumPy), the next ledger, all rollouts."""
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
        rows = _sample(
            tools, draw, params, progress, requests, contexts, shape, round, seed, step, clock
        )
        with clock("verify"):
            verdicts = tools.grade([(row.prompt, row.text) for row in rows])
            graded = [
                _rewarded(explore, shape, row, verdict)
                for row, verdict in zip(rows, verdicts, strict=True)
            ]
        progress = _extend(progress, graded)
    with clock("plan"):
        batch = pack(progress, explore.planner.select(progress), shape)
        ledger = {
            "values": explore.values.observe(ledger["values"], progress),
            "seeder": explore.seeder.observe(ledger["seeder"], progress, step),
        }
    return batch, ledger, progress


def _begin(
    explore: Explore, tools: Tools, ledger: Ledger, shape: Shape, seed: int, step: int
) -> Progress:
    value = explore.values.read(ledger["values"], len(tools.task))
    count = explore.planner.slots(shape.prompts)
    prompts = explore.curriculum(value, seed, step, count)
    return Progress(
        prompts=tuple(int(prompt) for prompt in prompts),
        rollouts=((),) * count,
        batch=shape.prompts,
    )


def _sample(
    tools: Tools,
    draw: Draw,
    params: Params,
    progress: Progress,
    requests: list[Request],
    contexts: list[Context],
    shape: Shape,
    round: int,
    seed: int,
    step: int,
    clock: Clock,
) -> list[Rollout]:
    """Draw what was requested; verdict and reward are still to come (None and 0)."""
    with clock("plan"):
        sampled = [np.array(tools.encode(c.sampled), np.int32) for c in contexts]
        trained = [
            prompt if c.trained == c.sampled else np.array(tools.encode(c.trained), np.int32)
            for c, prompt in zip(contexts, sampled, strict=True)
        ]
        row, index = [], []
        for place, request in enumerate(requests):
            begun = len(progress.rollouts[request.slot])
            row += [place] * request.n
            index += range(begun, begun + request.n)
        prompt_of_row = np.array([progress.prompts[requests[place].slot] for place in row])
    with clock("sample"):
        keys = rng.Rows(
            step_key=rng.key(seed, step, "rollout"), prompt=prompt_of_row, index=np.array(index)
        )
        samples = draw(params, sampled, np.array(row), keys, shape.max_new_tokens)
    with clock("verify"):
        rollouts = []
        for i, place in enumerate(row):
            tokens = samples.tokens[i, : samples.length[i]]
            rollouts.append(
                Rollout(
                    prompt=int(prompt_of_row[i]),
                    slot=requests[place].slot,
                    index=index[i],
                    round=round,
                    kind=contexts[place].kind,
                    sampled_prompt=sampled[place],
                    trained_prompt=trained[place],
                    tokens=tokens,
                    logp=samples.logp[i, : samples.length[i]],
                    stopped=bool(samples.stopped[i]),
                    text=tools.decode(tokens),
                    verdict=None,
                    reward=0.0,
                )
            )
    return rollouts


def _rewarded(explore: Explore, shape: Shape, row: Rollout, verdict: Verdict) -> Rollout:
    graded = Graded(
        verdict=verdict, text=row.text, tokens=len(row.tokens), limit=shape.max_new_tokens
    )
    reward, terms = reward_of(explore.rewards, graded)
    return dataclasses.replace(row, verdict=verdict, reward=reward, terms=terms)


def _extend(progress: Progress, rows: list[Rollout]) -> Progress:
    rollouts = list(progress.rollouts)
    for row in rows:
        rollouts[row.slot] = (*rollouts[row.slot], row)
    return dataclasses.replace(progress, rollouts=tuple(rollouts))


def pack(progress: Progress, slots: list[int], shape: Shape) -> Batch:
    """The rollouts of `slots` as a NumPy batch of `shape.rows` rows, in slot and index order.

    `group` counts the chosen slots from 0. `old_logp` is 0 until the trainer annotates it.
    """
    rows = [(group, row) for group, slot in enumerate(slots) for row in progress.rollouts[slot]]
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
        batch.correct[i] = row.verdict.correct
        batch.group[i] = group
        batch.kind[i] = row.kind
        batch.stopped[i] = row.stopped
        batch.valid[i] = 1.0
    return batch
