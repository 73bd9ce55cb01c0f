"""Wrong settings: one error that names the setting, its value and what is allowed, in time."""

import dataclasses
import json
import pathlib
import re
import subprocess
import sys
import types

import pytest
from fakes import Texts
from tiny import policy

from xrpo_jax import build, machine, train
from xrpo_jax import config as configs
from xrpo_jax.algorithms import base as algorithms
from xrpo_jax.explore.planner import Refill, Uncertainty, Uniform
from xrpo_jax.explore.seeding import Exemplars, NoSeed
from xrpo_jax.log import Compiles
from xrpo_jax.types import text_of

ROOT = pathlib.Path(__file__).parents[1]
MISSPELT = {
    "algorithm": "n_bse",
    "task": "sise",
    "text": "sistem",
    "model": "dtyp",
    "rollout": "grup",
    "optimizer": "lr",
    "train": "step",
    "eval": "sample",
    "reward": "formatt",
    "verify": "worker",
    "checkpoint": "evry",
    "mesh": "device",
    "compile": "cache",
    "profile": "step",
}


@pytest.fixture(scope="module")
def policy_folder(tmp_path_factory):
    return policy.save(tmp_path_factory.mktemp("model") / "policy")


def given(**settings):
    """The default config with `section__key=value` changed; few problems, to make them fast."""
    config = configs.default()
    config.task.size, config.eval.problems = 160, 12
    for name, value in settings.items():
        section, _, key = name.partition("__")
        if key:
            config[section][key] = value
        else:
            config[section] = value
    return config


def refused(message: str, **settings) -> None:
    with pytest.raises(ValueError, match=message):
        configs.parse(given(**settings))


# --- names ---------------------------------------------------------------------------------------


def test_defaults_are_valid_and_every_section_is_tried_here():
    settings = configs.parse(configs.default())
    assert settings.algorithm_name == "xrpo" and settings.task_name == "arithmetic"
    sections = {name for name, value in configs.default().items() if hasattr(value, "keys")}
    assert sections == set(MISSPELT)


@pytest.mark.parametrize("section, key", MISSPELT.items())
def test_a_misspelt_key_on_the_command_line_lists_the_valid_ones(section, key):
    for argument in (f"--config.{section}.{key}=1", f"--config.{section}.{key}"):
        message = configs.unknown_setting(["main", "--workdir=x", argument, "1"])
        assert message.startswith(f"{section}.{key} is no setting; allowed: ")
        listed = message.split("allowed: ")[1].split(", ")
        assert listed == sorted(configs.default()[section])


@pytest.mark.parametrize("section, key", MISSPELT.items())
def test_a_misspelt_key_in_a_config_is_an_error(section, key):
    config = configs.default()
    with pytest.raises((AttributeError, KeyError), match=key):
        config[section][key] = 1  # locked
    with config.unlocked():
        config[section][key] = 1
    with pytest.raises(ValueError, match=rf"{section}\.{key} is no setting.*; allowed: \w+"):
        configs.parse(config)


@pytest.mark.parametrize("name", ["rolout.group", "sed", "seed.x", "rollout.group.x", "algorithm."])
def test_a_misspelt_section_lists_what_there_is(name):
    message = configs.unknown_setting([f"--config.{name}=3"])
    known = configs.default()["rollout" if name.startswith("rollout") else "algorithm"]
    listed = sorted(configs.default() if name[0] == "s" or "rolo" in name else known)
    assert message == f"{name} is no setting; allowed: {', '.join(listed)}"


def test_right_names_are_no_error():
    arguments = ["--config=experiments/quickstart.py", "--workdir=x", "--config.seed=3"]
    arguments += ["--config.rollout.group=8", "--config.algorithm.name", "grpo"]
    assert configs.unknown_setting(arguments) is None


def test_unknown_algorithm_and_task():
    refused(r"algorithm.name='xpro'; allowed: cispo, .*xrpo, xrpo_token", algorithm__name="xpro")
    refused(r"task.name='suns'; allowed: arithmetic, countdown, files", task__name="suns")


@pytest.mark.parametrize(
    "name, key, value",
    [
        ("grpo", "n_base", 4),
        ("gspo", "beta", 0.1),
        ("dapo", "shots", 2),
        ("xrpo", "dual_clip", 3.0),
    ],
)
def test_a_setting_that_the_algorithm_does_not_have(name, key, value):
    listed = ", ".join(sorted(algorithms.settings(name)))
    refused(
        f"algorithm.{key} is no setting of '{name}'; allowed: {re.escape(listed)}$",
        algorithm__name=name,
        **{f"algorithm__{key}": value},
    )


@pytest.mark.parametrize("name", algorithms.names())
def test_every_setting_of_every_algorithm_is_offered_and_none_is_negative(name):
    for key, value in algorithms.settings(name).items():
        config = given(algorithm__name=name, **{f"algorithm__{key}": value})
        configs.parse(config)
        if isinstance(value, float | int) and not isinstance(value, bool):
            wrong = type(value)(-2)
            with pytest.raises(ValueError, match=rf"algorithm\.{key}={wrong}.*; allowed: "):
                configs.parse(given(algorithm__name=name, **{f"algorithm__{key}": wrong}))


def test_types_are_checked_where_they_are_set():
    with pytest.raises(TypeError):
        given(rollout__group="eight")
    with pytest.raises(TypeError):
        given(algorithm__planner="yes")


# --- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("section", [name for name in MISSPELT if name in configs.SECTIONS])
def test_no_number_of_any_section_is_negative(section):
    for key, value in dataclasses.asdict(configs.SECTIONS[section]()).items():
        if isinstance(value, float | int) and not isinstance(value, bool):
            wrong = type(value)(-1)
            refused(rf"{section}\.{key}={wrong}; allowed: ", **{f"{section}__{key}": wrong})
        if isinstance(value, float):
            refused(rf"{section}\.{key}=nan; allowed: ", **{f"{section}__{key}": float("nan")})


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"seed": -1}, "seed=-1; allowed: 0 to 4294967295"),
        ({"seed": 2**32}, "seed=4294967296; allowed: 0 to"),
        ({"rollout__temperature": 0.0}, r"temperature=0.0; allowed: 1e-9 to 1e9 \(greedy"),
        ({"rollout__temperature": 1e39}, r"rollout.temperature=1e\+39; allowed: 1e-9 to 1e9"),
        ({"eval__temperature": float("inf")}, r"eval.temperature=inf; allowed: 0 \(greedy\) or 1e"),
        ({"eval__temperature": 1e-46}, "eval.temperature=1e-46; allowed: 0"),
        ({"model__dtype": "float16"}, "model.dtype='float16'; allowed: float32, bfloat16"),
        ({"optimizer__learning_rate": 0.0}, "optimizer.learning_rate=0.0; allowed: above 0"),
        ({"optimizer__beta2": 1.0}, "optimizer.beta2=1.0; allowed: from 0 to below 1"),
        ({"eval__top_p": 1.2}, "eval.top_p=1.2; allowed: above 0, at most 1"),
        (
            {"train__micro_batch": 6},
            "train.micro_batch=6; allowed: a multiple of train.share=4",
        ),
        (
            {"checkpoint__export": "int8"},
            "checkpoint.export='int8'; allowed: float32, bfloat16, no",
        ),
        ({"train__minibatches": 129}, "train.minibatches=129; allowed: 1 to 128"),
        ({"train__async_rollouts": 2}, r"train.async_rollouts=2; allowed: 0 \(off\) or 1"),
        ({"train__importance": "row"}, "train.importance='row'; allowed: none, token, sequence"),
        ({"train__importance_cap": 0.0}, "train.importance_cap=0.0; allowed: above 0"),
        ({"rollout__group": 3}, "algorithm.n_base=1; allowed: at least 2, .*here 1"),
        ({"algorithm__n_base": 1}, "algorithm.n_base=1; allowed: at least 2"),
        ({"algorithm__n_base": 8}, "algorithm.n_base=8; allowed: less than rollout.group=8"),
        (
            {"rollout__prompts": 3, "rollout__group": 9, "algorithm__n_base": 4},
            r"budget of 15 rollouts \(rollout.prompts=3 x \(rollout.group=9 - n_base=4\)\) is not "
            "divisible by algorithm.rounds=2",
        ),
        (
            {"algorithm__planner": False, "algorithm__n_base": 5},
            "rollout.group=8 - n_base=5 is not divisible by algorithm.rounds=2",
        ),
        ({"algorithm__alpha": 1.0}, "algorithm.alpha=1.0; allowed: between 0 and 1"),
        ({"algorithm__bonus": "log"}, "algorithm.bonus='log'; allowed: sqrt, linear"),
        ({"algorithm__max_rollouts": 7}, "algorithm.max_rollouts=7; allowed: 0"),
        ({"algorithm__keep": "best"}, "algorithm.keep='best'; allowed: newest, shortest"),
        (
            {"algorithm__loss_context": "x"},
            "algorithm.loss_context='x'; allowed: generation, plain",
        ),
        ({"algorithm__novelty_average": "all"}, "novelty_average='all'; allowed: group, correct"),
        (
            {"algorithm__name": "grpo", "algorithm__kl_estimator": "k4"},
            "algorithm.kl_estimator='k4'; allowed: k1, k2, k3",
        ),
        (
            {"algorithm__name": "dapo", "algorithm__overlong_cache": 49},
            "algorithm.overlong_cache=49; allowed: 0 .* to rollout.max_new_tokens=48",
        ),
        ({"algorithm__name": "dapo", "rollout__group": 1}, "rollout.group=1; allowed: at least 2"),
        ({"task__size": 0}, "task.size=0; allowed: 1 to 20000"),
        (
            {"task__size": 15},
            r"the task has 15 prompts; a step may look at 16 \(rollout.prompts=16,",
        ),
        (
            {"task__size": 159, "algorithm__name": "dapo"},
            "the task has 159 prompts; a step may look at 160",
        ),
        ({"eval__problems": 30_000}, "eval.problems as task.size=30000; allowed: 1 to 20000"),
    ],
    ids=str,
)
def test_a_wrong_value_is_named(settings, message):
    refused(message, **settings)


def test_settings_reach_the_parts():
    settings = configs.parse(
        given(algorithm__explore=0.5, algorithm__shots=3, rollout__group=10, algorithm__n_base=4)
    )
    explore = settings.algorithm.explore
    assert explore.planner == Uncertainty(group=10, base=4, explore=0.5)
    assert explore.seeder == Exemplars(shots=3)
    off = configs.parse(given(algorithm__planner=False, algorithm__seeding=False)).algorithm.explore
    assert off.planner == Uniform(group=8, base=4) and off.seeder == NoSeed()
    dapo = configs.parse(given(algorithm__name="dapo", algorithm__max_generation_batches=3))
    assert dapo.algorithm.explore.planner == Refill(group=8, bound=3)
    assert (len(settings.task), len(settings.eval_task)) == (160, 12)


# --- settings against the model and the devices --------------------------------------------------

SMALL = {
    "task__size": 30,
    "eval__problems": 6,
    "rollout__max_new_tokens": 8,
    "rollout__prompt_length": 8,
    "rollout__seeded_length": 32,
}


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"rollout__max_new_tokens": 40},
            r"prompt \(32\) \+ rollout.max_new_tokens=40 = 72 tokens; allowed: at most the model's "
            "context of 64",
        ),
        (
            {"rollout__seeded_length": 7},
            "rollout.seeded_length=7; allowed: at least rollout.prompt_length=8",
        ),
        ({"rollout__slots": 12}, "rollout.slots=12; allowed: a multiple of the 8 devices"),
        (
            {"train__micro_batch": 16},
            "train.micro_batch / train.share=4; allowed: a multiple of the 8 devices",
        ),
        ({"mesh__devices": 9}, r"mesh.devices=9; allowed: 0 \(all\) to 8 on this host"),
        (
            {"rollout__prompt_length": 5},
            "rollout.prompt_length=5; 30 of 30 prompts are",
        ),
        (
            {"rollout__prompt_length": 5, "text__overlong": "drop"},
            "rollout.prompt_length=5; 30 of 30 .*Allowed: at least that$",
        ),
        (
            {"text__chat": "template"},
            "text.chat='template', but the tokenizer has no chat template",
        ),
        ({"text__thinking": "on"}, "text.thinking='on', but the chat template has no such switch"),
    ],
    ids=str,
)
def test_settings_must_fit_the_model_and_the_devices(policy_folder, tmp_path, settings, message):
    config = given(**{**SMALL, "init_from": str(policy_folder), **settings})
    counter = Compiles()
    with pytest.raises(ValueError, match=message):
        train.run(config, tmp_path / "run")
    counter.close()
    assert counter.count == 0
    assert not (tmp_path / "run").exists()  # a refused run leaves nothing


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"rollout__lanes": 3}, r"rollout.lanes=3; allowed: 0 \(chosen by the machine\), or what"),
        ({"train__lengths": (8,)}, r"train.lengths=\(8,\); allowed: each above 0 and below"),
    ],
    ids=str,
)
def test_settings_are_refused_before_workers_start(
    policy_folder, letters_task, monkeypatch, settings, message
):
    monkeypatch.setattr(build, "_gradings", lambda *_: pytest.fail("workers start"))
    letters = {"task__name": "letters", "init_from": str(policy_folder)}
    config = given(**SMALL | letters | settings)
    with pytest.raises(ValueError, match=message):
        build.build(configs.parse(config))


def test_a_missing_model_directory_is_named(tmp_path):
    config = given(**SMALL, init_from=str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match=r"init_from='.*nothing'; allowed: a Hugging Face dir"):
        train.run(config, tmp_path / "run")


# --- held-out prompts ----------------------------------------------------------------------------


@pytest.fixture
def same_prompts(monkeypatch):
    """A task whose evaluation asks three questions, two of which are trained on."""
    asked = {"train": ("a", "b", "c", "d"), "test": ("B ", "x", "d")}

    def make(*, split="train", size=4):
        return Texts(prompts=asked[split], answers=asked[split])

    module = types.SimpleNamespace(make=make)
    monkeypatch.setattr(configs, "task_names", lambda: ("texts",))
    monkeypatch.setitem(sys.modules, "xrpo_jax.tasks.texts", module)
    config = given(rollout__prompts=2)
    config.task.name, config.task.size = "texts", None
    return config


def test_evaluation_prompts_that_are_trained_on(same_prompts):
    message = r"2 of 3 evaluation prompts are trained on, for example 'B '; allowed: .*overlap=drop"
    with pytest.raises(ValueError, match=message):
        configs.parse(same_prompts)
    same_prompts.eval.overlap = "drop"
    left = configs.parse(same_prompts).eval_task
    assert [text_of(left.prompt(i)) for i in range(len(left))] == ["x"]
    same_prompts.eval.overlap = "allow"
    assert len(configs.parse(same_prompts).eval_task) == 3
    same_prompts.eval.overlap = "maybe"
    with pytest.raises(ValueError, match="eval.overlap='maybe'; allowed: refuse, drop, allow"):
        configs.parse(same_prompts)


# --- the working directory -----------------------------------------------------------------------


def facts(devices=1, prompts="a"):
    return {"mesh": {"devices": devices}, "prompts": {"digest": prompts}}


def claim(folder, devices=1, prompts="a", **changes):
    with configs.claim(configs.parse(given(**changes)), folder, facts(devices, prompts)):
        pass


def test_a_workdir_with_other_settings_is_refused_and_left_as_it_is(tmp_path):
    claim(tmp_path / "run", rollout__group=8, algorithm__name="gspo")
    path = tmp_path / "run" / "config.json"
    before = path.read_bytes()
    with pytest.raises(ValueError) as error:
        claim(tmp_path / "run", 2, rollout__group=16, algorithm__name="gspo", seed=2)
    for part in (
        "holds a run with other settings",
        "rollout.group (there 8, here 16)",
        "seed (there 0, here 2)",
        "mesh.devices (there 1, here 2)",
        "another --workdir",
    ):
        assert part in str(error.value)
    assert "algorithm.name" not in str(error.value)
    assert path.read_bytes() == before


def test_lanes_that_the_machine_chose_may_be_given(
    policy_folder, letters_task, tmp_path, monkeypatch
):
    def claim_on(cores, lanes=0):
        monkeypatch.setattr(machine, "cores", lambda: cores)
        letters = {"task__name": "letters", "init_from": str(policy_folder), "mesh__devices": 1}
        sizes = {"rollout__slots": 8, "rollout__lanes": lanes}
        settings = configs.parse(given(**SMALL | letters | sizes))
        with configs.claim(settings, tmp_path, build.build(settings)[0].facts):
            pass

    claim_on(2)
    claim_on(2)
    with pytest.raises(ValueError) as error:
        claim_on(4)
    said = "other settings: rollout.lanes (there 2, here 4). Go on with --config.rollout.lanes=2, "
    assert said in str(error.value)
    claim_on(4, lanes=2)
    claim_on(2)
    assert json.loads((tmp_path / "config.json").read_text())["rollout"]["lanes"] == 2


def test_a_run_whose_data_changed_is_refused(tmp_path):
    """A path says nothing of what the file holds, and the seeder remembers prompts by number."""
    claim(tmp_path)
    with pytest.raises(ValueError, match=r"prompts.digest \(there 'a', here 'b'\)"):
        claim(tmp_path, prompts="b")


def test_a_run_may_be_prolonged(tmp_path):
    claim(tmp_path, train__steps=10)
    claim(tmp_path, train__steps=20, checkpoint__keep=5, checkpoint__every=3)
    assert json.loads((tmp_path / "config.json").read_text())["train"]["steps"] == 20
    claim(tmp_path, train__steps=20, profile__steps="3:5", compile__cache_dir="no")
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", ".lock"}


def test_a_damaged_config_file_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"seed": 0, "rol')
    with pytest.raises(ValueError, match="config.json is damaged .*; choose another --workdir"):
        claim(tmp_path)


def test_a_run_that_lost_its_config_file_is_not_overwritten(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(ValueError, match="without its config.json"):
        claim(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl"}


def test_a_workdir_is_held_by_one_process(tmp_path):
    settings = configs.parse(given())
    with configs.claim(settings, tmp_path, facts()):
        with pytest.raises(ValueError, match="is in use by another process"):
            claim(tmp_path)
    claim(tmp_path)


def test_a_setting_that_is_not_set_counts_as_its_default(tmp_path):
    """What is written is what the run uses, so a default that changes later is noticed."""
    claim(tmp_path, algorithm__shots=2)
    claim(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())["algorithm"]
    assert written["shots"] == 2 and written["loss_context"] == "plain"
    assert "dual_clip" not in written  # a setting of another algorithm
    with pytest.raises(ValueError, match=r"algorithm.shots \(there 2, here 1\)"):
        claim(tmp_path, algorithm__shots=1)


def test_a_half_written_checkpoint_is_named_before_a_step(policy_folder, tmp_path, letters_task):
    config = given(**SMALL | {"task__name": "letters", "init_from": str(policy_folder)})
    (tmp_path / "checkpoints" / "5" / "default").mkdir(parents=True)
    with pytest.raises(ValueError, match="checkpoints/5 cannot be read .*; delete that directory"):
        train.run(config, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoints", "config.json", ".lock"}


def test_lost_checkpoints_do_not_lose_the_metrics(policy_folder, tmp_path, letters_task):
    config = given(**SMALL | {"task__name": "letters", "init_from": str(policy_folder)})
    settings = configs.parse(config)
    with configs.claim(settings, tmp_path, build.build(settings)[0].facts):
        (tmp_path / "metrics.jsonl").write_text('{"step": 50}\n')
    with pytest.raises(ValueError, match="checkpoints is empty, but metrics.jsonl"):
        train.run(config, tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 50}\n'


# --- the command line ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["--config=experiments/quickstart.py", "--config.rollout.grup=8"],
            "error: rollout.grup is no setting; allowed: chunk, group, lanes, max_new_tokens, "
            "prompt_length, prompts, seeded_length, slots, temperature\n",
        ),
        (
            ["--config=experiments/nothing.py"],
            "No such file or directory: 'experiments/nothing.py'",
        ),
        (
            ["--config=experiments/quickstart.py", "--config.algorithm.name=xpro"],
            "error: algorithm.name='xpro'; allowed: cispo, critique_grpo",
        ),
    ],
    ids=["key", "file", "algorithm"],
)
def test_the_command_ends_with_one_line_and_code_2(tmp_path, arguments, message):
    command = [sys.executable, "-m", "xrpo_jax.main", f"--workdir={tmp_path / 'run'}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert message in done.stderr and "Traceback" not in done.stderr
    assert done.returncode == 2 and not done.stdout
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["spo", "skpo"])
def test_a_tracker_is_on_the_scale_of_correctness(name):
    for other in ({"correctness": 2.0}, {"format": 0.5}, {"length": 1.0}):
        given_reward = {f"reward__{key}": value for key, value in other.items()}
        refused(
            f"; allowed: 1, 0 and 0 with algorithm.name='{name}'",
            algorithm__name=name,
            rollout__seeded_length=512,
            **given_reward,
        )


def test_switches_that_an_algorithm_cannot_bear():
    refused(
        "train.drop_zero_variance=True; allowed: False where a prompt has one rollout",
        algorithm__name="spo",
        train__drop_zero_variance=True,
    )
    refused(
        "train.minibatches=5; allowed: 1 to rollout.prompts=4 with algorithm.name='skpo'",
        algorithm__name="skpo",
        rollout__prompts=4,
        train__minibatches=5,
    )
