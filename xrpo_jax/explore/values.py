"""What is known of each prompt's success: `init`, `observe` after a step, `read` before the next.

`observe(memory, progress, old_logp, logp_of)` gets the step's rollouts with the old policy's
log-probs of those it trained on, by (slot, index), and `logp_of(list of (prompt tokens,
completion tokens))`, which asks that policy. `read` gives f64[num_prompts] from 0 to 1. `report`,
where there is one, adds to the log. The memory lives in the ledger under "values"; curricula,
planners (`progress.values`) and the learner (`Batch.baseline`) read what was known before the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from xrpo_jax.types import Kind, Memory, Progress, Rollout

OldLogp = dict[tuple[int, int], np.ndarray]
LogpOf = Callable[[list[tuple[np.ndarray, np.ndarray]]], list[np.ndarray]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoValues:
    """Every prompt is worth the same."""

    def init(self, num_prompts: int, max_new_tokens: int) -> Memory:
        return {}

    def observe(
        self, memory: Memory, progress: Progress, old_logp: OldLogp, logp_of: LogpOf
    ) -> Memory:
        return memory

    def read(self, memory: Memory, num_prompts: int) -> np.ndarray:
        return np.zeros(num_prompts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Running:
    """Running mean of a prompt's share of correct plain rollouts: `keep p + (1 - keep) now`.

    EXPO's tracker (2605.11403, Eq. 6). Prompts begin at `start`; one whose rollouts could not be
    graded, or were all seeded, keeps what it had.
    """

    keep: float = 0.9
    start: float = 0.5

    def init(self, num_prompts: int, max_new_tokens: int) -> Memory:
        return {"mean": np.full(num_prompts, self.start)}

    def observe(
        self, memory: Memory, progress: Progress, old_logp: OldLogp, logp_of: LogpOf
    ) -> Memory:
        mean = memory["mean"].copy()
        for prompt, rows in zip(progress.prompts, progress.rollouts, strict=True):
            plain = [row for row in rows if row.kind == Kind.PLAIN and np.isfinite(row.reward)]
            if plain:
                now = np.mean([row.verdict.correct for row in plain])
                mean[prompt] = self.keep * mean[prompt] + (1 - self.keep) * now
        return {"mean": mean}

    def read(self, memory: Memory, num_prompts: int) -> np.ndarray:
        return memory["mean"]

    def report(self, memory: Memory) -> dict[str, object]:
        counts, _ = np.histogram(memory["mean"], bins=10, range=(0.0, 1.0))
        return {"value": float(memory["mean"].mean()), "value_histogram": counts.tolist()}


def discount(
    mean: np.ndarray, count: np.ndarray, observed: np.ndarray, rho: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and effective count after one more observation, what was before weighing `rho`.

    `mean += (observed - mean) / (rho count + 1)`: with a count of 0 it overwrites.
    """
    count = rho * count + 1.0
    return mean + (observed - mean) / count, count


@dataclasses.dataclass(frozen=True, kw_only=True)
class Discounted:
    """Discounted mean of a prompt's successes, which forgets more the more the policy has moved.

    SPO's tracker (2509.13232) with `value` = a / (a + b) and `count` = a + b of its Beta counts,
    the one reading under which they obey the moving average. `rho = 2^(-D / half)` within [low,
    high], D the mean over tokens of |log π then - log π now| on the prompt's last stored response,
    0 at the first visit. With low = high rho is constant and nothing is stored. Without `offline`
    samples a prompt begins at 1/2 with a count of 0.
    """

    low: float = 0.875
    high: float = 0.96
    half: float = 0.06
    offline: int = 0  # samples of the first policy for each prompt, given to `begin`
    foretells = True  # the learner takes its value from the reward

    def __post_init__(self):
        if not 0 <= self.low <= self.high <= 1:
            raise ValueError(
                f"algorithm.rho_low={self.low}, algorithm.rho_high={self.high}; allowed: 0 to 1, in"
                " this order"
            )
        if self.half <= 0:
            raise ValueError(f"algorithm.rho_half={self.half}; allowed: above 0")

    @property
    def reads_old_logp(self) -> bool:
        """Whether `observe` reads old log-probs."""
        return self.low < self.high

    def init(self, num_prompts: int, max_new_tokens: int) -> Memory:
        """`rho` is that of the last step, NaN where it observed nothing."""
        memory = {
            "value": np.full(num_prompts, 0.5),
            "count": np.zeros(num_prompts),
            "rho": np.full(num_prompts, np.nan),
        }
        if self.low < self.high:
            memory |= {
                "tokens": np.zeros((num_prompts, max_new_tokens), np.int32),
                "length": np.zeros(num_prompts, np.int32),
                "logp": np.zeros((num_prompts, max_new_tokens), np.float32),
            }
        return memory

    def begin(self, memory: Memory, score: np.ndarray, graded: np.ndarray) -> Memory:
        """The memory after `graded` samples a prompt (up to `offline`) of `score` in sum."""
        value = (score + 0.5) / (graded + 1.0)
        return memory | {"value": value, "count": graded.astype(np.float64)}

    def observe(
        self, memory: Memory, progress: Progress, old_logp: OldLogp, logp_of: LogpOf
    ) -> Memory:
        """Of each prompt the mean score of the rollouts that could be graded."""
        observed, rows = {}, {}
        for prompt, drawn in zip(progress.prompts, progress.rollouts, strict=True):
            graded = [row for row in drawn if np.isfinite(row.reward)]
            if graded:
                observed[prompt] = float(np.mean([row.verdict.score for row in graded]))
                selected = (row for row in drawn if (row.slot, row.index) in old_logp)
                rows[prompt] = next(selected, drawn[0])
        return self.update(memory, observed, rows, old_logp, logp_of)

    def update(
        self,
        memory: Memory,
        observed: dict[int, float],
        rows: dict[int, Rollout],
        old_logp: OldLogp,
        logp_of: LogpOf,
    ) -> Memory:
        """The memory with `observed` by prompt, from 0 to 1; others keep what they had.

        `rows` has a rollout of each observed prompt, which is stored if it is in `old_logp`.
        """
        memory = {name: values.copy() for name, values in memory.items()}
        memory["rho"][:] = np.nan
        prompts = np.array(sorted(observed), np.int64)
        now = np.array([observed[int(prompt)] for prompt in prompts])
        moved = self._moved(memory, prompts, rows, logp_of)
        rho = np.clip(np.exp2(-moved / self.half), self.low, self.high)
        memory["rho"][prompts] = rho
        memory["value"][prompts], memory["count"][prompts] = discount(
            memory["value"][prompts], memory["count"][prompts], now, rho
        )
        for prompt in prompts.tolist() if "tokens" in memory else ():
            row = rows[prompt]
            if (row.slot, row.index) in old_logp:
                length = len(row.tokens)
                memory["length"][prompt] = length
                memory["tokens"][prompt, :length] = row.tokens
                memory["logp"][prompt, :length] = old_logp[row.slot, row.index]
        return memory

    def _moved(
        self, memory: Memory, prompts: np.ndarray, rows: dict[int, Rollout], logp_of: LogpOf
    ) -> np.ndarray:
        """D of each prompt f64[n]; the plain prompt before the stored response is that of now."""
        moved = np.zeros(len(prompts))
        if "tokens" not in memory:
            return moved
        (known,) = np.nonzero(memory["length"][prompts])
        stored = [slice(memory["length"][prompt]) for prompt in prompts[known]]
        texts = [
            (rows[int(prompt)].trained_prompt, memory["tokens"][prompt, part])
            for prompt, part in zip(prompts[known], stored, strict=True)
        ]
        found = logp_of(texts) if texts else []
        for place, prompt, part, now in zip(known, prompts[known], stored, found, strict=True):
            moved[place] = np.mean(np.abs(memory["logp"][prompt, part].astype(np.float64) - now))
        return moved

    def read(self, memory: Memory, num_prompts: int) -> np.ndarray:
        return memory["value"]

    def report(self, memory: Memory) -> dict[str, float]:
        """Means: of rho over the last step's prompts, of the others over all that were visited."""
        visited, last = memory["count"] > 0, np.isfinite(memory["rho"])
        means = {
            "value": memory["value"][visited],
            "value_count": memory["count"][visited],
            "value_rho": memory["rho"][last],
        }
        return {name: float(values.mean()) for name, values in means.items() if values.size}
