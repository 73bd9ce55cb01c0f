"""This library, as one engine among the others."""

from __future__ import annotations

from bench_floor import floor
from bench_ours import Bench
from bench_pipe import serve
from bench_work import Work


def prepare(raw: dict):
    """Load and build; the commands that warm up, do the work once and measure its floor."""
    work = Work.read(raw)
    bench = Bench(work, raw["options"])
    return {
        "warm": bench.warm,
        "run": bench.run,
        "floor": lambda: floor(bench.model, work),
    }


if __name__ == "__main__":
    serve(prepare)
