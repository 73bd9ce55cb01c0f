"""A task that a random policy solves now and then: end with a letter that the question holds.

Loaded by tiny/run.py as if it stood in xrpo_jax/tasks; hard questions take one letter only, so that
some prompts fail throughout a base round and are seeded.
"""

from __future__ import annotations

import dataclasses
import random
from typing import ClassVar

from xrpo_jax.types import Conversation, Verdict, question

LETTERS = "abcdefghijklmnop"
LEVELS = ("easy", "hard")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Letters:
    """Questions such as `kcap:` by index."""

    bounded: ClassVar[bool] = True
    questions: tuple[str, ...]
    levels: tuple[str, ...] = LEVELS

    def __len__(self) -> int:
        return len(self.questions)

    def prompt(self, i: int) -> Conversation:
        return question(f"{self.questions[i]}:")

    def level(self, i: int) -> str:
        return LEVELS[i % 2]

    def answer(self, i: int, completion: str) -> str | None:
        found = [letter for letter in completion if letter in LETTERS]
        return found[-1] if found else None

    def rewards(self, i: int, completion: str) -> Verdict:
        found = self.answer(i, completion)
        if found is None:
            return Verdict(status="unparsed", score=0.0)
        right = self.questions[i] if self.level(i) == "easy" else self.questions[i][:1]
        correct = found in right
        return Verdict(status="correct" if correct else "wrong", score=float(correct))


def make(*, split: str = "train", size: int = 60, seed: int = 0) -> Letters:
    """`size` different questions; the splits' first letters differ, so they share none."""
    draw, questions = random.Random(f"{split}/{seed}"), {}
    first = LETTERS[:8] if split == "train" else LETTERS[8:]
    while len(questions) < size:
        questions[draw.choice(first) + "".join(draw.sample(LETTERS, 3))] = None
    return Letters(questions=tuple(questions))
