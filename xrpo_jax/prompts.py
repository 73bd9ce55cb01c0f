"""Which of a task's prompts a run uses: those that fit, and held-out ones not trained on."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable

import numpy as np

from xrpo_jax.types import Conversation, Task, Verdict, normal, text_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subset:
    """The prompts `places` of a task, numbered anew; `left_out` says which are not there."""

    task: Task
    places: tuple[int, ...]
    left_out: str

    @property
    def levels(self) -> tuple[str, ...]:
        return self.task.levels

    @property
    def bounded(self) -> bool:
        return getattr(self.task, "bounded", False)

    @property
    def deadline(self) -> float:
        return getattr(self.task, "deadline", 10.0)

    def __len__(self) -> int:
        return len(self.places)

    def prompt(self, i: int) -> Conversation:
        return self.task.prompt(self.places[i])

    def level(self, i: int) -> str:
        return self.task.level(self.places[i])

    def rewards(self, i: int, completion: str) -> Verdict:
        return self.task.rewards(self.places[i], completion)

    def answer(self, i: int, completion: str) -> str | None:
        return self.task.answer(self.places[i], completion)

    def gold(self, i: int) -> str | None:
        return gold(self.task, self.places[i])

    def describe(self) -> str:
        """What the task says of itself, and what was left out."""
        return "\n".join(text for text in (describe(self.task), self.left_out) if text)


def describe(task: Task) -> str:
    """What a task says of itself at the start of a run; "" where it says nothing."""
    return task.describe() if hasattr(task, "describe") else ""


def gold(task: Task, i: int) -> str | None:
    """The right answer to a prompt as text; None where the task does not know or tell one."""
    return task.gold(i) if hasattr(task, "gold") else None


def without(task: Task, places: np.ndarray, why: str) -> Task:
    """The task without the prompts `places`; the task itself when there are none."""
    if not len(places):
        return task
    left = np.setdiff1d(np.arange(len(task)), places)
    return Subset(
        task=task,
        places=tuple(left.tolist()),
        left_out=f"{len(places)} of {len(task)} prompts dropped: {why}",
    )


def digest(*tasks: Task) -> str:
    """A short hash of all prompts in their order."""
    found = hashlib.blake2b(digest_size=8)
    for task in tasks:
        for i in range(len(task)):
            found.update(text_of(task.prompt(i)).encode(errors="replace") + b"\0")
    return found.hexdigest()


def overlap(task: Task, held_out: Task) -> np.ndarray:
    """Places i[n] of the held-out prompts whose text, up to case and spaces, is trained on."""
    trained = {normal(text_of(task.prompt(i))) for i in range(len(task))}
    return np.array(
        [i for i in range(len(held_out)) if normal(text_of(held_out.prompt(i))) in trained],
        np.int64,
    )


def fitting(
    task: Task, encode: Callable[[Conversation], list[int]], limit: int, overlong: str
) -> Task:
    """The task without prompts of more than `limit` tokens (`overlong` drop), or itself.

    Raises ValueError naming the longest and its length when such prompts are to be refused, when
    none is left, and on a prompt without any token.
    """
    lengths = np.array([len(encode(task.prompt(i))) for i in range(len(task))])
    if not lengths.all():
        raise ValueError(
            f"prompt {int(np.argmin(lengths))} of the task has no token; allowed: at least one"
        )
    (long,) = np.nonzero(lengths > limit)
    if len(long) and (overlong == "refuse" or len(long) == len(task)):
        longest = int(np.argmax(lengths))
        drop = "" if len(long) == len(task) else ", or text.overlong=drop to leave them out"
        raise ValueError(
            f"rollout.prompt_length={limit}; {len(long)} of {len(task)} prompts are longer, the "
            f"longest (prompt {longest}, {text_of(task.prompt(longest))[:60]!r}) has "
            f"{lengths[longest]} tokens. Allowed: at least that{drop}"
        )
    return without(task, long, f"longer than rollout.prompt_length={limit} tokens")
