"""Verifiers: whether a completion's answer is right, in bounded time, whatever it says.

    from xrpo_jax.verify import grade_math, grade_code, grade_choice, Pool

Each returns a `Verdict` (status, score, reason). `Pool` grades many in worker processes under a
hard deadline.
"""

from __future__ import annotations

import importlib

_HOMES = {
    "Pool": "xrpo_jax.verify.pool",
    "Verdict": "xrpo_jax.types",
    "grade_choice": "xrpo_jax.verify.choice",
    "grade_code": "xrpo_jax.verify.code",
    "grade_math": "xrpo_jax.verify.guarded",
}
__all__ = list(_HOMES)


def __getattr__(name: str):
    """Imports on first use: not every grader needs sympy, and workers should start fast."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
