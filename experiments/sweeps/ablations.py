"""XRPO, its ablations, GRPO and GSPO on the quickstart's task, several seeds each.

    python experiments/sweeps/ablations.py --out=runs/ablations

Every run is a process with one core of its own, `--jobs` at a time; finished runs are left alone
and a broken-off one goes on, so the same command resumes the sweep. Ends with the table and the
curves of scripts/compare.py. All runs have the same rollout budget a step and the same optimizer
settings, which were tuned for GRPO.
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

from xrpo_jax.log import read_metrics

ROOT = pathlib.Path(__file__).resolve().parents[2]
VARIANTS = {
    "grpo": ["--config.algorithm.name=grpo"],
    "gspo": ["--config.algorithm.name=gspo"],
    "xrpo": ["--config.algorithm.name=xrpo"],
    "xrpo-without-planner": ["--config.algorithm.name=xrpo", "--config.algorithm.planner=False"],
    "xrpo-without-seeding": ["--config.algorithm.name=xrpo", "--config.algorithm.seeding=False"],
    "xrpo-without-sharpening": [
        "--config.algorithm.name=xrpo",
        "--config.algorithm.sharpening=False",
    ],
    "xrpo-generation-context": [
        "--config.algorithm.name=xrpo",
        "--config.algorithm.loss_context=generation",
    ],
}


def finished(workdir: pathlib.Path, steps: int) -> bool:
    """Whether the run in `workdir` has its last evaluation."""
    records = read_metrics(workdir / "metrics.jsonl")
    return any(r["step"] == steps and "eval/pass@1" in r for r in records)


def run(variant: str, seed: int, options: argparse.Namespace, cores: queue.Queue) -> str | None:
    """One run on one core; the path of its log when it failed."""
    workdir = options.out / f"{variant}-{seed}"
    if finished(workdir, options.steps):
        return None
    workdir.mkdir(parents=True, exist_ok=True)
    core = cores.get()
    command = [
        sys.executable,
        "-m",
        "xrpo_jax.main",
        f"--config={ROOT / 'experiments' / 'quickstart.py'}",
        f"--workdir={workdir}",
        f"--config.seed={seed}",
        f"--config.train.steps={options.steps}",
        "--config.eval.every=20",
        "--config.checkpoint.every=40",
        "--config.checkpoint.keep=1",
        "--config.eval.problems=144",
        "--config.eval.samples=8",
        *VARIANTS[variant],
        *options.overrides,
    ]
    single = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": single}
    try:
        with open(workdir / "output.txt", "a") as output:
            done = subprocess.run(
                command,
                env=environment,
                stdout=output,
                stderr=output,
                preexec_fn=lambda: os.sched_setaffinity(0, {core}),
            )
    finally:
        cores.put(core)
    if done.returncode == 0 and finished(workdir, options.steps):
        return None
    return str(workdir / "output.txt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/ablations"))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options, options.overrides = parser.parse_known_args()
    for override in options.overrides:
        if not override.startswith("--config."):
            parser.error(
                f"{override}: allowed beside the options above: --config.section.key=value"
            )
    cores: queue.Queue = queue.Queue()
    for core in sorted(os.sched_getaffinity(0))[: options.jobs]:
        cores.put(core)
    # Seeds outermost: a sweep that is broken off still compares all variants.
    work = [(variant, seed) for seed in range(options.seeds) for variant in options.variants]
    pool = concurrent.futures.ThreadPoolExecutor(options.jobs)
    runs = [pool.submit(run, variant, seed, options, cores) for variant, seed in work]
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
    sys.exit(subprocess.run(compare).returncode or min(failed, 1))


if __name__ == "__main__":
    main()
