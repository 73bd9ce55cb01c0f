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
import functools
import itertools
import json
import pathlib
import statistics
import sys
from collections.abc import Callable

from bench_machine import describe
from bench_pipe import Engine
from bench_work import KINDS, Work, chosen_of

MODELS = ("smollm2", "tiny")
DTYPES = ("float32", "bfloat16")
CASES = tuple(":".join(case) for case in itertools.product(KINDS, MODELS, DTYPES))
USUAL = {"prompts": 8, "samples": 8, "new_tokens": 64, "repeats": 3}
SMALL = {"prompts": 2, "samples": 2, "new_tokens": 4, "repeats": 1}
CURVE = ("prompts", "samples", "new_tokens")  # what the points of the cost curve say
FAILURES = (RuntimeError, OSError, ValueError)  # of a case: the others run all the same
SMALL_MODEL = {"num_layers": 1, "hidden_size": 32, "intermediate_size": 64}


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line; a wrong one ends with exit code 2."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", action="append", help="cases by name, * for any part")
    for name, usual in USUAL.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"{usual} by default")
    parser.add_argument("--set", action="append", default=[], help="section.key=value of a run")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/bench"))
    parser.add_argument("--json", type=pathlib.Path, help="write everything here as well")
    parser.add_argument("--small", action="store_true", help="little work for the tiny model")
    parser.add_argument("--cost-curve", action="store_true", help="rates and memory by size")
    given = parser.parse_args(argv)
    if given.cost_curve and given.small:
        parser.error("--cost-curve --small; allowed: one of them (--only chooses points)")
    for name, usual in (SMALL if given.small else USUAL).items():
        value, flag = getattr(given, name), f"--{name.replace('_', '-')}"
        if value is None:
            setattr(given, name, usual)
        elif value < 1:
            parser.error(f"{flag}={value}; allowed: at least 1")
        elif given.cost_curve and name in CURVE:
            parser.error(f"{flag}={value}; allowed: without --cost-curve, whose points say it")
    given.chosen = chosen(parser, given.set)
    from bench_curve import POINTS

    known = tuple(POINTS) if given.cost_curve else CASES
    patterns = given.only or ["*"]
    given.names = [name for name in known if any(fnmatch.fnmatch(name, each) for each in patterns)]
    if given.small:
        given.names = [name for name in given.names if name.split(":")[1:] == ["tiny", "float32"]]
    if not given.names:
        parser.error(f"--only={','.join(patterns)}; allowed: some of {', '.join(known)}")
    return given


def chosen(parser: argparse.ArgumentParser, given: list[str]) -> dict[str, object]:
    """The settings that `--set` gives; a wrong one ends with exit code 2."""
    try:
        found = chosen_of(given)
    except ValueError as error:
        parser.error(str(error))
    if found:
        from xrpo_jax.config import unknown_setting  # starts JAX

        wrong = unknown_setting([f"--config.{name}=0" for name in found])
        if wrong:
            parser.error(f"--set: {wrong}")
    return found


def measure(work: Work, chosen: dict, repeats: int, log: pathlib.Path) -> dict:
    """The facts of a work: first run, timed ones, floor, summary; from a process of its own."""
    asked = dataclasses.asdict(work) | {"options": chosen}
    with Engine(pathlib.Path(sys.executable), "ours", asked, log) as engine:
        first = engine.warm()
        runs = [engine.run() for _ in range(repeats)]
        floor = engine.ask("floor")  # last, so that its memory counts for nothing
    found = {"work": asked, "first": first, "runs": runs, "floor": floor}
    return found | {"summary": summary(found)}


def outcome(measured: Callable[[], dict]) -> dict:
    """What `measured` gives, or the `failure` that it raised."""
    try:
        return measured()
    except FAILURES as error:
        return {"failure": f"{type(error).__name__}: {error}"}


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


def table(results: dict[str, dict]) -> str:
    """The summary or the failure of one case a line, as a Markdown table for people."""
    lines = [
        "| case | tokens/s (range) | seconds | GEMM floor: best, own rates | compiling, s "
        "| memory, GB | others, stolen CPU |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in results.items():
        case = f"| {name.replace(':', ', ')} "
        if "failure" in found:
            lines.append(f"{case}| failed: {found['failure']} | | | | | |")
            continue
        facts = found["summary"]
        late = f" (+{facts['late_compiles']} later)" if facts["late_compiles"] else ""
        lines.append(
            f"{case}| {facts['rate']:,.0f} ({facts['low']:,.0f} to {facts['high']:,.0f}) "
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
        runs = [run for run in found.get("runs", ()) if "phases" in run]
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
    """Run what is asked for and print it; 1 if a case failed, after all others have run."""
    given = arguments(argv)
    if given.cost_curve:
        import bench_curve

        return bench_curve.main(given)
    from bench_models import make_work, model_folder  # starts JAX

    def measured(name: str) -> dict:
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
        return measure(work, given.chosen, given.repeats, log)

    results = {}
    for name in given.names:
        found = outcome(functools.partial(measured, name))
        results[name] = found | {"machine": describe()}
        print(table({name: found}).splitlines()[-1], flush=True)
        write(given.json, results)
    print(f"\n{describe()}\n\n{table(results)}\n\n{phases(results)}")
    return int(any("failure" in found for found in results.values()))


def write(file: pathlib.Path | None, results: dict) -> None:
    """Write the results, with those of other cases that the file has already."""
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(before | results, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
