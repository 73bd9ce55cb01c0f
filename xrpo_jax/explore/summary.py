"""Numbers about one step's exploration, for the log."""

from __future__ import annotations

import numpy as np

from xrpo_jax.types import Kind, Ledger, Progress, Rollout, Task


def summarise(progress: Progress, ledger: Ledger, task: Task, selected: list[int]) -> dict:
    """Rewards, accuracy by level, allocation, seeding and lengths of a step's rollouts.

    `accuracy` is over plain rollouts: what the policy can do by itself. `allocation` counts
    prompts by the number of their rollouts.
    """
    rows = [row for slot in progress.rollouts for row in slot]
    plain = [row for row in rows if row.kind == Kind.PLAIN]
    seeded = [row for row in rows if row.kind == Kind.SEEDED]
    used = [slot for slot in progress.rollouts if slot]
    counts = np.array([len(slot) for slot in used])
    sizes, prompts = np.unique(counts, return_counts=True)
    metrics = {
        "reward": float(np.mean([row.reward for row in rows])),
        "accuracy": _accuracy(plain),
    }
    for level in task.levels:
        chosen = [row for row in plain if task.level(row.prompt) == level]
        if chosen:
            metrics[f"accuracy/{level}"] = _accuracy(chosen)
    metrics |= {
        "zero_variance": float(np.mean([len({row.reward for row in slot}) == 1 for slot in used])),
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
    statuses = [row.verdict.status for row in rows]
    for status in sorted(set(statuses)):
        metrics[f"verdicts/{status}"] = statuses.count(status)
    return metrics


def records(progress: Progress) -> list[dict]:
    """One JSON record a rollout, for reading later."""
    return [
        {
            "prompt": row.prompt,
            "round": row.round,
            "index": row.index,
            "kind": Kind(row.kind).name.lower(),
            "text": row.text,
            "status": row.verdict.status,
            "reward": row.reward,
            "logp": round(float(row.logp.sum()), 6),
            "length": len(row.tokens),
        }
        for slot in progress.rollouts
        for row in slot
    ]


def _accuracy(rows: list[Rollout]) -> float:
    return float(np.mean([row.verdict.correct for row in rows])) if rows else 0.0


def _rescued(rows: tuple[Rollout, ...]) -> bool:
    """Only seeded rollouts of this prompt were correct."""
    right = [row.kind for row in rows if row.verdict.correct]
    return bool(right) and Kind.PLAIN not in right
