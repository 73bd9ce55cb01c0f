"""The two ways to grade a step's completions while others are still decoded."""

from __future__ import annotations

import dataclasses

from xrpo_jax.types import Grading, Task, Verdict
from xrpo_jax.verify.pool import Pool
from xrpo_jax.verify.stream import Stream


class Here:
    """Grades at once, in this process and without a deadline; see types.Grading."""

    hidden = 0.0

    def __init__(self, task: Task):
        self._task, self._verdicts = task, []

    def __enter__(self) -> Grading:
        return self

    def __exit__(self, *_) -> None:
        pass

    def add(self, prompt: int, text: str) -> None:
        self._verdicts.append(verdict_of(self._task, prompt, text))

    def verdicts(self) -> list[Verdict]:
        return self._verdicts


@dataclasses.dataclass(frozen=True, kw_only=True)
class InWorkers:
    """Grades in a pool of `grade_of`, whose task is the one at `place`; see types.Grading."""

    stream: Stream
    place: int

    def __enter__(self) -> Grading:
        return self

    def __exit__(self, *_) -> None:
        self.stream.close()

    def add(self, prompt: int, text: str) -> None:
        self.stream.add((self.place, prompt, text))

    def verdicts(self) -> list[Verdict]:
        return self.stream.verdicts()

    @property
    def hidden(self) -> float:
        return self.stream.hidden


def in_workers(pool: Pool, place: int) -> Grading:
    """A grading in the pool's workers."""
    return InWorkers(stream=pool.begin(), place=place)


def verdict_of(task: Task, prompt: int, text: str) -> Verdict:
    """The task's verdict; one of status `crashed` when its verifier raises."""
    try:
        return task.rewards(prompt, text)
    except Exception as error:
        return Verdict(status="crashed", score=0.0, reason=f"{type(error).__name__}: {error}"[:200])


def grade_of(tasks: tuple[Task, ...], place: int, prompt: int, text: str) -> Verdict:
    """The verdict of one of several tasks: what a worker of a pool is given to do."""
    return tasks[place].rewards(prompt, text)
