"""Where the training loop gets a step's rollouts: drawn when asked for, or one step ahead.

Ahead, the rollouts of step t + 1 are drawn in a thread while the learner updates on those of step
t. They come from the policy before that update, and are planned with the ledger from before step t
was remembered: that is their Origin. With it they are drawn again to the bit wherever a run stops,
so a checkpoint holds the origin of the step that comes next, whether it was being drawn or not.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import threading
from collections.abc import Callable

import jax
import jax.numpy as jnp

from xrpo_jax import mesh as meshes
from xrpo_jax.arrays import Batch, Draw, Params, Samples
from xrpo_jax.checkpoint import Origin
from xrpo_jax.explore.collect import Explore, Shape, collect
from xrpo_jax.log import Clock
from xrpo_jax.types import Grading, Ledger, Progress, Tools

PATIENCE = 60.0  # seconds to wait for a draw that was given up: it ends with the chunk it is at


@dataclasses.dataclass(frozen=True, kw_only=True)
class Now:
    """Draws a step's rollouts when they are asked for, with what is given."""

    explore: Explore
    tools: Tools
    draw: Draw
    shape: Shape
    seed: int
    origin = None

    def __enter__(self) -> Now:
        return self

    def __exit__(self, *_) -> None:
        pass

    def wait(self, clock: Clock) -> None:
        """Return when nothing is being drawn."""

    def give_up(self) -> None:
        """End what is being drawn."""

    def take(
        self, params: Params, ledger: Ledger, step: int, clock: Clock
    ) -> tuple[Batch, Progress, dict[str, float]]:
        """The rollouts of `step`, and what the log should say of how they were drawn."""
        batch, progress = collect(
            self.explore, self.tools, self.draw, params, ledger, self.shape, self.seed, step, clock
        )
        return batch, progress, {}


class Ahead:
    """Draws a step's rollouts while the step before is trained on; used within a `with`.

    `step` is the first to draw, `origin` its own, and after each `take` that of the step after;
    `steps` is where the run ends at the latest. The thread holds parameters of its own.
    """

    def __init__(self, now: Now, steps: int, step: int, origin: Origin):
        self._over, self._grading = threading.Event(), None
        tools = dataclasses.replace(now.tools, grading=self._begin_grading)
        draw = _Stoppable(draw=now.draw, over=self._over)
        self._now, self._tools = dataclasses.replace(now, tools=tools, draw=draw), now.tools
        self._steps, self._first, self.origin = steps, step, origin
        self._pending: concurrent.futures.Future | None = None

    def __enter__(self) -> Ahead:
        self._several = meshes.several_threads()
        self._several.__enter__()
        self._begin(self._first)
        return self

    def __exit__(self, *_) -> None:
        self.give_up()
        self._several.__exit__(None, None, None)

    def wait(self, clock: Clock) -> None:
        """Return when nothing is being drawn."""
        if self._pending is not None:
            with clock("wait"):
                concurrent.futures.wait([self._pending])

    def give_up(self) -> None:
        """End what is being drawn, with the workers that grade it."""
        self._over.set()
        if self._grading is not None:
            self._grading.__exit__()
        if self._pending is not None:
            concurrent.futures.wait([self._pending], PATIENCE)
            self._pending = None

    def take(
        self, params: Params, ledger: Ledger, step: int, clock: Clock
    ) -> tuple[Batch, Progress, dict[str, float]]:
        """The rollouts of `step`, and what the log should say of how they were drawn.

        Those of the step after are begun with a copy of `params`, which may be donated, and with
        `ledger`. Raises what drawing raised.
        """
        with clock("wait"):
            batch, progress, spent = self._pending.result()
        told = {"staleness": step - self.origin.step}
        told |= {f"seconds/{phase}_ahead": seconds for phase, seconds in spent.items()}
        self.origin = Origin(step=step, params=_copied(params), ledger=ledger)
        self._pending = None
        if step + 1 < self._steps:
            self._begin(step + 1)
        return batch, progress, told

    def _begin(self, step: int) -> None:
        self._pending = concurrent.futures.Future()
        work = functools.partial(self._work, self._pending, self.origin, step)
        threading.Thread(target=work, name="ahead", daemon=True).start()

    def _work(self, pending: concurrent.futures.Future, origin: Origin, step: int) -> None:
        clock = Clock()
        try:
            batch, progress, _ = self._now.take(origin.params, origin.ledger, step, clock)
            pending.set_result((batch, progress, clock.seconds))
        except BaseException as error:
            pending.set_exception(error)

    def _begin_grading(self) -> Grading:
        self._grading = self._tools.grading()
        return self._grading


def first(params: Params, ledger: Ledger) -> Origin:
    """The origin of a run's first step."""
    return Origin(step=0, params=_copied(params), ledger=ledger)


def _copied(params: Params) -> Params:
    """A copy on the device, placed alike: what it is a copy of may be donated by an update."""
    return jax.tree.map(jnp.copy, params)


class Abandoned(Exception):
    """Nobody wants the rollouts any more."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Stoppable:
    """A draw that raises Abandoned once `over` is set: before it begins, or after a chunk."""

    draw: Draw
    over: threading.Event

    def __call__(self, *arguments, finished: Callable, **more) -> Samples:
        return self.draw(*arguments, finished=self._checking(finished), **more)

    def resume(self, *arguments, finished: Callable, **more) -> Samples:
        return self.draw.resume(*arguments, finished=self._checking(finished), **more)

    def _checking(self, finished: Callable) -> Callable:
        def told(rows, samples) -> None:
            self._check()
            finished(rows, samples)

        self._check()
        return told

    def _check(self) -> None:
        if self.over.is_set():
            raise Abandoned
