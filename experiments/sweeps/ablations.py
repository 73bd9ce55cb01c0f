"""XRPO, its ablations, GRPO and GSPO on the quickstart's task, several seeds each.

    python experiments/sweeps/ablations.py --out=runs/ablations

Every run is a process with one core of its own, `--jobs` at a time; finished runs are left alone
and a broken-off one goes on, so the same command resumes the sweep. Ends with the table and the
curves of scripts/compare.py. All runs have the same rollout budget a step and the same optimizer
settings, which were tuned for GRPO.
"""

from __future__ import annotations

import sys

import runner

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


def main() -> None:
    options = runner.read_options(__doc__, VARIANTS, out="runs/ablations", seeds=5, steps=160)
    sys.exit(runner.sweep(options, VARIANTS))


if __name__ == "__main__":
    main()
