"""Llama 3.1's scaling of RoPE, found again from the factors that a GGUF file keeps of it."""

from typing import Any

import numpy as np

_STANDARD = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}  # of every Llama 3.1, 3.2 and 3.3


def scaling_of(
    factors: np.ndarray, theta: float, head_dim: int, length: int, what: str
) -> dict[str, Any]:
    """Returns the config's rope_scaling that gives `factors` f32[E/2], divisors of frequencies.

    `length` is the context of pretraining, against which the bounds are expressed; when neither
    Llama's own bounds nor those fitted to the blended pairs give the factors, ValueError names
    `what`, since another formula made them.
    """
    factors = np.asarray(factors, np.float64).reshape(-1)
    turns = length * theta ** -(np.arange(0, head_dim, 2) / head_dim) / (2 * np.pi)
    if factors.shape == turns.shape:
        factor = float(np.max(factors))
        for bounds in (_STANDARD, _fit(factors, turns, factor)):
            if bounds and np.allclose(expected(turns, factor, **bounds), factors, rtol=1e-4):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    **bounds,
                    "original_max_position_embeddings": length,
                }
    raise ValueError(
        f"{what} does not follow Llama 3.1's formula, the only one that is supported; take the "
        "model's Hugging Face directory instead"
    )


def expected(
    turns: np.ndarray, factor: float, low_freq_factor: float, high_freq_factor: float
) -> np.ndarray:
    """Returns the divisor of each pair of dimensions that turns so often within the context."""
    keep = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)
    return 1 / (keep + (1 - keep) / factor)


def _fit(factors: np.ndarray, turns: np.ndarray, factor: float) -> dict[str, float] | None:
    """Returns the bounds from two blended pairs: the share that is kept is linear in the turns."""
    blended = np.flatnonzero((factors > 1.0001) & (factors < 0.9999 * factor))
    if len(blended) < 2:
        return None
    first, last = blended[0], blended[-1]
    keep = (1 / factors - 1 / factor) / (1 - 1 / factor)
    slope = (keep[first] - keep[last]) / (turns[first] - turns[last])
    low = turns[last] - keep[last] / slope
    return {"low_freq_factor": float(low), "high_freq_factor": float(low + 1 / slope)}
