"""Planners `(Progress, round) -> list[Request]`: who gets more rollouts; an empty list ends a step.

Each also has `check(batch)` (settings against prompts per step, before anything runs), `slots`
(prompts it may look at), `rows` (rollouts it may train on) and `select(progress)` (the rollouts to
train on, a tuple a group). `group` is its budget of rollouts for a prompt on average. One that
resumes drafts says `pauses = True`; `depth` is the most segments of a rollout, for those whose
learner asks which rows share a beginning; `report(progress)` adds to the log.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
from scipy import stats

from xrpo_jax.types import Progress, Request, Rollout

BONUSES = ("sqrt", "linear")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fixed:
    """The same number of rollouts for every prompt, in one round."""

    group: int

    def check(self, batch: int) -> None:
        if self.group < 2:
            raise ValueError(
                f"rollout.group={self.group}; allowed: at least 2, a group of one has no advantage"
            )

    def slots(self, batch: int) -> int:
        return batch

    def __call__(self, progress: Progress, round: int) -> list[Request]:
        if round > 0:
            return []
        return [Request(slot=slot, n=self.group) for slot in range(progress.batch)]

    def rows(self, batch: int) -> int:
        return batch * self.group

    def select(self, progress: Progress) -> list[tuple[Rollout, ...]]:
        return list(progress.rollouts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Uniform:
    """The phases of `Uncertainty` with equal shares: XRPO without its planner."""

    group: int
    base: int
    rounds: int = 2

    def check(self, batch: int) -> None:
        _check_phases(self)
        if (self.group - self.base) % self.rounds:
            raise ValueError(
                f"rollout.group={self.group} - n_base={self.base} is not divisible by "
                f"algorithm.rounds={self.rounds}, so the uniform shares do not come out even"
            )

    def slots(self, batch: int) -> int:
        return batch

    def __call__(self, progress: Progress, round: int) -> list[Request]:
        if round > self.rounds:
            return []
        n = self.base if round == 0 else (self.group - self.base) // self.rounds
        return [Request(slot=slot, n=n) for slot in range(progress.batch)]

    def rows(self, batch: int) -> int:
        return batch * self.group

    def select(self, progress: Progress) -> list[tuple[Rollout, ...]]:
        return list(progress.rollouts)


def _check_phases(planner: Uniform | Uncertainty) -> None:
    if planner.base < 2:
        raise ValueError(
            f"algorithm.n_base={planner.base}; allowed: at least 2, a standard deviation needs two "
            f"rollouts (0 means rollout.group // 2, here {planner.group // 2})"
        )
    if planner.base >= planner.group:
        raise ValueError(
            f"algorithm.n_base={planner.base}; allowed: less than rollout.group={planner.group}"
        )
    if planner.rounds < 1:
        raise ValueError(f"algorithm.rounds={planner.rounds}; allowed: at least 1")


@functools.cache
def t_quantile(alpha: float, freedom: int) -> float:
    """The Student-t quantile of probability 1 - alpha/2 with `freedom` degrees of freedom."""
    return float(stats.t.ppf(1.0 - alpha / 2.0, freedom))


def half_width(std: float, n: int, alpha: float) -> float:
    """Half-width of the Student-t interval of a mean over n rollouts (2510.06672, second-hand)."""
    return t_quantile(alpha, n - 1) * std / n**0.5


def priorities(
    rewards: list[np.ndarray],
    *,
    alpha: float,
    explore: float,
    bonus: str = "sqrt",
    solved_weight: float = 1.0,
    solved: np.ndarray | None = None,
) -> np.ndarray:
    """XRPO's priority f64[G] of each prompt from its rewards so far: reduction plus count bonus.

    The reduction is `h(n) - h(n + 1)` with the current standard deviation (ddof 1) in both terms;
    below two rollouts it is the largest of the batch. The bonus is
    `explore * sqrt(log(1 + T) / n)` with T the rollouts of the step so far
    (2510.06672, form second-hand, T ours; `bonus="linear"` drops the root). `solved` bool[G] marks
    the prompts whose priority is scaled by `solved_weight`.
    """
    counts = np.array([len(values) for values in rewards])
    reduction = np.zeros(len(rewards))
    for slot, values in enumerate(rewards):
        n = len(values)
        if n >= 2 and np.ptp(values) > 0:  # equal rewards: exactly 0, not a rounding error
            std = float(np.std(values, ddof=1))
            reduction[slot] = half_width(std, n, alpha) - half_width(std, n + 1, alpha)
    reduction[counts < 2] = reduction.max(initial=0.0)
    inside = np.log1p(counts.sum()) / np.maximum(counts, 1)
    priority = reduction + explore * (np.sqrt(inside) if bonus == "sqrt" else inside)
    return priority if solved is None else np.where(solved, solved_weight * priority, priority)


def allocate(priority: np.ndarray, budget: int, room: np.ndarray | None = None) -> np.ndarray:
    """Split `budget` rollouts in proportion to `priority` f64[G]: i64[G] that sums to it exactly.

    Floor of the share, then largest remainder, ties to the lower index; all zero is a uniform
    split. `room` i64[G] caps each prompt; what a full one leaves goes to the others by the same
    rule. Raises ValueError when the room is less than the budget.
    """
    granted = np.zeros(len(priority), np.int64)
    room = np.full(len(priority), budget) if room is None else np.asarray(room)
    if room.sum() < budget:
        raise ValueError(
            f"algorithm.max_rollouts leaves room for {room.sum()} rollouts; the round has {budget}"
        )
    while budget > 0:
        open_slots = granted < room
        weight = np.where(open_slots, priority, 0.0)
        if weight.sum() <= 0:
            weight = open_slots.astype(np.float64)
        share = weight / weight.sum() * budget
        extra = np.floor(share + 1e-9).astype(np.int64)
        rest = budget - extra.sum()
        remainder = np.round(share - extra, 9)  # equal ones may differ in their last bit
        order = np.argsort(-np.where(open_slots, remainder, -np.inf), kind="stable")
        extra[order[:rest]] += 1
        extra = np.minimum(extra, room - granted)
        granted += extra
        budget -= int(extra.sum())
    return granted


@dataclasses.dataclass(frozen=True, kw_only=True)
class Uncertainty:
    """XRPO's planner: `base` rollouts for each prompt, then `rounds` rounds split by priority.

    `group` is the mean over prompts, so the step's budget equals the uniform baseline's;
    `cap` limits a prompt's rollouts (0 = no cap). Defaults are ours where 2510.06672 is silent.
    """

    group: int
    base: int
    rounds: int = 2
    alpha: float = 0.05
    explore: float = 0.1
    bonus: str = "sqrt"
    solved_weight: float = 1.0
    cap: int = 0

    def check(self, batch: int) -> None:
        _check_phases(self)
        rest = batch * (self.group - self.base)
        if rest % self.rounds:
            raise ValueError(
                f"the planner's budget of {rest} rollouts (rollout.prompts={batch} x "
                f"(rollout.group={self.group} - n_base={self.base})) is not divisible by "
                f"algorithm.rounds={self.rounds}"
            )
        if self.bonus not in BONUSES:
            raise ValueError(f"algorithm.bonus={self.bonus!r}; allowed: {', '.join(BONUSES)}")
        if not 0 < self.alpha < 1:
            raise ValueError(f"algorithm.alpha={self.alpha}; allowed: between 0 and 1")
        for name in ("explore", "solved_weight"):  # a share cannot be negative
            if not getattr(self, name) >= 0:
                raise ValueError(f"algorithm.{name}={getattr(self, name)}; allowed: 0 or more")
        if self.cap and self.cap < self.group:
            raise ValueError(
                f"algorithm.max_rollouts={self.cap}; allowed: 0 (none) or at least "
                f"rollout.group={self.group}, else the budget cannot be spent"
            )

    def slots(self, batch: int) -> int:
        return batch

    def __call__(self, progress: Progress, round: int) -> list[Request]:
        slots = range(progress.batch)
        if round == 0:
            return [Request(slot=slot, n=self.base) for slot in slots]
        if round > self.rounds:
            return []
        priority = priorities(
            [progress.scores(slot) for slot in slots],
            alpha=self.alpha,
            explore=self.explore,
            bonus=self.bonus,
            solved_weight=self.solved_weight,
            solved=np.array(
                [all(row.verdict.correct for row in progress.rollouts[slot]) for slot in slots]
            ),
        )
        budget = progress.batch * (self.group - self.base) // self.rounds
        room = None
        if self.cap:
            room = self.cap - np.array([len(rows) for rows in progress.rollouts])
        granted = allocate(priority, budget, room)
        return [Request(slot=slot, n=int(n)) for slot, n in enumerate(granted) if n > 0]

    def rows(self, batch: int) -> int:
        return batch * self.group

    def select(self, progress: Progress) -> list[tuple[Rollout, ...]]:
        return list(progress.rollouts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refill:
    """DAPO's dynamic sampling: new prompts until the batch is full of groups that are mixed.

    A group is mixed when some but not all of its rollouts are correct. After `bound` rounds the
    step trains on what there is. A round asks only for the groups that are missing, so no
    accepted group is ever thrown away.
    """

    group: int
    bound: int = 10

    def check(self, batch: int) -> None:
        if self.group < 2:
            raise ValueError(f"rollout.group={self.group}; allowed: at least 2, to be mixed")
        if self.bound < 1:
            raise ValueError(f"algorithm.max_generation_batches={self.bound}; allowed: at least 1")

    def slots(self, batch: int) -> int:
        return batch * self.bound

    def __call__(self, progress: Progress, round: int) -> list[Request]:
        if round >= self.bound:
            return []
        used = sum(1 for rows in progress.rollouts if rows)
        missing = progress.batch - len(self.select(progress))
        return [Request(slot=used + i, n=self.group) for i in range(missing)]

    def rows(self, batch: int) -> int:
        return batch * self.group

    def select(self, progress: Progress) -> list[tuple[Rollout, ...]]:
        return [
            rows
            for rows in progress.rollouts
            if 0 < sum(row.verdict.correct for row in rows) < len(rows)
        ]
