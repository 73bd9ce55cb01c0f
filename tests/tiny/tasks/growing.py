"""Letters whose grading compiles a function while the run's second step is graded."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import numpy as np

from xrpo_jax.tasks import letters
from xrpo_jax.types import Verdict

CALLS = itertools.count(1)
LATE = 40  # of the first step are 12 of the evaluation and 16 more


@dataclasses.dataclass(frozen=True, kw_only=True)
class Growing(letters.Letters):
    def rewards(self, i: int, completion: str) -> Verdict:
        if next(CALLS) == LATE:
            jax.jit(late)(np.zeros(LATE, np.float32))
        return super().rewards(i, completion)


def late(x):
    return x + 1


def make(*, split: str = "train", size: int = 60, seed: int = 0) -> Growing:
    return Growing(questions=letters.make(split=split, size=size, seed=seed).questions)
