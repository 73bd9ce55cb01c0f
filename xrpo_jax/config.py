"""Settings: declared once as records, offered as a ConfigDict, read back and checked here.

Config keys die at this border: nothing else imports ml_collections.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import pathlib
import pkgutil
from collections.abc import Callable

from ml_collections import ConfigDict, config_dict

import xrpo_jax.tasks
from xrpo_jax.algorithms import base as algorithms
from xrpo_jax.algorithms.base import Algorithm, Budget
from xrpo_jax.learn.update import OptimizerSettings
from xrpo_jax.types import Task

DTYPES = ("float32", "bfloat16")
EMBEDDED = pathlib.Path(__file__).parent / "assets" / "policy"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """The policy: a Hugging Face directory ("" = the embedded one) and how it computes."""

    init_from: str = ""
    dtype: str = "float32"
    remat: bool = False
    logits_chunk: int = 128  # positions whose logits the trainer holds at one time


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """What a step samples; lengths are in tokens."""

    prompts: int = 16
    group: int = 8  # rollouts per prompt, on average over the prompts of a step
    max_new_tokens: int = 48
    prompt_length: int = 32  # of a plain prompt
    seeded_length: int = 160  # of a prompt with exemplars; unused without a seeder
    temperature: float = 1.0
    slots: int = 64  # rows decoded at one time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    """Steps and how a step's batch is cut into updates."""

    steps: int = 100
    minibatches: int = 1
    epochs: int = 1
    micro_batch: int = 32  # rows over all devices
    lengths: tuple[int, ...] = ()  # tokens that short rows are padded to, beside the longest
    mask_truncated: bool = False  # rows cut off by the token limit are not trained on
    drop_zero_variance: bool = False  # rows of groups with equal rewards leave the denominator


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eval:
    """Held-out evaluation."""

    every: int = 10  # steps; also before the first and after the last
    problems: int = 96
    samples: int = 4
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When the state is written, and how many are retained."""

    every: int = 20
    keep: int = 2
    rollouts: bool = True  # write rollouts.jsonl.gz


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshSettings:
    """Devices of the `data` axis (0 = all); `cpu_devices` splits the CPU (0 = leaves it whole)."""

    devices: int = 0
    cpu_devices: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """A whole run, checked."""

    seed: int
    model: Model
    rollout: RolloutSettings
    optimizer: OptimizerSettings
    train: Train
    eval: Eval
    checkpoint: Checkpoint
    mesh: MeshSettings
    algorithm_name: str
    algorithm: Algorithm
    task_name: str
    task: Task
    eval_task: Task


SECTIONS = {
    "model": Model,
    "rollout": RolloutSettings,
    "optimizer": OptimizerSettings,
    "train": Train,
    "eval": Eval,
    "checkpoint": Checkpoint,
    "mesh": MeshSettings,
}


def default() -> ConfigDict:
    """Every setting at its default; those of algorithm and task that are None keep their own."""
    config = ConfigDict({"seed": 0})
    config.algorithm = _choice("xrpo", [algorithms.settings(name) for name in algorithms.names()])
    config.task = _choice("arithmetic", [task_settings(name) for name in task_names()])
    for name, section in SECTIONS.items():
        config[name] = ConfigDict(dataclasses.asdict(section()))
    config.lock()
    return config


def _choice(name: str, alternatives: list[dict[str, object]]) -> ConfigDict:
    """A section `name` with a placeholder for every setting of every alternative."""
    section = ConfigDict({"name": name})
    for settings in alternatives:
        for key, value in settings.items():
            section[key] = config_dict.placeholder(type(value))
    return section


def task_names() -> tuple[str, ...]:
    """The tasks there are, by file name."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(xrpo_jax.tasks.__path__)))


def task_settings(name: str) -> dict[str, object]:
    """The settings of a task with their defaults; ValueError on an unknown name."""
    if name not in task_names():
        raise ValueError(f"task.name={name!r}; allowed: {', '.join(task_names())}")
    parameters = inspect.signature(importlib.import_module(f"xrpo_jax.tasks.{name}").make)
    return {
        key: parameter.default for key, parameter in parameters.parameters.items() if key != "split"
    }


def _given(section: ConfigDict) -> dict[str, object]:
    return {key: value for key, value in section.items() if key != "name" and value is not None}


def _make_task(name: str, given: dict[str, object]) -> Callable[..., Task]:
    known = task_settings(name)
    for key in given:
        if key not in known:
            raise ValueError(f"task.{key} is no setting of {name!r}; allowed: {', '.join(known)}")
    module = importlib.import_module(f"xrpo_jax.tasks.{name}")
    return lambda **more: module.make(**(given | more))


def parse(config: ConfigDict) -> Settings:
    """The checked settings of `config`; ValueError names setting, value and what is allowed."""
    sections = {}
    for name, section in SECTIONS.items():
        known = {field.name for field in dataclasses.fields(section)}
        for key in config[name]:
            if key not in known:
                raise ValueError(f"{name}.{key} is no setting; allowed: {', '.join(sorted(known))}")
        sections[name] = section(**config[name])
    _check_numbers(sections)
    rollout, train = sections["rollout"], sections["train"]
    budget = Budget(group=rollout.group, max_new_tokens=rollout.max_new_tokens)
    algorithm = algorithms.make(config.algorithm.name, budget, **_given(config.algorithm))
    algorithm.explore.planner.check(rollout.prompts)
    algorithm = algorithms.keeping(
        algorithm, stopped=train.mask_truncated, mixed=train.drop_zero_variance
    )
    make = _make_task(config.task.name, _given(config.task))
    task = make(split="train")
    slots = algorithm.explore.planner.slots(rollout.prompts)
    if len(task) < slots:
        raise ValueError(
            f"the task has {len(task)} prompts; a step of {config.algorithm.name!r} may look at "
            f"{slots} (rollout.prompts={rollout.prompts})"
        )
    return Settings(
        **sections,
        seed=config.seed,
        algorithm_name=config.algorithm.name,
        algorithm=algorithm,
        task_name=config.task.name,
        task=task,
        eval_task=make(split="test", size=sections["eval"].problems),
    )


AT_LEAST_ONE = {
    "model": ("logits_chunk",),
    "rollout": ("prompts", "group", "max_new_tokens", "prompt_length", "seeded_length", "slots"),
    "train": ("steps", "minibatches", "epochs", "micro_batch"),
    "eval": ("every", "problems", "samples"),
    "checkpoint": ("every", "keep"),
}


def _check_numbers(sections: dict) -> None:
    for section, names in AT_LEAST_ONE.items():
        for name in names:
            value = getattr(sections[section], name)
            if value < 1:
                raise ValueError(f"{section}.{name}={value}; allowed: at least 1")
    rollout, model, optimizer = sections["rollout"], sections["model"], sections["optimizer"]
    if rollout.temperature <= 0:
        raise ValueError(
            f"rollout.temperature={rollout.temperature}; allowed: above 0 (greedy rollouts of a "
            "prompt are all alike; eval.temperature may be 0)"
        )
    if model.dtype not in DTYPES:
        raise ValueError(f"model.dtype={model.dtype!r}; allowed: {', '.join(DTYPES)}")
    if optimizer.learning_rate <= 0 or optimizer.clip_norm <= 0 or optimizer.warmup < 0:
        raise ValueError(
            f"optimizer.learning_rate={optimizer.learning_rate}, "
            f"optimizer.clip_norm={optimizer.clip_norm}, optimizer.warmup={optimizer.warmup}; "
            "allowed: rate and norm above 0, warm-up at least 0"
        )
    rows = rollout.prompts * rollout.group
    if sections["train"].minibatches > rows:
        raise ValueError(
            f"train.minibatches={sections['train'].minibatches}; allowed: 1 to {rows} "
            "(rollout.prompts x rollout.group)"
        )


MAY_CHANGE = ("train.steps", "checkpoint.keep")  # without changing what any step computes


def claim(config: ConfigDict, workdir: pathlib.Path) -> None:
    """Write `workdir/config.json`, or check that it holds these settings.

    Raises ValueError naming the settings that differ.
    """
    path = workdir / "config.json"
    mine = flatten(json.loads(config.to_json_best_effort()))
    if path.exists():
        try:
            theirs = flatten(json.loads(path.read_text()))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is damaged ({error}); choose another --workdir") from error
        differ = [
            f"{key} (there {theirs.get(key)!r}, here {mine.get(key)!r})"
            for key in sorted(mine.keys() | theirs.keys())
            if mine.get(key) != theirs.get(key) and key not in MAY_CHANGE
        ]
        if differ:
            raise ValueError(
                f"--workdir={workdir} holds a run with other settings: {'; '.join(differ)}. "
                "Choose another --workdir, or delete that one"
            )
    workdir.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(json.loads(config.to_json_best_effort()), indent=2) + "\n")
    partial.replace(path)


def flatten(tree: dict, prefix: str = "") -> dict[str, object]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`."""
    flat = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
