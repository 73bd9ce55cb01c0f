"""Numbers about one step's exploration, for the log."""

from __future__ import annotations

import numpy as np

from xrpo_jax.types import VERDICT_STATUSES, Kind, Ledger, Progress, Rollout, Task


def summarise(progress: Progress, ledger: Ledger, task: Task, selected: list[int]) -> dict:
    """Rewards, accuracy by level, allocation, seeding and lengths of a step's rollouts.

    `accuracy` is over the first round, which every planner spreads evenly over plain prompts, so it
    compares between algorithms. `allocation` counts prompts by the number of their rollouts.
    Rollouts whose verifier failed count in `verdicts/...` and in no reward or accuracy.
    """
    rows = [row for slot in progress.rollouts for row in slot]
    first = [row for row in rows if row.round == 0]
    seeded = [row for row in rows if row.kind == Kind.SEEDED]
    used = [slot for slot in progress.rollouts if slot]
    counts = np.array([len(slot) for slot in used])
    sizes, prompts = np.unique(counts, return_counts=True)
    metrics = {
        "reward": _mean([row.reward for row in rows]),
        "accuracy": _accuracy(first),
    }
    for level in task.levels:
        chosen = [row for row in first if task.level(row.prompt) == level]
        if chosen:
            metrics[f"accuracy/{level}"] = _accuracy(chosen)
    metrics |= {
        "zero_variance": float(np.mean([_equal(slot) for slot in used])),
        "allocation": {int(n): int(count) for n, count in zip(sizes, prompts, strict=True)},
        "rollouts": len(rows),
        "rounds": 1 + max(row.round for row in rows),
        "groups": len(selected),
        "seeded": len(seeded) / len(rows),
        "rescued_prompts": float(np.mean([_rescued(slot) for slot in used])),
        "length": float(np.mean([len(row.tokens) for row in rows])),
        "truncated": float(np.mean([not row.stopped for row in rows])),
    }
    if seeded:
        metrics["seeded_accuracy"] = _accuracy(seeded)
    if "prompt" in ledger["seeder"]:
        metrics["corpus"] = int(np.sum(ledger["seeder"]["prompt"] >= 0))
    for name in dict.fromkeys(name for row in rows for name in row.terms):
        metrics[f"reward/{name}"] = _mean([row.terms[name] for row in rows if row.terms])
    statuses = [row.verdict.status for row in rows]
    for status in VERDICT_STATUSES:
        metrics[f"verdicts/{status}"] = statuses.count(status)
    return metrics


def records(progress: Progress, task: Task) -> list[dict]:
    """One JSON record a rollout, for reading later."""
    return [
        {
            "prompt": row.prompt,
            "question": task.prompt(row.prompt)[-1].content,
            "round": row.round,
            "index": row.index,
            "kind": Kind(row.kind).name.lower(),
            "text": row.text,
            "status": row.verdict.status,
            "reason": row.verdict.reason,
            "reward": row.reward if np.isfinite(row.reward) else None,
            "terms": row.terms,
            "logp": round(float(row.logp.sum()), 6),
            "length": len(row.tokens),
        }
        for slot in progress.rollouts
        for row in slot
    ]


def _mean(values: list[float]) -> float:
    finite = [value for value in values if np.isfinite(value)]
    return float(np.mean(finite)) if finite else 0.0


def _equal(rows: tuple[Rollout, ...]) -> bool:
    return len({row.reward for row in rows if np.isfinite(row.reward)}) <= 1


def _accuracy(rows: list[Rollout]) -> float:
    return _mean([float(row.verdict.correct) for row in rows if np.isfinite(row.reward)])


def _rescued(rows: tuple[Rollout, ...]) -> bool:
    """Only seeded rollouts of this prompt were correct."""
    right = [row.kind for row in rows if row.verdict.correct]
    return bool(right) and Kind.PLAIN not in right
