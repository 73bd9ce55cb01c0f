"""Grades a file of completions and prints a verdict a line; a table of counts goes to stderr.

    python -m xrpo_jax.verify --kind=math cases.jsonl > verdicts.jsonl

Lines hold `completion` and `gold`; of kind choice `letters`, too, where they are not A to Z; of
kind code `tests` instead of gold, and `entry_point` where the tests call a function.
"""

from __future__ import annotations

import functools
import json
import sys

from absl import app, flags
from tqdm import tqdm

from xrpo_jax.types import VERDICT_STATUSES
from xrpo_jax.verify.lines import KINDS, grade_line, read
from xrpo_jax.verify.math import Rules
from xrpo_jax.verify.pool import Pool

CHUNK = 200  # lines between two states of the progress bar
_KIND = flags.DEFINE_enum("kind", "math", KINDS, "What the answers are.")
_WORKERS = flags.DEFINE_integer("workers", 0, "Worker processes; 0 = as many as cores.")
_DEADLINE = flags.DEFINE_float("deadline", None, "Seconds a line; 10 if not given, 150 for code.")
_LAST_NUMBER = flags.DEFINE_bool("last_number", False, "It counts where no answer is stated.")
_TOLERANCE = flags.DEFINE_float("tolerance", 0.0, "Relative difference that is still right.")
_STRICT = flags.DEFINE_bool("strict", False, "Percent, units and order must be as in the gold.")


def main(arguments: list[str]) -> None:
    if len(arguments) != 2:
        raise app.UsageError(f"one file of lines is needed; got {len(arguments) - 1}")
    kind, rules = _KIND.value, {"tolerance": _TOLERANCE.value, "strict": _STRICT.value}
    try:
        Rules(**rules)
        rows = read(arguments[1], kind)
        deadline = {"code": 150.0}.get(kind, 10.0) if _DEADLINE.value is None else _DEADLINE.value
        grade = functools.partial(grade_line, kind, rules | {"last_number": _LAST_NUMBER.value})
        with Pool(grade, workers=_WORKERS.value, deadline=deadline) as pool:
            counts = _print(pool, rows)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    for status in VERDICT_STATUSES:
        share = counts[status] / len(rows)
        print(f"{status:<10}{counts[status]:>8}{share:>8.1%}", file=sys.stderr)


def _print(pool: Pool, rows: list[dict]) -> dict[str, int]:
    """One verdict a line in the order of the rows; how many there are of each status."""
    counts = dict.fromkeys(VERDICT_STATUSES, 0)
    bar = tqdm(total=len(rows), unit="line", file=sys.stderr)
    for start in range(0, len(rows), CHUNK):
        for verdict in pool.map([(row,) for row in rows[start : start + CHUNK]]):
            counts[verdict.status] += 1
            line = {"status": verdict.status, "score": verdict.score, "reason": verdict.reason}
            print(json.dumps(line, ensure_ascii=False))
            bar.update()
    bar.close()
    return counts


if __name__ == "__main__":
    app.run(main)
