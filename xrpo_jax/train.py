"""The training loop: explore, learn, log, checkpoint; read it top to bottom.

The state of a run is (TrainState, Ledger) at a step number. Everything else is a function of the
settings, so a run that was killed anywhere goes on to the bit.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
import signal
import sys
import threading
import time

import numpy as np
from tqdm import tqdm

from xrpo_jax import ahead, checkpoint, compile_cache, record, report, rng
from xrpo_jax.arrays import Params, TrainState
from xrpo_jax.build import Parts, build, warm_up
from xrpo_jax.config import ConfigDict, Settings, claim, parse
from xrpo_jax.evaluate import answers, evaluate
from xrpo_jax.explore import summary
from xrpo_jax.explore.collect import remember
from xrpo_jax.explore.reward import FAILED
from xrpo_jax.log import Clock, Compiles, Log, ended, read_metrics
from xrpo_jax.model import compare, export
from xrpo_jax.model.params import count
from xrpo_jax.profile import Profiler, steps_of
from xrpo_jax.types import Ledger


def run(config: ConfigDict, workdir: str) -> dict:
    """Train as `config` says, in `workdir`, from where it stands; returns the last evaluation."""
    settings = parse(config)  # a wrong setting dies here, before anything is loaded or compiled
    compile_cache.keep(settings.compile.cache_dir)
    folder = pathlib.Path(workdir)
    parts, fresh = build(settings)
    if settings.checkpoint.export != "no":  # a target that would be refused, now and not later
        export.require(
            folder / "policy",
            dtype=settings.checkpoint.export,
            tokenizer_dir=parts.source.folder,
        )
    # Handed on in a list that is emptied: a name here would keep the first state in memory for as
    # long as the run lasts, beside the newest.
    begin = [fresh]
    del fresh
    with claim(settings, folder, parts.facts), parts.pool or contextlib.nullcontext():
        manager = checkpoint.open_manager(folder, settings.checkpoint.keep)
        start = manager.latest_step() or 0
        with _Signals() as signals, contextlib.ExitStack() as closing:
            done, state, complete = _loop(
                settings, parts, folder, manager, start, begin, signals, closing
            )
        manager.close()
        exported, failure = "", None
        if complete and settings.checkpoint.export != "no":
            # After the checkpoint, so that a full disk here loses nothing.
            try:
                exported = _export(settings, parts, folder, state.params)
            except ValueError as error:
                failure = error
        last = report.finish(folder, settings, done, complete, exported)
        if failure is not None:
            raise failure
        return last


def _export(settings: Settings, parts: Parts, folder: pathlib.Path, params: Params) -> str:
    """Write <workdir>/policy, read it again, and say how the two compare."""
    dtype = settings.checkpoint.export
    target = folder / "policy"
    export.save(target, parts.model, params, dtype=dtype, tokenizer_dir=parts.source.folder)
    return compare.describe(compare.check(target, parts.model, params, dtype))


def _restored(
    settings: Settings,
    parts: Parts,
    manager: checkpoint.Manager,
    start: int,
    begin: list[TrainState],
) -> tuple[TrainState, Ledger, checkpoint.Origin | None]:
    """The state and ledger of step `start`, and where rollouts are drawn ahead their origin.

    Takes the first state out of `begin`, which has no origin yet.
    """
    state = begin.pop()
    if not start:
        return state, parts.ledger, None
    like = checkpoint.shapes(state)
    del state  # makes room for what is read
    return checkpoint.restore(
        manager, start, like, parts.ledger, bool(settings.train.async_rollouts)
    )


def _loop(
    settings: Settings,
    parts: Parts,
    folder: pathlib.Path,
    manager: checkpoint.Manager,
    start: int,
    begin: list[TrainState],
    signals: _Signals,
    closing: contextlib.ExitStack,
) -> tuple[int, TrainState, bool]:
    """Steps from `start` on; the step reached, its state, and whether nothing is left to do.

    Stops sooner where a signal asks to; what is still being drawn then ends with `closing`.
    """
    if not start:
        _refuse_lost_checkpoints(settings, folder)
    state, ledger, origin = _restored(settings, parts, manager, start, begin)
    records = read_metrics(folder / "metrics.jsonl")
    if _ended(settings, start, ledger) and ended(records) and records[-1]["step"] == start:
        return start, state, True
    log = Log(folder, start, settings.checkpoint.rollouts)
    explore = settings.algorithm.explore
    tasks = parts.tools.task, parts.eval_tools.task
    print(report.opening(settings, *tasks, count(state.params), parts.chat))
    bar = report.progress_bar(settings, start)
    if _ended(settings, start, ledger):  # it was asked for more before, so its end was not graded
        log.metrics(start, held_out(parts, settings, state.params, start, folder, bar))
        bar.close()
        return start, state, True
    compiles = Compiles()
    bar.set_postfix_str("compiling")
    begun = time.perf_counter()
    warm_up(parts, state, getattr(explore.planner, "pauses", False))
    compiled, spent = compiles.take(), time.perf_counter() - begun
    bar.write(report.warmed_up(compiled, spent))
    warmed = {"compiles_warm_up": len(compiled.names), "seconds/warm_up": spent}
    if not start:
        ledger = _estimated(parts, settings, state.params, ledger, bar, signals)
        if signals.stop:  # nothing is lost: no step was made
            bar.close()
            return start, state, False
    profiler = Profiler(folder / "profile", steps_of(settings.profile.steps))
    source = closing.enter_context(_source(settings, parts, state, ledger, start, origin))
    del origin  # the source lets go of its parameters with the next step
    for step in range(start, settings.train.steps):
        profiler.begin(step)
        clock = Clock()
        metrics = warmed if step == start else {}
        begun = time.perf_counter()
        if step % settings.eval.every == 0:
            source.wait(clock)  # a draw shares the devices with no evaluation
            with clock("evaluate"):
                metrics |= held_out(parts, settings, state.params, step, folder, bar)
        batch, progress, told = source.take(state.params, ledger, step, clock)
        with clock("annotate"):
            batch = parts.learner.annotate(state.params, parts.reference, batch)
            logp_of = functools.partial(parts.learner.logp, state.params)
            ledger = remember(explore, ledger, progress, batch, logp_of)
        with clock("update"):
            state, learned, batch = parts.learner.update(state, batch, settings.seed, step, clock)

        metrics |= told | record.of_step(
            settings, parts.tools.task, progress, ledger, batch, learned, clock, begun
        )
        # Since the last record, so that what saving and evaluating compile shows, too.
        compiled = compiles.take()
        metrics |= compiled.metrics()
        log.metrics(step, metrics)
        log.rollouts(step, summary.records(progress, parts.tools.task))
        report.advance(bar, metrics)
        verdicts = [row.verdict for rows in progress.rollouts for row in rows]
        graded = [(verdict.status, verdict.reason) for verdict in verdicts]
        report.warn_failed(bar, f"step {step}", graded, settings.verify.alarm)
        if step > start:
            report.warn_compiled(bar, step, compiled)
        done = step + 1
        complete = _ended(settings, done, ledger)
        if complete:
            source.give_up()
            log.metrics(done, held_out(parts, settings, state.params, done, folder, bar))
        last = complete or signals.stop  # asked once: a signal from here on ends the next step
        if done % settings.checkpoint.every == 0 or last:
            checkpoint.save(manager, done, state, ledger, source.origin)
        profiler.end(step, last)
        if last:
            break
    bar.close()
    compiles.close()
    return done, state, complete


def _source(
    settings: Settings,
    parts: Parts,
    state: TrainState,
    ledger: Ledger,
    step: int,
    origin: checkpoint.Origin | None,
) -> ahead.Now | ahead.Ahead:
    """Where the rollouts of `step` and of those after it come from."""
    now = ahead.Now(
        explore=settings.algorithm.explore,
        tools=parts.tools,
        draw=parts.draw,
        shape=parts.shape,
        seed=settings.seed,
    )
    if not settings.train.async_rollouts:
        return now
    if origin is None:
        origin = ahead.first(state.params, ledger)
    return ahead.Ahead(now, settings.train.steps, step, origin)


def _ended(settings: Settings, step: int, ledger: Ledger) -> bool:
    """Whether a run that has made `step` steps is complete, by steps or by decoded tokens."""
    tokens = settings.train.tokens
    return step >= settings.train.steps or 0 < tokens <= int(ledger["decoded"]["tokens"])


def _estimated(
    parts: Parts,
    settings: Settings,
    params: Params,
    ledger: Ledger,
    bar: tqdm,
    signals: _Signals,
) -> Ledger:
    """The first ledger, with what the first policy achieves on every prompt if it is asked for."""
    values = settings.algorithm.explore.values
    samples = getattr(values, "offline", 0)
    if not samples:
        return ledger
    size, tokens = len(parts.tools.task), 0
    score, number = np.zeros((2, size))
    for start in range(0, size, parts.shape.prompts):
        problems = np.arange(start, min(start + parts.shape.prompts, size))
        if signals.stop:
            break
        bar.set_postfix_str(f"first estimates of prompts {start} of {size}")
        drawn, _, verdicts = answers(
            parts.tools,
            parts.draw,
            params,
            problems,
            samples,
            parts.shape.max_new_tokens,
            rng.key(settings.seed, 0, "offline"),
        )
        said = [(verdict.status, verdict.reason) for verdict in verdicts]
        report.warn_failed(bar, "first estimates", said, settings.verify.alarm)
        for place, verdict in zip(np.repeat(problems, samples), verdicts, strict=True):
            if verdict.status not in FAILED:
                score[place] += verdict.score
                number[place] += 1
        tokens += int(drawn.length.sum())
    return ledger | {
        "values": values.begin(ledger["values"], score, number),
        "decoded": {"tokens": ledger["decoded"]["tokens"] + tokens},
    }


def _refuse_lost_checkpoints(settings: Settings, folder: pathlib.Path) -> None:
    records = read_metrics(folder / "metrics.jsonl")
    # A record beyond the first checkpoint's step is written after that checkpoint. One at it may be
    # the last evaluation of a run that was killed while it wrote its only checkpoint.
    if records and records[-1]["step"] > settings.checkpoint.every:
        raise ValueError(
            f"{folder / 'checkpoints'} is empty, but metrics.jsonl beside it reaches step "
            f"{records[-1]['step']}: starting over would overwrite it. Put the checkpoints back, "
            "choose another --workdir, or delete that one"
        )


def held_out(
    parts: Parts, settings: Settings, params: Params, step: int, folder: pathlib.Path, bar: tqdm
) -> dict[str, float]:
    """The held-out metrics, named `eval/...`; every sample goes to samples/<step>.jsonl."""
    metrics, records = evaluate(
        parts.eval_tools,
        parts.eval_draw,
        params,
        samples=settings.eval.samples,
        max_new_tokens=parts.shape.max_new_tokens,
        seed=settings.seed,
        step=step,
    )
    report.write_samples(folder, step, records)
    graded = [(record["status"], record["reason"]) for record in records]
    report.warn_failed(bar, f"evaluation at step {step}", graded, settings.verify.alarm)
    return {f"eval/{name}": value for name, value in metrics.items()}


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
