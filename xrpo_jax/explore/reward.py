"""Reward terms `(Verdict, tokens, limit) -> float`; a rollout's reward is their sum.

Accuracy, the planner's trigger for seeding and XRPO's full-reward gate use correctness alone.
"""

from __future__ import annotations

import dataclasses

from xrpo_jax.types import Task, Verdict

FAILED = ("timed_out", "crashed")  # of the verifier: they say nothing about the answer


def verdict_of(task: Task, prompt: int, text: str) -> Verdict:
    """The task's verdict; one of status `crashed` when its verifier raises."""
    try:
        return task.rewards(prompt, text)
    except Exception as error:
        return Verdict(status="crashed", score=0.0, reason=f"{type(error).__name__}: {error}"[:200])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Correctness:
    """`right` for a full score, `wrong` for none, in proportion between."""

    right: float = 1.0
    wrong: float = 0.0

    def __call__(self, verdict: Verdict, tokens: int, limit: int) -> float:
        return self.wrong + (self.right - self.wrong) * verdict.score


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overlong:
    """DAPO's soft overlong punishment (2503.14476, eq. 13): 0 up to `limit - cache` tokens.

    From there it falls linearly to -1 at `limit`; beyond it stays -1. Lengths are in tokens.
    """

    cache: int

    def __call__(self, verdict: Verdict, tokens: int, limit: int) -> float:
        free = limit - self.cache
        if tokens <= free:
            return 0.0
        return max((free - tokens) / self.cache, -1.0)
