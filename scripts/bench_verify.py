"""How fast verifiers are on this machine: start-up, easy and algebraic mathematics, code.

    python scripts/bench_verify.py [--workers=2] [--json]

No two graded items are equal, so that nothing comes out of a cache.
"""

from __future__ import annotations

import json
import os
import platform
import time

from absl import app, flags

from xrpo_jax.types import Verdict
from xrpo_jax.verify import Pool, math
from xrpo_jax.verify.code import grade_code
from xrpo_jax.verify.sandbox import describe

_WORKERS = flags.DEFINE_integer("workers", 0, "Worker processes; 0 = as many as cores.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object instead of a table.")

EASY = (r"{n}", "{n}.50", r"\frac{{{n}}}{{7}}", r"\${n:,}", r"{n}\%", r"{n}\text{{ cm}}", "x = {n}")
ALGEBRA = (
    (r"\frac{{\sqrt{{{n}}}}}{{{n}}}", r"\frac{{1}}{{\sqrt{{{n}}}}}"),
    ("(x+{n})^2", "x^2 + {m}x + {n}^2"),
    ("y = 2x + {n}", "2y - 4x = {m}"),
)
REASONING = "We add the parts and check the sum once more. " * 20


def easy(count: int) -> list[tuple[str, str]]:
    """Right answers as numbers in several spellings, at the end of a page of text."""
    items = []
    for n in range(count):
        gold = EASY[n % len(EASY)].format(n=n + 1000)
        items.append((f"{REASONING}So it is \\boxed{{{gold}}}.", gold))
    return items


def algebraic(count: int) -> list[tuple[str, str]]:
    """Right answers that only algebra can tell."""
    items = []
    for n in range(2, count + 2):
        gold, answer = ALGEBRA[n % len(ALGEBRA)]
        items.append((f"\\boxed{{{answer.format(n=n, m=2 * n)}}}", gold.format(n=n, m=2 * n)))
    return items


def code(count: int) -> list[tuple[str, list[dict]]]:
    """Programs that read a number and print its square, with one test each."""
    program = "```python\n# {n}\nprint(int(input()) ** 2)\n```"
    return [
        (program.format(n=n), [{"stdin": f"{n}\n", "stdout": f"{n * n}\n"}]) for n in range(count)
    ]


def rate(pool: Pool, items: list[tuple]) -> float:
    """Verdicts a second; every one must be correct."""
    began = time.perf_counter()
    verdicts: list[Verdict] = pool.map(items)
    spent = time.perf_counter() - began
    wrong = [verdict for verdict in verdicts if not verdict.correct]
    if wrong:
        raise RuntimeError(f"{len(wrong)} of {len(items)} are not correct: {wrong[0]}")
    return len(items) / spent


def main(arguments: list[str]) -> None:
    if len(arguments) > 1:
        raise app.UsageError(f"no arguments are taken; got {arguments[1:]}")
    workers = _WORKERS.value
    found = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    began = time.perf_counter()
    with Pool(math.grade, workers=workers) as pool:
        pool.map(easy(1))
        found["seconds to the first verdict"] = time.perf_counter() - began
        found["easy math verdicts/s"] = rate(pool, easy(20_000))
        rate(pool, algebraic(30))
        found["algebraic math verdicts/s"] = rate(pool, algebraic(630)[30:])
    with Pool(grade_code, workers=workers, deadline=60.0, memory_mb=4096) as pool:
        pool.map(code(1))
        found["programs/s, one test each"] = rate(pool, code(200))
    found["sandbox"] = describe()
    if _JSON.value:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:<30}{value:,.2f}" if isinstance(value, float) else f"{name:<30}{value}")


if __name__ == "__main__":
    app.run(main)
