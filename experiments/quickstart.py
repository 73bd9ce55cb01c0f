"""XRPO on the embedded policy and the `arithmetic` task, on two CPU cores in a few minutes.

    python -m xrpo_jax.main --config=experiments/quickstart.py --workdir=runs/quickstart

Held-out pass@1 rises from about 42 % to between 91 and 98 %, on the hard third from about 1 % to
between 79 and 97 %, by seed. `--config=experiments/quickstart.py:debug` is a run of under a minute.
"""

from xrpo_jax import config as settings


def get_config(mode: str = "") -> settings.ConfigDict:
    """The quickstart's settings; the optimizer's were tuned for GRPO."""
    config = settings.default()
    # The task's prompts have at most 10 tokens, right answers at most 17, two exemplars 54.
    config.rollout.prompt_length = 16
    config.rollout.seeded_length = 72
    config.rollout.max_new_tokens = 24
    config.train.lengths = (12,)
    # Measured: .25 s of sampling a step, .29 with chunks of 8; 128 slots are no faster than 32.
    config.rollout.slots = 32
    config.rollout.chunk = 6
    config.train.micro_batch = 16
    config.train.steps = 160
    config.eval.every = 20
    config.optimizer.learning_rate = 3e-4  # with two minibatches GRPO's best, experiments/README.md
    config.train.minibatches = 2
    if mode == "debug":
        config.train.steps = 4
        config.rollout.prompts = 4
        config.rollout.slots = 16
        config.eval.problems = 12
        config.eval.samples = 2
        config.eval.every = 2
        config.checkpoint.every = 2
    elif mode:
        raise ValueError(f"mode {mode!r}; allowed: debug, or none")
    return config
