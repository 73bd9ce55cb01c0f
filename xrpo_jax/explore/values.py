"""What is known of each prompt's success: `init`, `observe` after a step, `read` before the next.

The memory lives in the ledger under "values"; curricula read it.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from xrpo_jax.types import Memory, Progress


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoValues:
    """Every prompt is worth the same."""

    def init(self, num_prompts: int) -> Memory:
        return {}

    def observe(self, memory: Memory, progress: Progress) -> Memory:
        return memory

    def read(self, memory: Memory, num_prompts: int) -> np.ndarray:
        return np.zeros(num_prompts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Running:
    """Running mean of a prompt's share of correct plain rollouts; NaN until it was seen."""

    keep: float = 0.9

    def init(self, num_prompts: int) -> Memory:
        return {"mean": np.full(num_prompts, np.nan)}

    def observe(self, memory: Memory, progress: Progress) -> Memory:
        mean = memory["mean"].copy()
        for prompt, rows in zip(progress.prompts, progress.rollouts, strict=True):
            plain = [row.verdict.correct for row in rows if row.kind == 0]
            if plain:
                now, before = np.mean(plain), mean[prompt]
                mean[prompt] = (
                    now if np.isnan(before) else self.keep * before + (1 - self.keep) * now
                )
        return {"mean": mean}

    def read(self, memory: Memory, num_prompts: int) -> np.ndarray:
        return memory["mean"]
