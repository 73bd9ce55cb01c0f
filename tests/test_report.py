"""What a person sees of a run: the table, samples, the time per phase, the next command."""

import dataclasses
import io
import pathlib
import types

import matplotlib.image
import pytest
from fakes import Texts, said
from tqdm import tqdm

from xrpo_jax import prompts, report
from xrpo_jax.algorithms import base
from xrpo_jax.chat import Chat
from xrpo_jax.log import Compiled


def settings(algorithm="xrpo", **more):
    """The few settings that a report reads."""
    return types.SimpleNamespace(
        algorithm_name=algorithm,
        init_from="",
        task_name="texts",
        model=types.SimpleNamespace(dtype="float32"),
        algorithm=base.make(algorithm, base.Budget(group=4, max_new_tokens=8)),
        train=types.SimpleNamespace(
            steps=4, tokens=0, minibatches=1, epochs=1, async_rollouts=0, importance="none"
        ),
        checkpoint=types.SimpleNamespace(rollouts=True),
        **more,
    )


@pytest.mark.parametrize(
    "algorithm, folder, arguments, wanted",
    [
        (
            "xrpo",
            "runs/one",
            ["--config=e.py", "--workdir=runs/one"],
            "--config=e.py --workdir=runs/one-grpo --config.algorithm.name=grpo",
        ),
        (
            "grpo",
            "runs/grpo-0",
            ["--config=e.py", "--workdir", "runs/grpo-0", "--config.algorithm.name=grpo"],
            "--config=e.py --workdir=runs/xrpo-0 --config.algorithm.name=xrpo",
        ),
        (
            "xrpo",
            "runs/x y",
            [
                "--config=e.py:a b",
                "--workdir=runs/x y",
                "--config.algorithm.shots=3",
                "--config.seed=2",
            ],
            "'--config=e.py:a b' --config.seed=2 '--workdir=runs/x y-grpo' "
            "--config.algorithm.name=grpo",
        ),
    ],
)
def test_the_next_command_is_the_same_with_another_algorithm(algorithm, folder, arguments, wanted):
    found = report.next_command(settings(algorithm), pathlib.Path(folder), arguments)
    assert found == f"python -m xrpo_jax.main {wanted}"


def test_the_next_command_of_a_run_that_no_shell_started():
    found = report.next_command(settings(), pathlib.Path("x"), ["-f", "kernel.json"])
    assert found == "bash scripts/quickstart.sh --config.algorithm.name=grpo"


def test_the_opening_says_what_was_left_out():
    @dataclasses.dataclass(frozen=True)
    class Described(Texts):
        def describe(self):
            return "train: a.jsonl: 4 rows"

    task = Described(prompts=("a", "bbb", "c", "d"))
    left = prompts.fitting(task, lambda prompt: prompt[0].content, 2, "drop")
    chat = Chat(encode=None, render=lambda prompt: "<u>" + said(prompt), opening="", templated=True)
    shown = report.opening(settings(), left, Texts(prompts=("x",)), 1234567, chat).splitlines()
    assert shown == [
        "xrpo on the embedded policy: 1,234,567 parameters, float32; task texts: 3 prompts, "
        "1 held out",
        "train: a.jsonl: 4 rows",
        "1 of 4 prompts dropped: longer than rollout.prompt_length=2 tokens",
        "first prompt, through the chat template: '<u>a'",
    ]


@pytest.mark.parametrize("name, said_so", [("tepo", True), ("reco", True), ("grpo", False)])
def test_the_opening_says_when_a_second_update_is_needed(name, said_so):
    chat = Chat(encode=None, render=said, opening="", templated=False)
    task = Texts(prompts=("x",))
    for minibatches in (1, 2):
        run = settings(name)
        run.train.minibatches = minibatches
        shown = report.opening(run, task, task, 1, chat)
        assert ("acts from the second update" in shown) == (said_so and minibatches == 1)


def test_the_opening_says_when_nothing_corrects_for_rollouts_drawn_ahead():
    chat = Chat(encode=None, render=said, opening="", templated=False)
    task = Texts(prompts=("x",))
    for drawn_ahead in (0, 1):
        for importance in ("none", "token"):
            run = settings("grpo")
            run.train.async_rollouts, run.train.importance = drawn_ahead, importance
            shown = report.opening(run, task, task, 1, chat)
            told = "policy of one update ago" in shown
            assert told == bool(drawn_ahead and importance == "none")


def sample(prompt, level, text, correct):
    return {
        "prompt": prompt, "level": level, "question": f"question {prompt}?", "text": text,
        "correct": correct, "answer": None, "length": 3, "stopped": True,
    }  # fmt: skip


def test_samples_before_and_after(tmp_path):
    """A question a level, one that is right by now where there is one; each evaluation is whole."""
    before = [sample(0, "easy", "no", False), sample(1, "easy", "huh\nwell", False)]
    after = [sample(0, "easy", "still no", False), sample(1, "easy", "yes", True)]
    after += [sample(1, "easy", "second sample", False)]
    before += [sample(2, "hard", "long " * 30, False)]
    after += [sample(2, "hard", "wrong", False)]
    report.write_samples(tmp_path, 0, [sample(9, "easy", "overwritten", True)])
    report.write_samples(tmp_path, 0, before)
    report.write_samples(tmp_path, 4, after)
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == [
        "000000.jsonl",
        "000004.jsonl",
    ]
    shown = report.samples_table(tmp_path, 0, 4).splitlines()
    assert shown[1:] == [
        "samples at step 0 and step 4 (+ right, - wrong)",
        "  question 1?",
        "    - huh well",
        "    + yes",
        "  question 2?",
        f"    - {('long ' * 30)[:59]}…",
        "    - wrong",
    ]


def evaluation(step, value):
    names = ("pass@1", "pass@1/easy", "truncated")
    record = {"step": step, "eval/length": 9.5, "eval/length_low": 9.0, "eval/length_high": 10.0}
    for name in names:
        record |= {f"eval/{name}": value, f"eval/{name}_low": value - 0.1}
        record |= {f"eval/{name}_high": value + 0.1}
    return record


def test_the_table_and_the_phases():
    lines = report.table(evaluation(0, 0.25), evaluation(4, 0.5)).splitlines()
    assert lines[0].split() == ["held-out", "step", "0", "step", "4", "95", "%", "interval"]
    assert "pass@1 25.0% 50.0% 40.0% to 60.0%" in [" ".join(line.split()) for line in lines]
    assert "tokens 9.5 9.5 9.0 to 10.0" in [" ".join(line.split()) for line in lines]
    steps = [
        {"seconds/step": 100.0, "seconds/sample": 90.0, "seconds/warm_up": 9.0},
        {
            "seconds/step": 2.0,
            "seconds/sample": 0.5,
            "seconds/update": 1.5,
            "seconds/evaluate": 9.0,
            # What other threads did meanwhile.
            "seconds/verify_hidden": 1.0,
            "seconds/sample_ahead": 1.0,
        },
        # Compiling is within a phase.
        {"seconds/step": 2.0, "seconds/sample": 0.5, "seconds/update": 1.5, "seconds/compile": 1.0},
    ]
    assert report.phases(steps) == "a step takes 2.00 s: sample 25.0%, update 75.0%"


def test_what_was_compiled_is_said(capsys):
    found = Compiled(names=("jit(b)", "jit(a)", "jit(b)"), cached=2, seconds=1.25)
    assert report.warmed_up(found, 21.3) == "compiled 3 functions in 21 s (2 from the cache)"
    assert report.warmed_up(Compiled(names=("jit(a)",)), 0.6) == "compiled 1 functions in 1 s"
    bar = tqdm(total=1, file=io.StringIO())
    report.warn_compiled(bar, 7, Compiled())
    assert capsys.readouterr().err == ""
    report.warn_compiled(bar, 7, found)
    said = capsys.readouterr().err
    assert "WARNING, step 7: compiled jit(a), jit(b) in 1.2 s, after the run's first step" in said


def test_the_curve_is_a_picture(tmp_path):
    records = [
        evaluation(0, 0.2) | {"accuracy": 0.1, "zero_variance": 0.5},
        {"step": 1, "accuracy": 0.3, "zero_variance": 0.4, "seeded": 0.0},
        evaluation(2, 0.6),
    ]
    report.draw_curve(records, tmp_path / "curve.png", "xrpo")
    height, width, _ = matplotlib.image.imread(tmp_path / "curve.png").shape
    assert (width, height) == (1200, 480)
    assert list(tmp_path.iterdir()) == [tmp_path / "curve.png"]  # nothing partial is left
