"""Numbers about one step's exploration, for the log."""

from __future__ import annotations

import numpy as np

from xrpo_jax.explore.collect import Explore
from xrpo_jax.types import VERDICT_STATUSES, Kind, Ledger, Progress, Rollout, Task

Groups = list[tuple[Rollout, ...]]


def summarise(
    explore: Explore, progress: Progress, ledger: Ledger, task: Task, groups: Groups
) -> dict:
    """Rewards, accuracy by level, allocation, seeding and lengths of a step's rollouts.

    `accuracy` is over the first round with answers, which every planner spreads evenly, so that it
    compares between algorithms whose first round asks plain prompts. `allocation` counts prompts by
    the number of their rollouts. Rollouts whose verifier failed count in `verdicts/...` and in no
    reward or accuracy. `groups` are the rollouts trained on; `ledger` is that after the step.
    """
    rows = [row for slot in progress.rollouts for row in slot]
    drafts = [row for slot in progress.drafts for row in slot]
    begun = min((row.round for row in rows), default=0)
    first = [row for row in rows if row.round == begun]
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
        "zero_variance": _share([_equal(slot) for slot in used]),
        "allocation": {int(n): int(count) for n, count in zip(sizes, prompts, strict=True)},
        "rollouts": len(rows),
        "drafts": len(drafts),
        "rounds": 1 + max((row.round for row in rows), default=0),
        "groups": len(groups),
        "trained_rows": sum(len(group) for group in groups),
        "seeded": len(seeded) / max(len(rows), 1),
        "rescued_prompts": _share([_rescued(slot) for slot in used]),
        "length": _share([len(row.tokens) for row in rows]),
        "truncated": _share([not row.stopped for row in rows]),
        "decoded_tokens": progress.decoded,
        "decoded_tokens_total": int(ledger["decoded"]["tokens"]),
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
    value = explore.values.read(ledger["values"], len(task))
    for part, told in (
        (explore.planner, progress),
        (explore.values, ledger["values"]),
        (explore.curriculum, value),
    ):
        metrics |= part.report(told) if hasattr(part, "report") else {}
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
            "status": "draft" if row.draft else row.verdict.status,
            "reason": "" if row.draft else row.verdict.reason,
            "reward": row.reward if np.isfinite(row.reward) else None,
            "terms": row.terms,
            "logp": round(float(row.logp.sum()), 6),
            "length": len(row.tokens),
        }
        for answers, drafts in zip(progress.rollouts, progress.drafts, strict=True)
        for row in sorted((*answers, *drafts), key=lambda row: row.index)
    ]


def _share(values: list) -> float:
    return float(np.mean(values)) if values else 0.0


def _mean(values: list[float]) -> float:
    finite = [value for value in values if np.isfinite(value)]
    return float(np.mean(finite)) if finite else 0.0


def _equal(rows: tuple[Rollout, ...]) -> bool:
    return len({row.reward for row in rows if np.isfinite(row.reward)}) <= 1


def _accuracy(rows: list[Rollout]) -> float:
    return _mean([float(row.verdict.correct) for row in rows if np.isfinite(row.reward)])


def _rescued(rows: tuple[Rollout, ...]) -> bool:
    """Only seeded or refined rollouts of this prompt were correct."""
    right = {row.kind for row in rows if row.verdict.correct}
    return not right.isdisjoint((Kind.SEEDED, Kind.REFINED)) and Kind.PLAIN not in right
