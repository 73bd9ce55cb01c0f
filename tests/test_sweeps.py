"""experiments/sweeps: which runs are left alone, go on or failed, and what a run is told."""

import argparse
import importlib
import importlib.util
import json
import os
import pathlib
import queue
import subprocess
import sys

import pytest

from xrpo_jax.algorithms import base

SWEEPS = pathlib.Path(__file__).parents[1] / "experiments" / "sweeps"


@pytest.fixture
def runner(monkeypatch):
    monkeypatch.syspath_prepend(str(SWEEPS))
    return importlib.import_module("runner")


def load(name):
    """A sweep, as `python experiments/sweeps/NAME.py` finds it."""
    spec = importlib.util.spec_from_file_location(f"sweep_{name}", SWEEPS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def step(number, total=0, evaluated=False):
    record = {"step": number, "reward": 0.5, "decoded_tokens_total": total}
    return record | ({"eval/pass@1": 0.5} if evaluated else {})


def end(number):
    return {"step": number, "eval/pass@1": 0.5}


def write(workdir, records):
    workdir.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(record) + "\n" for record in records)
    (workdir / "metrics.jsonl").write_text(text)


SPENT = [step(55, 980), step(56, 1010), end(57)]  # a budget of 1,000 tokens
BOUND = [step(0, 10, evaluated=True), step(159, 900), end(160)]


@pytest.mark.parametrize(
    "records, steps, tokens, wanted",
    [
        ([], 160, 0, False),
        (BOUND, 160, 0, True),
        (BOUND, 320, 0, False),
        (BOUND[:-1], 160, 0, False),
        ([step(160, 900, evaluated=True), step(161, 910)], 160, 0, False),  # broken off beyond
        ([step(160, 900, evaluated=True), step(170, 910), end(171)], 160, 0, True),  # went further
        (SPENT, 400, 1000, True),
        (SPENT, 400, 1010, True),
        (SPENT, 400, 500, True),
        (SPENT, 400, 1011, False),  # a larger budget goes on
        (SPENT, 400, 0, False),  # without a budget the steps count
        (SPENT[:-1], 400, 1000, False),  # killed in its last evaluation
        ([step(40, 1010, evaluated=True)], 400, 1000, False),  # the step's own evaluation
        (BOUND, 160, 1000, True),  # as far as it may
        (BOUND, 400, 1000, False),
        ([{"step": 0, "reward": 0.5}, end(160)], 400, 1000, False),  # logged no tokens
    ],
)
def test_finished(tmp_path, runner, records, steps, tokens, wanted):
    write(tmp_path, records)
    assert runner.finished(tmp_path, steps, tokens) is wanted


def test_a_folder_that_is_not_there(tmp_path, runner):
    assert not runner.finished(tmp_path / "none", 0, 1)


@pytest.fixture
def started(monkeypatch, runner):
    """The commands that were started; every run writes an end at 4 steps, `bad` ones fail."""
    commands = []

    def fake(command, **keywords):
        commands.append([str(part) for part in command])
        if "compare.py" in commands[-1][1]:
            return subprocess.CompletedProcess(command, 0)
        workdir = pathlib.Path(flag(commands[-1], "--workdir"))
        if "--config.algorithm.name=quits" not in command:
            write(workdir, [step(3, 40), end(4)])
        failed = "--config.algorithm.name=bad" in command
        return subprocess.CompletedProcess(command, 2 if failed else 0)

    monkeypatch.setattr(subprocess, "run", fake)
    return commands


def flag(command, name):
    return [part for part in command if part.startswith(name + "=")][-1].partition("=")[2]


def named(*names):
    return {name: [f"--config.algorithm.name={name}"] for name in names}


def options(tmp_path, variants, **more):
    given = {"seeds": 2, "steps": 4, "tokens": 0, "jobs": 2, "overrides": []} | more
    return argparse.Namespace(out=tmp_path, variants=list(variants), **given)


def test_a_sweep_starts_what_is_not_finished_and_compares(tmp_path, runner, started):
    write(tmp_path / "a-0", [step(3, 40), end(4)])
    write(tmp_path / "a-1", [step(1, 20)])
    variants = named("a", "b")
    assert runner.sweep(options(tmp_path, variants), variants) == 0
    *trained, compared = started
    folders = sorted(pathlib.Path(flag(command, "--workdir")).name for command in trained)
    assert folders == ["a-1", "b-0", "b-1"]
    assert compared[1:] == [str(runner.ROOT / "scripts" / "compare.py"), str(tmp_path)]
    started.clear()
    assert runner.sweep(options(tmp_path, variants), variants) == 0
    assert len(started) == 1  # the table alone
    started.clear()
    # 40 tokens were decoded: 40 are enough, 41 are not.
    enough = options(tmp_path, variants, steps=9, tokens=40)
    assert runner.sweep(enough, variants) == 0 and len(started) == 1
    runner.sweep(options(tmp_path, variants, steps=9, tokens=41), variants)
    assert len(started) == 1 + 4 + 1


def test_failed_runs_are_named_and_the_others_compared(tmp_path, runner, started, capsys):
    """One that says so, and one that ends early without saying so."""
    variants = named("good", "bad", "quits")
    assert runner.sweep(options(tmp_path, variants, seeds=1), variants) == 1
    shown = capsys.readouterr().out
    assert f"failed, see {tmp_path / 'bad-0' / 'output.txt'}" in shown
    assert f"failed, see {tmp_path / 'quits-0' / 'output.txt'}" in shown
    assert "good-0" not in shown
    assert "compare.py" in started[-1][1]


def test_what_a_run_is_told(tmp_path, runner):
    given = options(tmp_path, [], steps=7, tokens=50, overrides=["--config.rollout.group=4"])
    command = runner.command(tmp_path / "a-3", 3, ["--config.rollout.group=2"], given)
    assert command[:3] == [sys.executable, "-m", "xrpo_jax.main"]
    assert flag(command, "--workdir") == str(tmp_path / "a-3")
    assert flag(command, "--config").endswith("experiments/quickstart.py")
    assert flag(command, "--config.seed") == "3"
    assert flag(command, "--config.train.steps") == "7"
    assert flag(command, "--config.train.tokens") == "50"
    assert flag(command, "--config.rollout.group") == "4"  # the command line's after the variant's
    given.tokens = 0
    assert not any("tokens" in part for part in runner.command(tmp_path, 3, [], given))


def test_a_run_has_a_core_of_its_own(tmp_path, runner, monkeypatch):
    """A real process: where it may run, what it finds in its environment, where its output goes."""
    core = max(os.sched_getaffinity(0))
    cores = queue.Queue()
    cores.put(core)
    program = "import os; print(os.sched_getaffinity(0), os.environ['JAX_PLATFORMS'])"
    monkeypatch.setattr(runner, "command", lambda *_: [sys.executable, "-c", program])
    log = tmp_path / "a-0" / "output.txt"
    assert runner.run("a", 0, [], options(tmp_path, ["a"]), cores) == str(log)
    assert log.read_text() == f"{{{core}}} cpu\n"
    assert cores.get_nowait() == core  # given back


def test_the_ablations_command_line(runner, monkeypatch, capsys):
    ablations = load("ablations")
    asked = []
    monkeypatch.setattr(runner, "sweep", lambda found, variants: asked.append(found) or 3)
    line = ["--variants", "grpo", "xrpo", "--jobs=1", "--config.rollout.group=4"]
    monkeypatch.setattr(sys, "argv", ["ablations.py", *line])
    with pytest.raises(SystemExit) as left:
        ablations.main()
    assert left.value.code == 3
    assert vars(asked[0]) == {
        "out": pathlib.Path("runs/ablations"),
        "variants": ["grpo", "xrpo"],
        "seeds": 5,
        "steps": 160,
        "jobs": 1,
        "tokens": 0,
        "overrides": ["--config.rollout.group=4"],
    }
    monkeypatch.setattr(sys, "argv", ["ablations.py", "--tokens=5"])
    with pytest.raises(SystemExit):
        ablations.main()
    assert "--tokens=5: allowed beside the options above" in capsys.readouterr().err


def test_the_baselines_are_all_algorithms(runner, monkeypatch):
    baselines = load("baselines")
    assert tuple(baselines.VARIANTS) == (*base.names(), "skpo-text")
    assert baselines.OVERRIDES.keys() <= set(base.names())
    for name, flags in baselines.VARIANTS.items():
        assert flags[0] == f"--config.algorithm.name={name.removesuffix('-text')}"
        assert all(flag.startswith("--config.") and "=" in flag for flag in flags)
    asked = []
    monkeypatch.setattr(runner, "sweep", lambda found, variants: asked.append(found) or 0)
    monkeypatch.setattr(sys, "argv", ["baselines.py", "--tokens=5000", "--variants", "rloo"])
    with pytest.raises(SystemExit):
        baselines.main()
    found = asked[0]
    assert (found.tokens, found.steps, found.seeds, found.variants) == (5000, 400, 3, ["rloo"])
    monkeypatch.setattr(sys, "argv", ["baselines.py"])
    with pytest.raises(SystemExit):
        baselines.main()
    assert asked[1].tokens == 250_000
    assert tuple(asked[1].variants) == (*base.names(), "skpo-text")
