"""Settings: declared once as records, offered as a ConfigDict, read back and checked here.

Config keys die at this border: nothing else imports ml_collections.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import importlib
import inspect
import json
import math
import pathlib
import pkgutil
from collections.abc import Callable, Iterator

from ml_collections import ConfigDict, config_dict

import xrpo_jax.tasks
from xrpo_jax.algorithms import base as algorithms
from xrpo_jax.algorithms.base import Algorithm, Budget
from xrpo_jax.chat import TextSettings
from xrpo_jax.explore.reward import RewardSettings, weighted
from xrpo_jax.learn.importance import LEVELS, Truncated
from xrpo_jax.learn.optimizer import OptimizerSettings
from xrpo_jax.log import write_whole
from xrpo_jax.model.packed import REMAT
from xrpo_jax.profile import steps_of
from xrpo_jax.prompts import overlap, without
from xrpo_jax.sampling import COLDEST, HOTTEST, RANGE, Method
from xrpo_jax.types import Task, text_of

DTYPES = ("float32", "bfloat16")
OVERLAPS = ("refuse", "drop", "allow")
EMBEDDED = pathlib.Path(__file__).parent / "assets" / "policy"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """How the policy computes."""

    dtype: str = "float32"
    remat: str = "none"  # what the backward pass makes again: "none", or each "layer"
    logits_tile: int = 4096  # entries of the vocabulary whose logits the trainer holds at one time


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
    lanes: int = 0  # parts of the slots that run side by side; 0 = chosen by the machine
    chunk: int = 8  # steps of decoding between two looks at which rows have ended


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    """Steps and how a step's batch is cut into updates."""

    steps: int = 100
    tokens: int = 0  # the run ends sooner once it has decoded so many for rollouts; 0 = never
    minibatches: int = 1
    epochs: int = 1
    micro_batch: int = 32  # longest completions over all devices; of shorter ones as many more
    micro_tokens: int = 0  # over all devices, prompts too; 0 = what so many completions can have
    share: int = 4  # completions that are computed with one copy of their prompt
    lengths: tuple[int, ...] = ()  # completion widths for short ones, beside the token limit
    mask_truncated: bool = False  # rows cut off by the token limit are not trained on
    drop_zero_variance: bool = False  # rows of groups with equal rewards leave the denominator
    async_rollouts: int = 0  # 1: a step's rollouts are drawn during the update before it, by the
    # policy from before that
    importance: str = "none"  # correct the loss for who sampled, by "token" or by "sequence"
    importance_cap: float = 2.0  # above which importance weights are truncated


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eval:
    """Held-out evaluation."""

    every: int = 10  # steps; also before the first and after the last
    problems: int = 96
    samples: int = 4
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    overlap: str = "refuse"  # prompts that are trained on, too: refuse the run, drop, or allow


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifySettings:
    """The worker processes that grade; not used by tasks whose own verifier is bounded."""

    workers: int = 0  # 0 = as many as cores, at most 8
    deadline: float = 0.0  # seconds for one completion; 0 = the task's own, or else 10
    memory_mb: int = 4096  # address space of a worker
    alarm: float = 0.05  # share of rollouts whose verifier failed, above which the run warns


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When the state is written, and how many are retained."""

    every: int = 20
    keep: int = 2
    rollouts: bool = True  # write rollouts.jsonl.gz
    export: str = "float32"  # dtype of the model written to <workdir>/policy at the end, or "no"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshSettings:
    """Devices of the `data` axis (0 = all); `cpu_devices` splits the CPU (0 = leaves it whole)."""

    devices: int = 0
    cpu_devices: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileSettings:
    """Where compiled functions are kept for the next run."""

    # "auto" = JAX_COMPILATION_CACHE_DIR, or ~/.cache/xrpo_jax/jax; "no" = nowhere
    cache_dir: str = "auto"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileSettings:
    """Steps whose trace is written to <workdir>/profile."""

    steps: str = ""  # "3:5" = steps 3 and 4; "" = none


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """A whole run, checked."""

    seed: int
    init_from: str  # a Hub id, a Hugging Face directory, a GGUF file, or "" for the embedded policy
    text: TextSettings
    model: Model
    rollout: RolloutSettings
    optimizer: OptimizerSettings
    train: Train
    eval: Eval
    reward: RewardSettings
    verify: VerifySettings
    checkpoint: Checkpoint
    mesh: MeshSettings
    compile: CompileSettings
    profile: ProfileSettings
    algorithm_name: str
    algorithm: Algorithm
    task_name: str
    task: Task
    eval_task: Task
    resolved: dict  # every setting by section, for config.json


SECTIONS = {
    "text": TextSettings,
    "model": Model,
    "rollout": RolloutSettings,
    "optimizer": OptimizerSettings,
    "train": Train,
    "eval": Eval,
    "reward": RewardSettings,
    "verify": VerifySettings,
    "checkpoint": Checkpoint,
    "mesh": MeshSettings,
    "compile": CompileSettings,
    "profile": ProfileSettings,
}


def default() -> ConfigDict:
    """Every setting at its default; those of algorithm and task that are None keep their own."""
    config = ConfigDict({"seed": 0, "init_from": ""})
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

    def build(**more) -> Task:
        try:
            return module.make(**(given | more))
        except ValueError as error:
            given_size = "size" in more and str(error).startswith("size=")
            where = "eval.problems as task" if given_size else "task"
            raise ValueError(f"{where}.{error}") from None

    return build


def parse(config: ConfigDict) -> Settings:
    """The checked settings of `config`; ValueError names setting, value and what is allowed."""
    sections = {}
    for name, section in SECTIONS.items():
        known = {field.name for field in dataclasses.fields(section)}
        for key in config[name]:
            if key not in known:
                raise ValueError(f"{name}.{key} is no setting; allowed: {', '.join(sorted(known))}")
        sections[name] = section(**config[name])
    if not 0 <= config.seed < 2**32:  # JAX would drop higher bits, NumPy refuses a sign
        raise ValueError(f"seed={config.seed}; allowed: 0 to {2**32 - 1}")
    _check_numbers(sections)
    rollout, train = sections["rollout"], sections["train"]
    budget = Budget(group=rollout.group, max_new_tokens=rollout.max_new_tokens)
    algorithm = algorithms.make(config.algorithm.name, budget, **_given(config.algorithm))
    algorithm.explore.planner.check(rollout.prompts)
    if algorithm.learn.whole_groups and train.minibatches > rollout.prompts:
        raise ValueError(
            f"train.minibatches={train.minibatches}; allowed: 1 to rollout.prompts="
            f"{rollout.prompts} with algorithm.name={config.algorithm.name!r}, whose minibatches "
            "hold whole prompts"
        )
    _check_tracked(algorithm, config.algorithm.name, sections["reward"])
    algorithm = algorithms.keeping(
        algorithm, stopped=train.mask_truncated, mixed=train.drop_zero_variance
    )
    if train.importance != "none":
        weight = Truncated(level=train.importance, cap=train.importance_cap)
        learn = dataclasses.replace(algorithm.learn, importance=weight)
        algorithm = dataclasses.replace(algorithm, learn=learn)
    terms = weighted(algorithm.explore.rewards, sections["reward"], rollout.max_new_tokens)
    explore = dataclasses.replace(algorithm.explore, rewards=terms)
    algorithm = dataclasses.replace(algorithm, explore=explore)
    make = _make_task(config.task.name, _given(config.task))
    task = make(split="train")
    check_enough(task, algorithm, rollout.prompts)
    held_out = _held_out(task, make(split="test", size=sections["eval"].problems), sections["eval"])
    resolved = {
        "seed": config.seed,
        "init_from": config.init_from,
        "algorithm": {
            "name": config.algorithm.name,
            **algorithms.settings(config.algorithm.name),
            **_given(config.algorithm),
        },
        "task": {
            "name": config.task.name,
            **task_settings(config.task.name),
            **_given(config.task),
        },
        **{name: dataclasses.asdict(section) for name, section in sections.items()},
    }
    return Settings(
        **sections,
        resolved=json.loads(json.dumps(resolved)),
        seed=config.seed,
        init_from=config.init_from,
        algorithm_name=config.algorithm.name,
        algorithm=algorithm,
        task_name=config.task.name,
        task=task,
        eval_task=held_out,
    )


def _check_tracked(algorithm: Algorithm, name: str, reward: RewardSettings) -> None:
    """A tracker foretells correctness alone, so a reward of other terms would be off its scale."""
    if getattr(algorithm.explore.values, "foretells", False) and (
        reward.correctness != 1 or reward.format or reward.length
    ):
        raise ValueError(
            f"reward.correctness={reward.correctness}, reward.format={reward.format}, "
            f"reward.length={reward.length}; allowed: 1, 0 and 0 with "
            f"algorithm.name={name!r}, whose tracker foretells correctness"
        )


def check_enough(task: Task, algorithm: Algorithm, prompts: int) -> None:
    """Raise ValueError when the task has fewer prompts than a step may look at."""
    slots = algorithm.explore.planner.slots(prompts)
    if len(task) < slots:
        raise ValueError(
            f"the task has {len(task)} prompts; a step may look at {slots} "
            f"(rollout.prompts={prompts}, for some algorithms times rollout.group); allowed: no "
            "more than there are"
        )


def _held_out(task: Task, held_out: Task, settings: Eval) -> Task:
    """The evaluation's task, checked for prompts that are trained on."""
    if settings.overlap == "allow":
        return held_out
    shared = overlap(task, held_out)
    if len(shared) and (settings.overlap == "refuse" or len(shared) == len(held_out)):
        drop = "" if len(shared) == len(held_out) else "eval.overlap=drop to leave them out, "
        raise ValueError(
            f"{len(shared)} of {len(held_out)} evaluation prompts are trained on, for example "
            f"{text_of(held_out.prompt(int(shared[0])))[:80]!r}; allowed: other data, {drop}"
            "or eval.overlap=allow"
        )
    return without(held_out, shared, "trained on, too")


NUMBERS = {  # what is allowed, as text and as a test that NaN fails, and for which settings
    "at least 1": (
        lambda value: value >= 1,
        "model.logits_tile rollout.prompts rollout.group rollout.max_new_tokens "
        "rollout.prompt_length rollout.seeded_length rollout.slots rollout.chunk train.steps "
        "train.minibatches train.epochs train.micro_batch train.share eval.every eval.problems "
        "eval.samples checkpoint.every checkpoint.keep verify.memory_mb",
    ),
    "above 0": (
        lambda value: 0 < value < math.inf,
        "optimizer.learning_rate optimizer.clip_norm train.importance_cap",
    ),
    f"{RANGE} (greedy rollouts are all alike; eval.temperature may be 0)": (
        lambda value: COLDEST <= value <= HOTTEST,
        "rollout.temperature",
    ),
    "0 or more": (
        lambda value: 0 <= value < math.inf,
        "train.tokens train.micro_tokens rollout.lanes optimizer.warmup optimizer.weight_decay "
        "mesh.devices mesh.cpu_devices reward.correctness reward.format reward.length "
        "verify.workers verify.deadline",
    ),
    "from 0 to below 1": (lambda value: 0 <= value < 1, "optimizer.beta1 optimizer.beta2"),
    "from 0 to 1": (lambda value: 0 <= value <= 1, "verify.alarm"),
    "0 (off) or 1": (lambda value: value in (0, 1), "train.async_rollouts"),
}


def _check_numbers(sections: dict) -> None:
    for allowed, (good, names) in NUMBERS.items():
        for name in names.split():
            section, key = name.split(".")
            value = getattr(sections[section], key)
            if not good(value):
                raise ValueError(f"{name}={value}; allowed: {allowed}")
    rollout, held_out = sections["rollout"], sections["eval"]
    for name, value, words in (
        ("model.dtype", sections["model"].dtype, DTYPES),
        ("model.remat", sections["model"].remat, REMAT),
        ("checkpoint.export", sections["checkpoint"].export, (*DTYPES, "no")),
        ("eval.overlap", held_out.overlap, OVERLAPS),
        ("train.importance", sections["train"].importance, LEVELS),
    ):
        if value not in words:
            raise ValueError(f"{name}={value!r}; allowed: {', '.join(words)}")
    try:
        Method(temperature=held_out.temperature, top_k=held_out.top_k, top_p=held_out.top_p)
    except ValueError as error:
        raise ValueError(f"eval.{error}") from None
    train = sections["train"]
    try:
        traced = steps_of(sections["profile"].steps)
    except ValueError as error:
        raise ValueError(f"profile.{error}") from None
    if traced and traced.start >= train.steps:
        raise ValueError(
            f"profile.steps={sections['profile'].steps!r}; allowed: steps below "
            f"train.steps={train.steps}"
        )
    if train.micro_batch % train.share:
        raise ValueError(
            f"train.micro_batch={train.micro_batch}; allowed: a multiple of "
            f"train.share={train.share}"
        )
    rows = rollout.prompts * rollout.group
    if train.minibatches > rows:
        raise ValueError(
            f"train.minibatches={train.minibatches}; allowed: 1 to {rows} "
            "(rollout.prompts x rollout.group)"
        )


# What may differ on resume, since no step computes anything else for it.
MAY_CHANGE = (
    "train.steps",
    "train.tokens",
    "checkpoint.every",
    "checkpoint.keep",
    "checkpoint.rollouts",
    "checkpoint.export",
    "verify.workers",
    "verify.alarm",
    "compile.cache_dir",
    "profile.steps",
)


# What 0 leaves to the machine; the number that a run was given stands in its config.json.
CHOSEN_BY_MACHINE = ("rollout.lanes", "mesh.devices")


@contextlib.contextmanager
def claim(settings: Settings, workdir: pathlib.Path, facts: dict) -> Iterator[None]:
    """Hold `workdir` for this process and these settings, which are written to its config.json.

    `facts` are what the settings led to here, by section, such as the number of devices: they stand
    in the place of what was set, and must be the same on resume, too. Raises ValueError naming the
    settings that differ from those there (defaults are filled in, so one that changed between
    versions differs too), or when another process holds it.
    """
    path = workdir / "config.json"
    resolved = settings.resolved | facts
    mine = flatten(resolved)
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
        give = [
            f"--config.{key}={theirs[key]}"
            for key in CHOSEN_BY_MACHINE
            if mine.get(key) != theirs.get(key, mine.get(key))
        ]
        if differ:
            go_on = f"Go on with {' '.join(give)}, choose" if give else "Choose"
            raise ValueError(
                f"--workdir={workdir} holds a run with other settings: {'; '.join(differ)}. "
                f"{go_on} another --workdir, or delete that one"
            )
    elif (workdir / "metrics.jsonl").exists():
        raise ValueError(
            f"--workdir={workdir} holds a run without its config.json, which would be overwritten; "
            "choose another --workdir, or delete that one"
        )
    workdir.mkdir(parents=True, exist_ok=True)
    with open(workdir / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"--workdir={workdir} is in use by another process; wait for it, or choose another"
            ) from None
        write_whole(path, (json.dumps(resolved, indent=2) + "\n").encode())
        yield


def unknown_setting(argv: list[str], flag: str = "--config.") -> str | None:
    """What is wrong with the first `--config.section.key` of a command line that does not exist."""
    for argument in argv:
        argument = f"--{argument.lstrip('-')}" if argument.startswith("-") else argument
        if argument.startswith(flag):
            name = argument.removeprefix(flag).partition("=")[0]
            section, found = None, default()
            for part in name.split("."):
                section = found if isinstance(found, ConfigDict) else section
                if found is not section or part not in section:
                    return f"{name} is no setting; allowed: {', '.join(sorted(section))}"
                found = section[part]
    return None


def flatten(tree: dict, prefix: str = "") -> dict[str, object]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`."""
    flat = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
