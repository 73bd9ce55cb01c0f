"""What metrics.jsonl says of a step, beside its evaluation and what was compiled."""

from __future__ import annotations

import time

import numpy as np

from xrpo_jax.arrays import Batch
from xrpo_jax.config import Settings
from xrpo_jax.explore import summary
from xrpo_jax.log import Clock
from xrpo_jax.types import Ledger, Progress, Task


def of_step(
    settings: Settings,
    task: Task,
    progress: Progress,
    ledger: Ledger,
    batch: Batch,
    learned: dict,
    clock: Clock,
    begun: float,
) -> dict:
    """The record of a step that began at `begun` (time.perf_counter) and ends with this.

    `ledger` is that after the step, `batch` and `learned` are what its update returned. A mean over
    tokens that nobody computed is left out.
    """
    explore, importance = settings.algorithm.explore, settings.algorithm.learn.importance
    groups = explore.planner.select(progress)
    metrics = summary.summarise(explore, progress, ledger, task, groups)
    metrics |= learned | sampler_gap(batch) | old_entropy(batch)
    if importance is not None:
        metrics |= importance.statistics(batch)
    spent = time.perf_counter() - begun - clock.seconds.get("evaluate", 0.0)
    metrics["tokens_per_second"] = progress.decoded / spent
    metrics |= {f"seconds/{phase}": seconds for phase, seconds in clock.seconds.items()}
    return metrics | {"seconds/step": spent}


def sampler_gap(batch: Batch) -> dict[str, float]:
    """How far the sampler's log-probs are from the trainer's, over tokens drawn in context.

    Rows that the trainer did not have to look at (learn/update.py) count in neither; without any
    there is no gap. Where rollouts are drawn ahead this is also how far the policy has moved since.
    """
    seen = (batch.mask > 0) & np.isfinite(batch.sampler_logp) & np.isfinite(batch.old_logp)
    gap = np.abs(batch.sampler_logp[seen] - batch.old_logp[seen])
    if not gap.size:
        return {}
    return {"sampler_gap_mean": float(gap.mean()), "sampler_gap_max": float(gap.max())}


def old_entropy(batch: Batch) -> dict[str, float]:
    """The mean entropy before the update, over tokens that the trainer looked at, if any."""
    values = batch.old_entropy[(batch.mask > 0) & np.isfinite(batch.old_entropy)]
    return {"old_entropy": float(values.mean())} if values.size else {}
