"""Everything a run works with, made once from its settings, and checked against each other."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from xrpo_jax import machine, mesh, tokenizer
from xrpo_jax.arrays import Draw, Params, TrainState
from xrpo_jax.chat import Chat, make_chat
from xrpo_jax.config import EMBEDDED, RolloutSettings, Settings, VerifySettings, check_enough
from xrpo_jax.explore.collect import Shape, init_ledger
from xrpo_jax.explore.grading import Here, grade_of, in_workers
from xrpo_jax.learn.batches import Schedule
from xrpo_jax.learn.optimizer import make_optimizer
from xrpo_jax.learn.update import Learner, make_learner
from xrpo_jax.model import hf
from xrpo_jax.model.config import ModelConfig
from xrpo_jax.model.source import Source, find
from xrpo_jax.policy import Policy
from xrpo_jax.prompts import digest, fitting
from xrpo_jax.sampler import Sampler, make_draw
from xrpo_jax.sampling import Method
from xrpo_jax.tokenizer import Tokenizer
from xrpo_jax.types import Grading, Ledger, Task, Tools
from xrpo_jax.verify.pool import Pool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """What the loop works with, made once from the settings."""

    facts: dict  # what a run must find again on resume, beside its settings or in their place
    source: Source  # of the initial policy
    model: ModelConfig
    chat: Chat
    pool: Pool | None  # of graders, where one of the tasks needs it
    tools: Tools
    eval_tools: Tools
    shape: Shape
    draw: Draw
    eval_draw: Draw
    learner: Learner
    reference: Params | None
    ledger: Ledger


def build(settings: Settings) -> tuple[Parts, TrainState]:
    """Load the policy and make every part, and the state of a run that has not begun.

    ValueError when settings and model do not fit.
    """
    rollout, algorithm = settings.rollout, settings.algorithm
    devices = mesh.make(settings.mesh.devices, settings.mesh.cpu_devices)
    source = find(settings.init_from or str(EMBEDDED))
    model = hf.config_of(source)
    words = tokenizer.load(source.folder)
    chat = make_chat(words, settings.text)
    seeder = algorithm.explore.seeder
    seeded_length = rollout.seeded_length if seeder.seeds else rollout.prompt_length
    planner = algorithm.explore.planner
    rows = planner.rows(rollout.prompts)
    shape = Shape(
        prompts=rollout.prompts,
        rows=rows + -rows % devices.size,
        prompt_length=rollout.prompt_length,
        seeded_length=seeded_length,
        max_new_tokens=rollout.max_new_tokens,
        depth=getattr(planner, "depth", 1),
    )
    _check_fit(settings, shape, model, words, devices.size)
    tasks = tuple(
        fitting(task, chat.encode, rollout.prompt_length, settings.text.overlong)
        for task in (settings.task, settings.eval_task)
    )
    # They refuse settings, so before workers start and parameters are read.
    lanes, completions = _lanes(rollout, devices), _completion_lengths(settings)
    pool, gradings = _gradings(tasks, settings.verify)  # its workers start while this compiles
    tools, eval_tools = (
        Tools(
            task=task,
            grading=grading,
            encode=chat.encode,
            decode=lambda tokens: chat.opening + words.decode(tokens),
            prompt_limit=seeded_length,
            begin=tuple(words.encode("")),
        )
        for task, grading in zip(tasks, gradings, strict=True)
    )
    check_enough(tools.task, algorithm, rollout.prompts)  # prompts may have been dropped
    if hasattr(seeder, "check"):
        seeder.check(tools)
    _, params = hf.load(source, mesh.everywhere(devices))
    lengths = tuple(sorted({rollout.prompt_length, seeded_length}))
    sampler = Sampler(
        model=model,
        method=Method(temperature=rollout.temperature),
        dtype=settings.model.dtype,
        prompts=rollout.prompts,
        slots=rollout.slots,
        lengths=lengths,
        max_new_tokens=rollout.max_new_tokens,
        stop_ids=words.stop_ids,
        lanes=lanes,
        chunk=rollout.chunk,
    )
    method = Method(
        temperature=settings.eval.temperature, top_k=settings.eval.top_k, top_p=settings.eval.top_p
    )
    draw = make_draw(sampler, devices)
    eval_draw = draw
    if method != sampler.method:
        eval_draw = make_draw(dataclasses.replace(sampler, method=method), devices)
    optimizer = make_optimizer(settings.optimizer)
    memory = jax.device_put(optimizer.init(params), mesh.everywhere(devices))
    learner = make_learner(
        algorithm.learn,
        Policy(
            model=model,
            temperature=rollout.temperature,
            dtype=settings.model.dtype,
            remat=settings.model.remat,
            tile=settings.model.logits_tile,
        ),
        optimizer,
        Schedule(
            minibatches=settings.train.minibatches,
            epochs=settings.train.epochs,
            rows=settings.train.micro_batch,
            tokens=settings.train.micro_tokens,
            share=settings.train.share,
            prompt_lengths=lengths if seeder.trains_seeded else lengths[:1],
            lengths=completions,
            groups=min(planner.slots(rollout.prompts), shape.rows),
        ),
        devices,
        deferred=not (
            algorithm.learn.reads_old_logp
            or getattr(algorithm.explore.values, "reads_old_logp", False)
        ),
    )
    parts = Parts(
        facts={
            "mesh": {"devices": devices.size},
            "rollout": settings.resolved["rollout"] | {"lanes": lanes},
            "prompts": {
                "train": len(tools.task),
                "held_out": len(eval_tools.task),
                "digest": digest(tools.task, eval_tools.task),
            },
            "commit": source.commit,
        },
        source=source,
        model=model,
        chat=chat,
        pool=pool,
        tools=tools,
        eval_tools=eval_tools,
        shape=shape,
        draw=draw,
        eval_draw=eval_draw,
        learner=learner,
        # A copy, since an update consumes the state it is given.
        reference=jax.tree.map(jnp.copy, params) if algorithm.learn.needs_reference else None,
        ledger=init_ledger(algorithm.explore, len(tools.task), rollout.max_new_tokens),
    )
    return parts, TrainState(params=params, optimizer=memory)


def _gradings(tasks: tuple[Task, ...], settings: VerifySettings) -> tuple[Pool | None, list]:
    """How each task is graded: here where its verifier is bounded, else in one pool for all."""
    pool = None
    if not all(getattr(task, "bounded", False) for task in tasks):
        wanted = max(getattr(task, "deadline", 10.0) for task in tasks)
        pool = Pool(
            functools.partial(grade_of, tasks),
            workers=settings.workers,
            deadline=settings.deadline or wanted,
            memory_mb=settings.memory_mb,
        )

    def grading(place: int) -> Callable[[], Grading]:
        if getattr(tasks[place], "bounded", False):
            return functools.partial(Here, tasks[place])
        return functools.partial(in_workers, pool, place)

    return pool, [grading(place) for place in range(len(tasks))]


def _lanes(rollout: RolloutSettings, devices: Mesh) -> int:
    """How many parts of the slots run side by side; ValueError where they do not divide them."""
    count = rollout.lanes
    if not count:
        count = machine.lanes(devices.size)
        while count > 1 and rollout.slots % (count * devices.size):
            count -= 1
        return count
    if rollout.slots % (count * devices.size):
        raise ValueError(
            f"rollout.lanes={count}; allowed: 0 (chosen by the machine), or what divides "
            f"rollout.slots={rollout.slots} over {devices.size} devices"
        )
    return count


def _completion_lengths(settings: Settings) -> tuple[int, ...]:
    """Widths of completions in a micro-batch: the given shorter ones, then the token limit."""
    longest = settings.rollout.max_new_tokens
    for length in settings.train.lengths:
        if not 0 < length < longest:
            raise ValueError(
                f"train.lengths={settings.train.lengths}; allowed: each above 0 and below "
                f"rollout.max_new_tokens={longest}"
            )
    return tuple(sorted({*settings.train.lengths, longest}))


def _check_fit(
    settings: Settings, shape: Shape, model: ModelConfig, words: Tokenizer, devices: int
) -> None:
    rollout = settings.rollout
    if shape.seeded_length < shape.prompt_length:
        raise ValueError(
            f"rollout.seeded_length={shape.seeded_length}; allowed: at least "
            f"rollout.prompt_length={shape.prompt_length}"
        )
    seeder = settings.algorithm.explore.seeder
    # What a seeder puts beside the prompt may be taken from the answer's tokens.
    shared = getattr(seeder, "shares_limit", False)
    prompt = shape.prompt_length if shared else shape.seeded_length
    if prompt + shape.max_new_tokens > model.max_position_embeddings:
        raise ValueError(
            f"prompt ({prompt}) + rollout.max_new_tokens={rollout.max_new_tokens} = "
            f"{prompt + shape.max_new_tokens} tokens; allowed: at most the model's context of "
            f"{model.max_position_embeddings}"
        )
    if words.vocab_size > model.vocab_size:
        raise ValueError(
            f"the tokenizer has {words.vocab_size} tokens; the model's table holds "
            f"{model.vocab_size}"
        )
    if hasattr(seeder, "room"):
        least = seeder.room(shape.prompt_length, shape.max_new_tokens)
        if shape.seeded_length < least:
            raise ValueError(
                f"rollout.seeded_length={shape.seeded_length}; allowed: at least {least} for "
                f"{settings.algorithm_name}, whose prompts also hold what it puts beside them"
            )
    for name, rows in (
        ("rollout.slots", rollout.slots),
        ("train.micro_batch / train.share", settings.train.micro_batch // settings.train.share),
    ):
        if rows % devices:
            raise ValueError(
                f"{name}={rows}; allowed: a multiple of the {devices} devices (or fewer of them by "
                "mesh.devices)"
            )


def warm_up(parts: Parts, state: TrainState, pauses: bool) -> None:
    """Compile everything that a step can need, several at a time, so that none compiles later.

    With `pauses` rows are also kept and resumed.
    """
    jobs = parts.learner.warm_up(state)
    for draw in {parts.draw, parts.eval_draw}:
        jobs += draw.warm_up(state.params, pauses and draw is parts.draw)
    with concurrent.futures.ThreadPoolExecutor(machine.cores()) as pool:
        for done in [pool.submit(job) for job in jobs]:
            done.result()
    machine.give_memory_back()
