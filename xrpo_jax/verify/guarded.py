"""Mathematics graded where it is called, but for algebra, which a worker process does."""

from __future__ import annotations

import functools
import threading

from xrpo_jax.types import Verdict
from xrpo_jax.verify import math
from xrpo_jax.verify.pool import Pool
from xrpo_jax.verify.worker import inside_worker

_STARTING = threading.Lock()


def grade_math(
    completion: str, gold: str | int | float, *, deadline: float = 10.0, **settings
) -> Verdict:
    """Whether the answer that a completion states equals `gold`, with the settings of math.grade.

    What takes algebra is computed in a worker process that is killed after `deadline` seconds and
    shared by all calls; for many completions at a time a `Pool` is faster. Raises ValueError for a
    gold that no answer could meet, or a wrong setting.
    """
    if inside_worker():  # of a pool, under its deadline
        return math.grade(completion, gold, **settings)
    try:
        return math.grade(completion, gold, algebra=False, **settings)
    except math.NeedsAlgebra:
        with _STARTING:
            pool = _shared_pool(deadline)
        return pool.map([(completion, gold, settings)])[0]


@functools.cache
def _shared_pool(deadline: float) -> Pool:
    return Pool(_grade, workers=1, deadline=deadline)


def _grade(completion: str, gold: str, settings: dict) -> Verdict:
    return math.grade(completion, gold, **settings)
