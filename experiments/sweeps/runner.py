"""Runs variants of the quickstart's task, several seeds each: what the sweeps of this folder share.

Every run is a process with one core of its own, `--jobs` at a time, in OUT/VARIANT-SEED; finished
runs are left alone and a broken-off one goes on, so the same command resumes a sweep.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import pathlib
import queue
import subprocess
import sys

from tqdm import tqdm

from xrpo_jax.log import ended, read_metrics

ROOT = pathlib.Path(__file__).resolve().parents[2]
Variants = dict[str, list[str]]  # name -> flags

SHARED = (
    f"--config={ROOT / 'experiments' / 'quickstart.py'}",
    "--config.eval.every=20",
    "--config.checkpoint.every=40",
    "--config.checkpoint.keep=1",
    "--config.eval.problems=144",
    "--config.eval.samples=8",
)


def finished(workdir: pathlib.Path, steps: int, tokens: int = 0) -> bool:
    """Whether the run in `workdir` has its evaluation at step `steps` or at the end of `tokens`.

    Judged by what was done, not by the settings it was done with: a run that ended with a smaller
    budget goes on, one that went further than is asked for is left alone.
    """
    records = read_metrics(workdir / "metrics.jsonl")
    if not ended(records):
        return False
    spent = max(record.get("decoded_tokens_total", 0) for record in records)
    return records[-1]["step"] >= steps or 0 < tokens <= spent


def command(workdir: pathlib.Path, seed: int, flags: list[str], options: argparse.Namespace):
    """The command line of a run; what is said later wins."""
    budget = [f"--config.train.steps={options.steps}"]
    if options.tokens:
        budget.append(f"--config.train.tokens={options.tokens}")
    start = [sys.executable, "-m", "xrpo_jax.main", f"--workdir={workdir}"]
    return [*start, *SHARED, f"--config.seed={seed}", *budget, *flags, *options.overrides]


def run(
    variant: str, seed: int, flags: list[str], options: argparse.Namespace, cores: queue.Queue
) -> str | None:
    """One run on one core; the path of its log when it failed."""
    workdir = options.out / f"{variant}-{seed}"
    if finished(workdir, options.steps, options.tokens):
        return None
    workdir.mkdir(parents=True, exist_ok=True)
    core = cores.get()
    single = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": single}
    try:
        with open(workdir / "output.txt", "a") as output:
            done = subprocess.run(
                command(workdir, seed, flags, options),
                env=environment,
                stdout=output,
                stderr=output,
                preexec_fn=lambda: os.sched_setaffinity(0, {core}),
            )
    finally:
        cores.put(core)
    if done.returncode == 0 and finished(workdir, options.steps, options.tokens):
        return None
    return str(workdir / "output.txt")


def read_options(
    about: str, variants: Variants, *, out: str, seeds: int, steps: int, tokens: int = 0
) -> argparse.Namespace:
    """The command line of a sweep with these defaults; `--tokens` only where it has a default."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(out))
    parser.add_argument("--variants", nargs="+", choices=variants, default=list(variants))
    parser.add_argument("--seeds", type=int, default=seeds)
    if tokens:
        parser.add_argument("--tokens", type=int, default=tokens, help="decoded, in a run")
    parser.add_argument("--steps", type=int, default=steps, help="in a run, at most")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options, overrides = parser.parse_known_args()
    for override in overrides:
        if not override.startswith("--config."):
            parser.error(
                f"{override}: allowed beside the options above: --config.section.key=value"
            )
    return argparse.Namespace(**{"tokens": 0, **vars(options)}, overrides=overrides)


def sweep(options: argparse.Namespace, variants: Variants) -> int:
    """Every run, then the table and the curves of scripts/compare.py; the exit code."""
    cores: queue.Queue = queue.Queue()
    for core in sorted(os.sched_getaffinity(0))[: options.jobs]:
        cores.put(core)
    # Seeds outermost: a sweep that is broken off still compares all variants.
    work = [(variant, seed) for seed in range(options.seeds) for variant in options.variants]
    pool = concurrent.futures.ThreadPoolExecutor(options.jobs)
    runs = [pool.submit(run, name, seed, variants[name], options, cores) for name, seed in work]
    failed = 0
    try:
        for done in tqdm(concurrent.futures.as_completed(runs), total=len(runs), unit="run"):
            if done.result():
                failed += 1
                tqdm.write(f"failed, see {done.result()}")
    except KeyboardInterrupt:  # the runs got it too: each saves and stops
        pool.shutdown(cancel_futures=True)
        sys.exit("stopped; the same command goes on")
    compare = [sys.executable, ROOT / "scripts" / "compare.py", options.out]
    return subprocess.run(compare).returncode or min(failed, 1)
