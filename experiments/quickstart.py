"""XRPO on the embedded policy and the `arithmetic` task.

python -m xrpo_jax.main --config=experiments/quickstart.py --workdir=runs/quickstart
"""

from xrpo_jax import config as settings


def get_config(mode: str = "") -> settings.ConfigDict:
    """The quickstart; `:debug` is a mode of under a minute."""
    config = settings.default()
    config.rollout.prompt_length = 16
    config.rollout.seeded_length = 72
    config.rollout.max_new_tokens = 24
    config.train.micro_batch = 16
    config.rollout.slots = 32
    config.train.lengths = (24,)
    if mode == "debug":
        config.train.steps = 4
        config.rollout.prompts = 4
        config.rollout.slots = 16
        config.train.micro_batch = 16
        config.eval.problems = 12
        config.eval.samples = 2
        config.eval.every = 2
        config.checkpoint.every = 2
    elif mode:
        raise ValueError(f"mode {mode!r}; allowed: debug, or none")
    return config
