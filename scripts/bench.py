"""What this engine does on this machine: rollouts, updates, whole steps, and what they cost.

    python scripts/bench.py [--only='step:smollm2:*'] [--repeats=3] [--json=FILE]
    python scripts/bench.py --cost-curve [--out=runs/bench]
    python scripts/bench.py --small          # seconds, to see that all of it runs

Cases are KIND:MODEL:DTYPE, each in a process of its own: a first run, which compiles, then
`--repeats` timed ones. The work is 8 prompts x 8 samples, prompts of 32 to 41 tokens and 64 new
tokens a row without any stop token; `variable` gives the rows 8 to 256 tokens. SmolLM2 needs
scripts/fetch_smollm2.sh. scripts/bench_peers.py compares with others.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import itertools
import json
import pathlib
import statistics
import sys

from bench_machine import describe
from bench_pipe import Engine
from bench_work import KINDS, Work

MODELS = ("smollm2", "tiny")
DTYPES = ("float32", "bfloat16")
CASES = tuple(":".join(case) for case in itertools.product(KINDS, MODELS, DTYPES))
SMALL = {"prompts": 2, "samples": 2, "new_tokens": 4, "repeats": 1}
SMALL_MODEL = {"num_layers": 1, "hidden_size": 32, "intermediate_size": 64}


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line; a wrong one ends with exit code 2."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", action="append", help="cases by name, * for any part")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--set", action="append", default=[], help="section.key=value of a run")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/bench"))
    parser.add_argument("--json", type=pathlib.Path, help="write everything here as well")
    parser.add_argument("--small", action="store_true", help="little work for the tiny model")
    parser.add_argument("--cost-curve", action="store_true", help="rates and memory by size")
    given = parser.parse_args(argv)
    for name in ("repeats", "prompts", "samples", "new_tokens"):
        if getattr(given, name) < 1:
            flag = name.replace("_", "-")
            parser.error(f"--{flag}={getattr(given, name)}; allowed: at least 1")
    if given.small:
        vars(given).update(SMALL)
    from bench_curve import POINTS

    known = tuple(POINTS) if given.cost_curve else CASES
    patterns = given.only or ["*"]
    given.names = [name for name in known if any(fnmatch.fnmatch(name, each) for each in patterns)]
    if given.small:
        given.names = [name for name in given.names if name.split(":")[1:] == ["tiny", "float32"]]
    if not given.names:
        parser.error(f"--only={','.join(patterns)}; allowed: some of {', '.join(known)}")
    return given


def measure(work: Work, chosen: dict, repeats: int, log: pathlib.Path) -> dict:
    """The facts of a work: its first run, timed ones, the floor; from a process of its own."""
    asked = dataclasses.asdict(work) | {"options": chosen}
    with Engine(pathlib.Path(sys.executable), "ours", asked, log) as engine:
        first = engine.warm()
        runs = [engine.run() for _ in range(repeats)]
        floor = engine.ask("floor")  # last, so that its memory counts for nothing
    return {"work": asked, "first": first, "runs": runs, "floor": floor}


def summary(found: dict) -> dict:
    """Rates in useful tokens/s, share of the floor, seconds of compiling, memory, other work."""
    runs, floor = found["runs"], found["floor"]
    rates = [run["tokens"] / run["seconds"] for run in runs]
    seconds = statistics.median(run["seconds"] for run in runs)
    return {
        "rate": statistics.median(rates),
        "low": min(rates),
        "high": max(rates),
        "seconds": seconds,
        "floor": floor["seconds"] / seconds,
        "own_floor": floor["own_seconds"] / seconds,
        "compile": found["first"]["compile_seconds"],
        "late_compiles": sum(run["compiles"] for run in runs),
        "peak_gb": max(run["peak_gb"] for run in runs),
        "others": max(run["others"] for run in runs),
        "stolen": max(run["stolen"] for run in runs),
    }


def table(summaries: dict[str, dict]) -> str:
    """One case a line, as a Markdown table for people."""
    lines = [
        "| case | tokens/s (range) | seconds | GEMM floor: best, own rates | compiling, s "
        "| memory, GB | others, stolen CPU |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, facts in summaries.items():
        late = f" (+{facts['late_compiles']} later)" if facts["late_compiles"] else ""
        lines.append(
            f"| {name.replace(':', ', ')} "
            f"| {facts['rate']:,.0f} ({facts['low']:,.0f} to {facts['high']:,.0f}) "
            f"| {facts['seconds']:.3g} | {100 * facts['floor']:.0f} %, "
            f"{100 * facts['own_floor']:.0f} % "
            f"| {facts['compile']:.1f}{late} | {facts['peak_gb']:.2f} "
            f"| {100 * facts['others']:.0f} %, {100 * facts['stolen']:.0f} % |"
        )
    return "\n".join(lines)


def phases(results: dict[str, dict]) -> str:
    """Shares of a run's seconds by phase, a line a case that has any."""
    lines = []
    for name, found in results.items():
        runs = [run for run in found["runs"] if "phases" in run]
        names = sorted({phase for run in runs for phase in run["phases"]})
        shares = {
            phase: statistics.median(run["phases"].get(phase, 0.0) / run["seconds"] for run in runs)
            for phase in names
        }
        said = sorted(shares.items(), key=lambda item: -item[1])
        if said:
            told = ", ".join(f"{phase} {100 * share:.1f} %" for phase, share in said)
            lines.append(f"{name.replace(':', ', ')}: {told}")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Run what is asked for and print it."""
    given = arguments(argv)
    if given.cost_curve:
        import bench_curve

        return bench_curve.main(given)
    from bench_models import make_work, model_folder  # starts JAX
    from bench_ours import chosen_of

    chosen, results = chosen_of(given.set), {}
    for name in given.names:
        kind, model, dtype = name.split(":")
        work = make_work(
            kind,
            model_folder(model, given.out, **(SMALL_MODEL if given.small else {})),
            dtype,
            prompts=given.prompts,
            samples=given.samples,
            new_tokens=given.new_tokens,
        )
        log = given.out / "logs" / f"{name.replace(':', '-')}.log"
        found = measure(work, chosen, given.repeats, log)
        results[name] = found | {"summary": summary(found), "machine": describe()}
        print(table({name: results[name]["summary"]}).splitlines()[-1], flush=True)
        write(given.json, results)
    summaries = {name: found["summary"] for name, found in results.items()}
    print(f"\n{describe()}\n\n{table(summaries)}\n\n{phases(results)}")
    return 0


def write(file: pathlib.Path | None, results: dict) -> None:
    """Write the results, with those of other cases that the file has already."""
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(before | results, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
