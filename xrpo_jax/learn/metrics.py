"""What an update says of itself in the log."""

from __future__ import annotations

import numpy as np

from xrpo_jax.arrays import Scores


def metrics_of(
    totals: dict[str, float], norms: list[float], scores: Scores, epochs: int
) -> dict[str, float]:
    """The log of one step from sums over tokens, and the norm of every update's gradient.

    Means over tokens are left out where no token was computed.
    """
    tokens = totals["tokens"]
    finite = [norm for norm in norms if np.isfinite(norm)]
    means = {name: total / tokens for name, total in totals.items() if name != "tokens" and tokens}
    return means | {
        "loss": totals["loss"] / epochs,
        "gradient_norm": float(np.mean(finite)) if finite else 0.0,
        "skipped_updates": float(len(norms) - len(finite)),
        "empty_batch": float(not np.any(scores.weight)),
        "advantage_max": float(np.max(np.abs(scores.advantage), initial=0.0)),
    }


def spread_of(report: dict[str, np.ndarray]) -> dict[str, float]:
    """Mean, least and largest finite value over rows of what the score's parts report."""
    metrics = {}
    for name, values in report.items():
        finite = values[np.isfinite(values)]
        if finite.size:
            metrics[name] = float(finite.mean())
            metrics[f"{name}_low"], metrics[f"{name}_high"] = map(
                float, (finite.min(), finite.max())
            )
    return metrics
