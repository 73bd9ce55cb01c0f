"""A run whose completions are graded in worker processes: what is logged, learned and said."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys

import numpy as np
import pytest
from fakes import CORRECT, WRONG, graded
from tiny import config as tiny
from tiny import policy
from tqdm import tqdm

from xrpo_jax import report, train
from xrpo_jax.build import _gradings
from xrpo_jax.config import VerifySettings, parse
from xrpo_jax.explore.reward import Correctness, Format, Overlong, reward_of
from xrpo_jax.log import read_metrics, read_rollouts
from xrpo_jax.prompts import without
from xrpo_jax.tasks import arithmetic
from xrpo_jax.types import VERDICT_STATUSES, Verdict, question


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hanging:
    """A task whose verifier hangs, crashes or answers, by the completion."""

    levels: tuple[str, ...] = ("only",)
    deadline: float = 0.5

    def __len__(self):
        return 1

    def prompt(self, i):
        return question("q")

    def level(self, i):
        return "only"

    def answer(self, i, completion):
        return completion

    def rewards(self, i, completion):
        while completion == "hang":
            pass
        if completion == "crash":
            raise RuntimeError("scorer")
        return CORRECT if completion == "right" else WRONG


def test_a_task_that_hangs_is_graded_in_workers():
    pool, (grading, held_out) = _gradings((Hanging(), Hanging()), VerifySettings(workers=2))
    with pool, grading() as one, held_out() as other:
        for text in ("right", "hang", "wrong", "crash", "right"):
            one.add(0, text)
        other.add(0, "right")
        found = one.verdicts()
        statuses = [verdict.status for verdict in found]
        assert statuses == ["correct", "timed_out", "wrong", "crashed", "correct"]
        assert "0.5 s" in found[1].reason and "scorer" in found[3].reason
        assert other.verdicts() == [CORRECT]


def test_a_bounded_task_is_graded_here():
    task = arithmetic.make(size=3)
    pool, gradings = _gradings((task, without(task, np.array([0]), "why")), VerifySettings())
    assert pool is None
    for made in gradings:
        with made() as grading:
            grading.add(0, "")
            assert [verdict.status for verdict in grading.verdicts()] == ["unparsed"]
            assert grading.hidden == 0


# --- reward terms --------------------------------------------------------------------------------


def test_terms_are_weighted_and_kept_apart():
    terms = (Correctness(weight=2.0), Format(style="boxed", weight=0.5), Overlong(cache=4))
    right = graded(CORRECT, tokens=8, text=r"so \boxed{4}")
    reward, values = reward_of(terms, right)
    assert values == {"correctness": 1.0, "format": 1.0, "length": -0.5}
    assert reward == pytest.approx(2.0 + 0.5 - 0.5)
    reward, values = reward_of(terms, graded(WRONG, tokens=2, text=r"so \boxed{4"))
    assert reward == 0.0 and values == {"correctness": 0.0, "format": 0.0, "length": 0.0}
    failed = Verdict(status="timed_out", score=0.0)
    reward, values = reward_of(terms, graded(failed, text=r"\boxed{4}"))
    assert np.isnan(reward) and values == {}


@pytest.mark.parametrize(
    ("style", "text", "good"),
    [
        ("boxed", r"<think>\boxed{3}</think> \boxed{4}", 1), ("boxed", r"<think>\boxed{3}", 0),
        ("boxed", r"\boxed{}", 0), ("answer", "x <answer>4</answer>", 1), ("answer", "4", 0),
        ("think_answer", "<think>a</think><answer>4</answer>", 1),
        ("think_answer", "a</think><answer>4</answer>", 0),
    ],
)  # fmt: skip
def test_formats(style, text, good):
    assert Format(style=style)(graded(text=text)) == good


def config(folder, **settings):
    made = tiny.get_config()
    path = folder / "model"
    made.init_from = str(path if path.exists() else policy.save(path, MODEL))
    rows = [{"problem": f"{a}{b}:", "answer": a} for a in "abcdefgh" for b in "ijklmnop"]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made.task.name, made.task.path = "files", str(folder / "a.jsonl")
    made.task.instruction, made.mesh.devices = "", 1
    for name, value in settings.items():
        section, key = name.split("__")
        made[section][key] = value
    return made


MODEL = dataclasses.replace(policy.MODEL, num_layers=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reward__format": -1.0}, "reward.format=-1.0; allowed: 0 or more"),
        ({"reward__format_style": "xml"}, "format_style='xml'; allowed: boxed, answer"),
        (
            {"reward__length_cache": 7},
            r"length_cache=7; allowed: 0 \(a fifth\) to",
        ),
        ({"reward__correctness": 0.0}, "not all of them 0"),
        ({"reward__length": 1.0, "algorithm__name": "dapo"}, "reward.length=1.0; allowed: 0"),
        ({"verify__alarm": 1.5}, "verify.alarm=1.5; allowed: from 0 to 1"),
        ({"verify__deadline": -1.0}, "verify.deadline=-1.0; allowed: 0 or more"),
        ({"verify__memory_mb": 0}, "verify.memory_mb=0; allowed: at least 1"),
        ({"task__tolerance": 2.0}, "task.tolerance=2.0; allowed"),
    ],
)
def test_wrong_settings_are_refused(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        parse(config(tmp_path, **settings))


# --- whole runs ----------------------------------------------------------------------------------


def test_a_run_logs_verdicts_and_terms(tmp_path, capsys):
    made = config(
        tmp_path, train__steps=2, checkpoint__export="no", reward__format=0.5, reward__length=0.25,
        reward__length_cache=2, verify__workers=1, algorithm__name="grpo",
    )  # fmt: skip
    train.run(made, str(tmp_path / "run"))
    steps = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if "rollouts" in r]
    assert len(steps) == 2
    for record in steps:
        counts = {status: record[f"verdicts/{status}"] for status in VERDICT_STATUSES}
        assert sum(counts.values()) == record["rollouts"] == 16
        assert counts["timed_out"] == counts["crashed"] == 0
        total = record["reward/correctness"] + 0.5 * record["reward/format"]
        assert record["reward"] == pytest.approx(total + 0.25 * record["reward/length"])
        assert record["accuracy"] == record["reward/correctness"]
    assert min(record["reward/length"] for record in steps) < 0
    row = next(iter(read_rollouts(tmp_path / "run" / "rollouts.jsonl.gz")))
    assert set(row["terms"]) == {"correctness", "format", "length"}
    assert "WARNING" not in capsys.readouterr().err


def test_a_share_of_failed_verifiers_warns_loudly(capsys):
    bar = tqdm(total=1, file=io.StringIO())
    fine = [("correct", ""), ("wrong", "no")] * 10
    report.warn_failed(bar, "step 3", [*fine, ("timed_out", "not done within 10 s")], 0.05)
    assert capsys.readouterr().err == ""  # 1 of 21 is not above
    bad = [("timed_out", "not done within 10 s"), ("crashed", "boom"), *fine]
    report.warn_failed(bar, "step 3", bad, 0.05)
    said = capsys.readouterr().err
    assert "WARNING, step 3: the verifier failed on 2 of 22" in said
    assert "1 timed_out, 1 crashed" in said and "not done within 10 s" in said
    report.warn_failed(bar, "step 3", bad, 0.5)
    assert capsys.readouterr().err == ""


def test_graders_never_import_jax():
    code = (
        "import sys, xrpo_jax.verify, xrpo_jax.explore.grading, xrpo_jax.prompts; "
        "from xrpo_jax.tasks import arithmetic, countdown, files, reasoning_gym, sums; "
        "sys.exit('jax' in sys.modules or 'flax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
