"""scripts/conditioning.py: its numbers on made-up answers, and a run on the embedded policy."""

import importlib
import json
import pathlib

import numpy as np
import pytest
from fakes import Draw, Texts, tools_for

from xrpo_jax import rng

ROOT = pathlib.Path(__file__).parents[1]
LIMIT = 24


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("conditioning")


def measured(script, says, prompts=("1:", "2:", "3:"), answers=("s0", "s0", "s0")):
    draw = Draw(says=says, new=LIMIT)
    tools = tools_for(Texts(prompts=prompts, answers=answers), 20)
    settings = dict(samples=4, prompts=2, limit=LIMIT, seed=3)
    return script.measure(tools, draw, None, "tokens", **settings), draw.calls


def says(text, prompt, index):
    """Twelve tokens with the end, the last letter by the index; under a skip text two answers."""
    if text[0] in "123":
        return f"abcdefghij{index}"
    return ("s0", "s0", "s1", "")[index]  # the last states no answer


def test_numbers_by_hand(script):
    found, _ = measured(script, says)
    assert found.lost == 0 and found.stated.shape == (3, 6)
    lengths = [2, 2, 3, 4, 5, 6]  # twelve times each cut, rounded down
    values = found.values
    assert (values["distinct"]["unconditional"] == 4).all()
    assert (values["distinct"]["continual"] == 4).all()  # answers with their beginning
    assert (values["distinct"]["skip"] == 2).all()
    assert (values["identical"]["unconditional"] == 1).all()
    assert (values["identical"]["skip"] == 0).all() and (values["correct"]["skip"] == 0.5).all()
    assert (values["length"]["unconditional"] == 12).all()
    assert (values["length"]["continual"] == [12 - np.array(lengths)] * 3).all()
    assert (values["length"]["skip"] == 2.5).all()


def test_what_is_drawn(script):
    _, calls = measured(script, says)
    own = [call for call in calls if len(call["row"]) <= 2]
    assert [call["prompts"] for call in own] == [["1:", "2:"], ["3:"]]
    assert all((call["limit"] == LIMIT).all() for call in own)
    first = calls[1:19]
    assert [call["resumed"] for call in first] == [False, True, False] * 6
    assert first[0]["prompts"] == ["1:", "2:"] and first[2]["prompts"] == ["ab1:", "ab2:"]
    assert first[17]["prompts"] == ["abcdef1:", "abcdef2:"]
    assert (first[15]["limit"] == LIMIT - 6).all() and list(first[15]["index"]) == [0, 1, 2, 3] * 2
    # Every cut has random numbers of its own, none those of the rollout itself.
    for step, call in enumerate([calls[0], *first[::3]]):
        assert (call["step_key"] == np.array(rng.key(3, step, "rollout"))).all()


def test_a_rollout_without_a_beginning_is_left_out(script):
    found, _ = measured(script, lambda text, prompt, index: "" if prompt == 1 else says(text, 0, 1))
    assert found.lost == 1 and len(found.stated) == 2
    text = script.table(found, 4, "tokens")
    assert "2 problems, 4 answers" in text and "1 problems are left out" in text
    with pytest.raises(ValueError, match="there are no beginnings"):
        measured(script, lambda *_: "")


def test_the_table_compares_by_problem(script):
    plain, skip = np.array([[1.0] * 6, [3.0] * 6]), np.array([[2.0] * 6, [4.0] * 6])
    found = script.Found(
        values={"distinct": {"unconditional": plain, "continual": plain, "skip": skip}},
        stated=np.zeros((2, 6), bool),
        lost=0,
    )
    cells = script.summary(found)["distinct"]
    assert cells["skip"]["difference"] == {"mean": 1.0, "low": 1.0, "high": 1.0}
    assert cells["skip"]["all"]["mean"] == 3.0 and cells["skip"]["all"]["low"] == 2.0
    assert "+1.00 [+1.00, +1.00]" in script.table(found, 8, "tokens")
    missing = script.mean_interval(np.array([np.nan, 2.0]))
    assert missing == {"mean": 2.0, "low": 2.0, "high": 2.0}


def test_the_default_config(script):
    assert script.with_config(["x", "--out=y"]) == [
        "x", "--config=experiments/quickstart.py", "--out=y",
    ]  # fmt: skip
    assert script.with_config(["x", "--config=z"]) == ["x", "--config=z"]
    assert len(script.with_config(["x", "--config.seed=1"])) == 3


def test_a_run_writes_table_numbers_and_picture(script, tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    config = importlib.import_module("quickstart").get_config("debug")
    config.eval.problems, config.mesh.devices = 6, 1
    config.algorithm.skip_layout = "text"
    script.run(config, tmp_path / "out", samples=3)
    written = json.loads((tmp_path / "out" / "conditioning.json").read_text())
    assert written["layout"] == "text" and written["problems"] + written["left_out"] == 6
    lengths = [cell["mean"] for cell in written["metrics"]["length"]["continual"]["cuts"]]
    assert lengths[0] > lengths[-1]
    assert 0 <= written["metrics"]["identical"]["skip"]["all"]["mean"] <= 1
    assert (tmp_path / "out" / "conditioning.md").read_text().strip() in capsys.readouterr().out
    assert (tmp_path / "out" / "conditioning.png").stat().st_size > 10_000
