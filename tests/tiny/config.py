"""Settings of the runs that tests/test_resume.py makes: ten steps of a second and less."""

from xrpo_jax import config as settings


def get_config() -> settings.ConfigDict:
    config = settings.default()
    config.task.name = "letters"
    for name, value in {
        "train.steps": 10,
        "train.micro_batch": 8,
        "train.minibatches": 2,
        "rollout.prompts": 4,
        "rollout.group": 4,
        "rollout.slots": 8,
        "rollout.max_new_tokens": 6,
        "rollout.prompt_length": 8,
        "rollout.seeded_length": 28,
        "eval.problems": 6,
        "eval.samples": 2,
        "eval.every": 4,
        "checkpoint.every": 3,
        "optimizer.learning_rate": 0.01,
    }.items():
        section, key = name.split(".")
        config[section][key] = value
    return config
