"""The training loop: explore, learn, log, checkpoint; read it top to bottom.

The state of a run is (TrainState, Ledger) at a step number. Everything else is a function of the
settings, so a run that was killed anywhere goes on to the bit.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import os
import pathlib
import signal
import sys
import threading
import time

import jax
import numpy as np

from xrpo_jax import checkpoint, mesh, report, rng, tokenizer
from xrpo_jax.config import EMBEDDED, ConfigDict, Settings, claim, parse
from xrpo_jax.evaluate import evaluate
from xrpo_jax.explore import summary
from xrpo_jax.explore.collect import Shape, collect, init_ledger
from xrpo_jax.learn.update import Learner, Schedule, make_learner, make_optimizer
from xrpo_jax.log import Clock, Compiles, Log
from xrpo_jax.model import hf
from xrpo_jax.model.config import ModelConfig
from xrpo_jax.policy import Policy
from xrpo_jax.sampler import Method, Sampler, make_draw
from xrpo_jax.tokenizer import Tokenizer
from xrpo_jax.types import Batch, Draw, Ledger, Params, Tools, TrainState


def run(config: ConfigDict, workdir: str) -> dict:
    """Train as `config` says, in `workdir`, from where it stands; returns the last evaluation."""
    settings = parse(config)  # a wrong setting dies here, before anything is loaded or compiled
    folder = pathlib.Path(workdir)
    parts = build(settings)
    claim(config, folder)
    manager = checkpoint.open_manager(folder, settings.checkpoint.keep)
    steps, start = settings.train.steps, manager.latest_step() or 0
    if start < steps:
        with _Signals() as signals:
            stopped_at = _loop(settings, parts, folder, manager, start, signals)
    else:
        stopped_at = start
    manager.close()
    return report.finish(folder, settings, stopped_at)


def _loop(settings: Settings, parts: Parts, folder, manager, start: int, signals) -> int:
    """Steps `start` to the last, or to where a signal asks to stop; returns the step reached."""
    state, ledger = parts.state, parts.ledger
    if start:
        state, ledger = checkpoint.restore(manager, start, state, ledger)
    log = Log(folder, start, settings.checkpoint.rollouts)
    steps, planner = settings.train.steps, settings.algorithm.explore.planner
    compiles = Compiles()
    bar = report.progress_bar(settings, start)
    bar.set_postfix_str("compiling")
    warm_up(parts, state)
    counted = compiles.count
    for step in range(start, steps):
        clock = Clock()
        metrics = {}
        if step % settings.eval.every == 0:
            with clock("evaluate"):
                metrics |= held_out(parts, settings, state.params, step)
        begun = time.perf_counter()
        batch, ledger, progress = collect(
            settings.algorithm.explore,
            parts.tools,
            parts.draw,
            state.params,
            ledger,
            parts.shape,
            settings.seed,
            step,
            clock,
        )
        with clock("annotate"):
            batch, entropy = parts.learner.annotate(state.params, parts.reference, batch)
        with clock("update"):
            state, learned = parts.learner.update(state, batch, settings.seed, step, clock)

        metrics |= summary.summarise(progress, ledger, settings.task, planner.select(progress))
        metrics |= learned | sampler_gap(batch)
        metrics["old_entropy"] = float(entropy.sum() / max(batch.mask.sum(), 1.0))
        spent = time.perf_counter() - begun
        metrics["tokens_per_second"] = metrics["length"] * metrics["rollouts"] / spent
        metrics |= {f"seconds/{phase}": seconds for phase, seconds in clock.seconds.items()}
        metrics["seconds/step"] = spent
        # Since the last record, so that what saving and evaluating compile shows, too.
        metrics["compiles"], counted = compiles.count - counted, compiles.count
        log.metrics(step, metrics)
        log.rollouts(step, summary.records(progress))
        report.advance(bar, metrics)
        done = step + 1
        if done == steps:
            log.metrics(done, held_out(parts, settings, state.params, done))
            hf.save(
                folder / "policy", parts.model, jax.device_get(state.params),
                tokenizer_dir=parts.source,
            )  # fmt: skip
        if done % settings.checkpoint.every == 0 or done == steps or signals.stop:
            checkpoint.save(manager, done, state, ledger)
        if signals.stop:
            break
    bar.close()
    compiles.close()
    return done


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """What the loop works with, made once from the settings."""

    source: pathlib.Path  # the Hugging Face directory of the initial policy
    model: ModelConfig
    tools: Tools
    eval_tools: Tools
    shape: Shape
    draw: Draw
    eval_draw: Draw
    learner: Learner
    state: TrainState
    reference: Params | None
    ledger: Ledger


def build(settings: Settings) -> Parts:
    """Load the policy and make every part; ValueError when settings and model do not fit."""
    rollout, algorithm = settings.rollout, settings.algorithm
    devices = mesh.make(settings.mesh.devices, settings.mesh.cpu_devices)
    source = pathlib.Path(settings.model.init_from or EMBEDDED)
    model, params = hf.load(source)
    words = tokenizer.load(source)
    seeds = algorithm.explore.seeder.seeds
    seeded_length = rollout.seeded_length if seeds else rollout.prompt_length
    shape = Shape(
        prompts=rollout.prompts,
        rows=rollout.prompts * rollout.group,
        prompt_length=rollout.prompt_length,
        seeded_length=seeded_length,
        max_new_tokens=rollout.max_new_tokens,
    )
    _check_fit(settings, shape, model, words, devices.size)
    tools, eval_tools = (
        Tools(task=task, encode=words.encode, decode=words.decode, prompt_limit=seeded_length)
        for task in (settings.task, settings.eval_task)
    )
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
    )
    method = Method(
        temperature=settings.eval.temperature, top_k=settings.eval.top_k, top_p=settings.eval.top_p
    )
    draw = make_draw(sampler, devices)
    eval_draw = draw
    if method != sampler.method:
        eval_draw = make_draw(dataclasses.replace(sampler, method=method), devices)
    optimizer = make_optimizer(settings.optimizer)
    params = jax.device_put(params, mesh.everywhere(devices))
    memory = jax.device_put(optimizer.init(params), mesh.everywhere(devices))
    learner = make_learner(
        algorithm.learn,
        Policy(
            model=model,
            temperature=rollout.temperature,
            dtype=settings.model.dtype,
            remat=settings.model.remat,
            chunk=settings.model.logits_chunk,
        ),
        optimizer,
        Schedule(
            minibatches=settings.train.minibatches,
            epochs=settings.train.epochs,
            rows=settings.train.micro_batch,
            lengths=_row_lengths(settings, lengths),
            groups=rollout.prompts,
        ),
        devices,
    )
    return Parts(
        source=source,
        model=model,
        tools=tools,
        eval_tools=eval_tools,
        shape=shape,
        draw=draw,
        eval_draw=eval_draw,
        learner=learner,
        state=TrainState(params=params, optimizer=memory),
        # The update donates nothing of the state, so the initial parameters may be shared.
        reference=params if algorithm.learn.needs_reference else None,
        ledger=init_ledger(algorithm.explore, len(settings.task), rollout.max_new_tokens),
    )


def _row_lengths(settings: Settings, prompts: tuple[int, ...]) -> tuple[int, ...]:
    """Lengths of micro-batches: what full-length completions need, and the given shorter ones."""
    longest = prompts[-1] + settings.rollout.max_new_tokens
    for length in settings.train.lengths:
        if not 1 < length < longest:
            raise ValueError(
                f"train.lengths={settings.train.lengths}; allowed: each above 1 and below the "
                f"longest row of {longest} tokens"
            )
    full = {length + settings.rollout.max_new_tokens for length in prompts}
    return tuple(sorted(full | set(settings.train.lengths)))


def _check_fit(
    settings: Settings, shape: Shape, model: ModelConfig, words: Tokenizer, devices: int
) -> None:
    rollout = settings.rollout
    if shape.seeded_length < shape.prompt_length:
        raise ValueError(
            f"rollout.seeded_length={shape.seeded_length}; allowed: at least "
            f"rollout.prompt_length={shape.prompt_length}"
        )
    if shape.row_length > model.max_position_embeddings:
        raise ValueError(
            f"prompt ({shape.seeded_length}) + rollout.max_new_tokens={rollout.max_new_tokens} = "
            f"{shape.row_length} tokens; allowed: at most the model's context of "
            f"{model.max_position_embeddings}"
        )
    if words.vocab_size > model.vocab_size:
        raise ValueError(
            f"the tokenizer has {words.vocab_size} tokens; the model's table holds "
            f"{model.vocab_size}"
        )
    for name, rows in (
        ("rollout.prompts x rollout.group", shape.rows),
        ("rollout.slots", rollout.slots),
        ("train.micro_batch", settings.train.micro_batch),
    ):
        if rows % devices:
            raise ValueError(f"{name}={rows}; allowed: a multiple of the {devices} devices")
    for task in (settings.task, settings.eval_task):
        longest = max(range(len(task)), key=lambda i: len(words.encode(task.prompt(i))))
        length = len(words.encode(task.prompt(longest)))
        if length > rollout.prompt_length:
            raise ValueError(
                f"rollout.prompt_length={rollout.prompt_length}; allowed: at least {length}, the "
                f"tokens of prompt {longest}"
            )


def warm_up(parts: Parts, state: TrainState) -> None:
    """Compile everything that a step can need, several at a time, so that none compiles later."""
    keys = rng.Rows(step_key=rng.key(0, 0, "rollout"), prompt=np.zeros(1, int), index=np.zeros(1))

    def drawing(draw: Draw, length: int) -> None:
        draw(state.params, [np.zeros(length, np.int32)], np.zeros(1, int), keys, 1)

    jobs = parts.learner.warm_up(state) + [
        functools.partial(drawing, draw, length)
        for draw in {parts.draw, parts.eval_draw}
        for length in {parts.shape.prompt_length, parts.shape.seeded_length}
    ]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for done in [pool.submit(job) for job in jobs]:
            done.result()


def held_out(parts: Parts, settings: Settings, params: Params, step: int) -> dict[str, float]:
    """The held-out metrics, named `eval/...`."""
    metrics, _ = evaluate(
        parts.eval_tools,
        parts.eval_draw,
        params,
        samples=settings.eval.samples,
        prompts=parts.shape.prompts,
        max_new_tokens=parts.shape.max_new_tokens,
        seed=settings.seed,
        step=step,
    )
    return {f"eval/{name}": value for name, value in metrics.items()}


def sampler_gap(batch: Batch) -> dict[str, float]:
    """How far the sampler's log-probs are from the trainer's, over tokens drawn in context."""
    seen = (batch.mask > 0) & np.isfinite(batch.sampler_logp)
    gap = np.abs(batch.sampler_logp[seen] - batch.old_logp[seen])
    return {
        "sampler_gap_mean": float(gap.mean()) if gap.size else 0.0,
        "sampler_gap_max": float(gap.max(initial=0.0)),
    }


class _Signals:
    """Turns the first SIGINT or SIGTERM into `stop`, so that the step is finished and saved."""

    NAMES = (signal.SIGINT, signal.SIGTERM)

    def __enter__(self):
        self.stop = False
        self._before = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {name: signal.signal(name, self._heard) for name in self.NAMES}
        return self

    def _heard(self, name, frame):
        if self.stop:  # asked twice: at once
            raise KeyboardInterrupt
        self.stop = True
        print("\nstopping after this step; once more to stop at once", file=sys.stderr)

    def __exit__(self, *_):
        for name, handler in self._before.items():
            signal.signal(name, handler)
