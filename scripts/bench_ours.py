"""This library's engine on a Work: what runs it once, through the same borders as train.py."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import numpy as np
from bench_work import Work, right

from xrpo_jax import config, rng
from xrpo_jax.arrays import Batch
from xrpo_jax.build import Parts, build, warm_up
from xrpo_jax.explore.collect import collect, remember
from xrpo_jax.log import Clock, Compiles
from xrpo_jax.model.config import ModelConfig
from xrpo_jax.sampler import make_draw
from xrpo_jax.types import Conversation, Progress, Verdict, question

# What suits two cores; `--set` replaces them.
DEFAULTS = {
    "model.remat": "none",
    "rollout.slots": 64,
    "train.micro_batch": 16,
    "train.share": 8,
    "optimizer.learning_rate": 1e-6,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Questions:
    """The work's prompts as a task; a completion is right by its checksum."""

    texts: tuple[str, ...]
    levels: tuple[str, ...] = ("all",)
    bounded = True

    def __len__(self) -> int:
        return len(self.texts)

    def prompt(self, i: int) -> Conversation:
        return question(self.texts[i])

    def level(self, i: int) -> str:
        return "all"

    def answer(self, i: int, completion: str) -> str | None:
        return None

    def rewards(self, i: int, completion: str) -> Verdict:
        if right(completion):
            return Verdict(status="correct", score=1.0)
        return Verdict(status="wrong", score=0.0)


def settings_of(work: Work, chosen: dict[str, object]) -> config.Settings:
    """The settings of a GRPO run that does the work; `chosen` ones win, by section.key.

    ValueError on an unknown one.
    """
    longest = max(len(prompt) for prompt in work.prompts)
    given = DEFAULTS | {
        "init_from": work.model,
        "algorithm.name": "grpo",
        "task.name": "sums",
        "task.size": max(64, len(work.prompts)),  # as many as a step asks for
        "eval.problems": 3,
        "text.chat": "plain",
        "model.dtype": work.dtype,
        "rollout.prompts": len(work.prompts),
        "rollout.group": work.samples,
        "rollout.prompt_length": longest,
        "rollout.max_new_tokens": max(work.limits),
        "rollout.temperature": work.temperature,
    }
    raw = config.default()
    for name, value in (given | chosen).items():
        wrong = config.unknown_setting([f"--config.{name}=0"])
        if wrong:
            raise ValueError(wrong)
        section, _, key = name.rpartition(".")
        place = raw[section] if section else raw
        place[key] = value
    task = Questions(texts=work.texts)
    return dataclasses.replace(config.parse(raw), task=task, eval_task=task)


class Bench:
    """The engine with the work's model, compiled on the first run of each kind."""

    def __init__(self, work: Work, chosen: dict[str, object]):
        self.work = work
        self._compiled = []  # seconds of each compilation
        jax.monitoring.register_event_duration_secs_listener(self._heard)
        self.settings = settings_of(work, chosen)
        self.parts, state = build(self.settings)
        for text, tokens in zip(work.texts, work.prompts, strict=True):
            if tuple(self.parts.chat.encode(question(text))) != tokens:
                raise ValueError(f"the prompt {text!r} is encoded otherwise here")
        # No token ends a row, so that every engine draws as many.
        endless = dataclasses.replace(self.parts.draw.sampler, stop_ids=())
        draw = make_draw(endless, self.parts.draw.mesh)
        self.parts: Parts = dataclasses.replace(self.parts, draw=draw, eval_draw=draw)
        # In a list, so that an update may take the memory of the state before.
        self._state, self._ledger, self._batch, self._step = [state], self.parts.ledger, None, 0

    def _heard(self, event: str, seconds: float, **_) -> None:
        if event == Compiles.EVENT:
            self._compiled.append(seconds)

    @property
    def model(self) -> ModelConfig:
        return self.parts.model

    def warm(self) -> dict:
        """Compile all that a run needs: what any rollout can need, or a run."""
        if self.work.kind in ("update", "step"):
            return self.run()
        return self._counted(self._compile_rollouts)

    def run(self) -> dict:
        """One run of the work: useful `tokens`, compilations and their seconds, mostly phases."""
        rollout = functools.partial(self._rollout, self.work.limits)
        return self._counted(
            {"update": self._update, "step": self._whole}.get(self.work.kind, rollout)
        )

    def _counted(self, run: Callable[[], dict]) -> dict:
        self._step += 1
        self._compiled.clear()
        facts = run()
        # Several compile at a time, so that these seconds may be more than the run's.
        return facts | {"compiles": len(self._compiled), "compile_seconds": sum(self._compiled)}

    def _compile_rollouts(self) -> dict:
        # Caches grow by bucket: a rollout of a few tokens does not need all of them.
        for job in self.parts.draw.warm_up(self._state[0].params, False):
            job()
        return self._rollout((1,) * self.work.rows)

    def _rollout(self, limits: tuple[int, ...]) -> dict:
        work = self.work
        keys = rng.Rows(
            step_key=rng.key(0, self._step, "rollout"),
            prompt=np.repeat(np.arange(len(work.prompts)), work.samples),
            index=np.tile(np.arange(work.samples), len(work.prompts)),
        )
        prompts = [np.array(prompt, np.int32) for prompt in work.prompts]
        samples = self.parts.draw(
            self._state[0].params, prompts, keys.prompt, keys, np.array(limits, np.int32)
        )
        if not np.array_equal(samples.length, limits):
            raise RuntimeError(f"rows of {samples.length} tokens; asked for {limits}")
        return {"tokens": int(samples.length.sum())}

    def _collect(self, clock: Clock) -> tuple[Batch, Progress]:
        parts, settings = self.parts, self.settings
        return collect(
            settings.algorithm.explore,
            parts.tools,
            parts.draw,
            self._state[0].params,
            self._ledger,
            parts.shape,
            settings.seed,
            self._step,
            clock,
        )

    def _update(self) -> dict:
        if self._batch is None:
            self._batch, _ = self._collect(Clock())
        clock = Clock()
        self._learn(self._batch, clock)
        return {"tokens": self.work.useful, "phases": clock.seconds}

    def _learn(self, batch: Batch, clock: Clock, progress: Progress | None = None) -> None:
        """What train.py does with a step's batch; without `progress` nothing is remembered."""
        learner, params = self.parts.learner, self._state[0].params
        with clock("annotate"):
            batch = learner.annotate(params, self.parts.reference, batch)
            if progress is not None:
                explore = self.settings.algorithm.explore
                logp_of = functools.partial(learner.logp, params)
                self._ledger = remember(explore, self._ledger, progress, batch, logp_of)
        del params  # the update may take their memory
        with clock("update"):
            state, *_ = learner.update(self._state.pop(), batch, 0, self._step, clock)
            self._state.append(jax.block_until_ready(state))

    def _whole(self) -> dict:
        if self._step == 1:
            warm_up(self.parts, self._state[0], False)
        clock = Clock()
        batch, progress = self._collect(clock)
        self._learn(batch, clock, progress)
        return {"tokens": progress.decoded, "phases": clock.seconds}
