"""Every algorithm on the quickstart's task, with one budget of decoded tokens, three seeds each.

    python experiments/sweeps/baselines.py --out=runs/baselines

A run ends after the first step at which all that its sampler decoded for training, also what an
algorithm throws away, reaches `--tokens`, or after `--steps`. Resumes as ablations.py does, and
goes on with larger budgets too. Ends with the table and the curves of scripts/compare.py. The
optimizer's settings, tuned for GRPO, are everyone's.
"""

from __future__ import annotations

import sys

import runner

from xrpo_jax.algorithms import base

# What an algorithm needs beside its name to run on this task at all; no tuning here.
OVERRIDES: runner.Variants = {
    # Its first estimates, 8 rollouts of each of 3,000 prompts, would cost more than the budget.
    # No prompt has two rows, so rows of a micro-batch would stay empty to share one.
    "spo": ["--config.algorithm.offline=0", "--config.train.share=1"],
}

VARIANTS = {
    name: [f"--config.algorithm.name={name}", *OVERRIDES.get(name, [])] for name in base.names()
}
# The embedded policy cannot read a question behind tokens of an answer (scripts/conditioning.py).
VARIANTS["skpo-text"] = [*VARIANTS["skpo"], "--config.algorithm.skip_layout=text"]


def main() -> None:
    options = runner.read_options(
        __doc__, VARIANTS, out="runs/baselines", seeds=3, steps=400, tokens=250_000
    )
    sys.exit(runner.sweep(options, VARIANTS))


if __name__ == "__main__":
    main()
