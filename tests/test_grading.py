"""Rows are graded while others are drawn; nothing depends on the order in which they end."""

import dataclasses
import time

import jax
import numpy as np
import pytest
from fakes import CORRECT, WRONG, Draw, Texts, tools_for
from test_verify_pool import children, gone

from xrpo_jax.algorithms import base
from xrpo_jax.build import _gradings
from xrpo_jax.config import VerifySettings
from xrpo_jax.evaluate import evaluate
from xrpo_jax.explore.collect import Explore, Shape, collect, init_ledger, remember
from xrpo_jax.explore.grading import Here
from xrpo_jax.explore.planner import Fixed
from xrpo_jax.log import Clock
from xrpo_jax.types import Verdict

PROMPTS = tuple(f"{letter}:" for letter in "abcdefgh")
ANSWERS = tuple("ABCDEFGH")
TASK = Texts(prompts=PROMPTS, answers=ANSWERS)
SHAPE = Shape(prompts=4, rows=16, prompt_length=8, seeded_length=40, max_new_tokens=8)
BUDGET = base.Budget(group=4, max_new_tokens=8)
NOBODY = np.zeros(0, int)  # a chunk in which no row ends
ENDS = (  # who ends together, and in which order
    lambda size: [np.arange(size)],
    lambda size: [np.array([i]) for i in reversed(range(size))],
    lambda size: np.array_split(np.random.default_rng(size).permutation(size), max(size // 3, 1)),
    lambda size: [NOBODY, np.arange(size), NOBODY],
)


def says(text, prompt, index):
    return ANSWERS[prompt] if (prompt + index) % 3 == 0 else "nonsense"[: 1 + (index + prompt) % 7]


def play(explore, tools, ends, steps=2, says=says):
    """Batches, progress, ledgers and rows of some steps."""
    ledger = init_ledger(explore, len(tools.task), SHAPE.max_new_tokens)
    shape = dataclasses.replace(SHAPE, depth=getattr(explore.planner, "depth", 1), rows=20)
    found = []
    for step in range(steps):
        draw = Draw(says=says, ends=ends)
        batch, progress = collect(explore, tools, draw, None, ledger, shape, 0, step, Clock())

        def logp_of(texts):
            return [-0.1 * np.ones(len(tokens), np.float32) for _, tokens in texts]

        ledger = remember(explore, ledger, progress, batch, logp_of)
        rows = [row for slot in (*progress.rollouts, *progress.drafts) for row in slot]
        told = [
            (row.slot, row.index, row.text, row.verdict, row.reward, row.terms, row.draft)
            for row in rows
        ]
        found.append((batch, ledger, told))
    return found


@pytest.mark.parametrize("name", ["grpo", "xrpo", "treepo", "skpo", "critique_grpo"])
def test_the_order_of_ending_changes_nothing(name):
    explore = base.make(name, BUDGET).explore
    runs = [play(explore, tools_for(TASK, 40), ends) for ends in ENDS]
    drafts = sum(row[-1] for _, _, told in runs[0] for row in told)
    assert (drafts > 0) == (name in ("treepo", "skpo"))
    for run in runs[1:]:
        for (batch, ledger, told), (batch_, ledger_, told_) in zip(run, runs[0], strict=True):
            assert repr(told) == repr(told_)  # NaN equals itself
            jax.tree.map(np.testing.assert_array_equal, (batch, ledger), (batch_, ledger_))


def test_the_order_of_ending_changes_no_evaluation():
    def run(ends):
        draw = Draw(says=says, ends=ends)
        return evaluate(
            tools_for(TASK, 40), draw, None,
            samples=4, max_new_tokens=8, seed=0, step=0,
        )  # fmt: skip

    assert run(ENDS[0]) == run(ENDS[1]) == run(ENDS[2]) == run(ENDS[3])


class Noting(Here):
    """Notes how many were handed in."""

    added = 0

    def add(self, prompt, text):
        super().add(prompt, text)
        Noting.added += 1


def test_rows_are_handed_in_before_the_last_is_drawn():
    seen = []

    def ends(size):
        for row in range(size):
            seen.append(Noting.added)
            yield np.array([row])

    tools = dataclasses.replace(tools_for(TASK, 40), grading=lambda: Noting(TASK))
    play(Explore(planner=Fixed(group=4)), tools, ends, steps=1)
    assert seen == list(range(16)) and Noting.added == 16


# --- with worker processes -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slow(Texts):
    """The verifier of "hang..." hangs; others say in a file that they were graded."""

    file: str
    deadline: float = 1.0

    def rewards(self, i: int, completion: str) -> Verdict:
        while completion.startswith("hang"):
            time.sleep(1)
        with open(self.file, "a") as file:
            file.write(f"{completion}\n")
        return CORRECT if completion == self.answers[i] else WRONG


def workers(folder, **more):
    """A pool of two, and the tools of a task that it grades."""
    task = Slow(prompts=PROMPTS, answers=ANSWERS, file=str(folder / "graded"), **more)
    pool, (grading, _) = _gradings((task, task), VerifySettings(workers=2))
    return pool, dataclasses.replace(tools_for(task, 40), grading=grading)


def wait_for(condition) -> None:
    limit = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_a_verifier_hangs_while_others_grade_and_rows_are_drawn(tmp_path):
    def hanging(text, prompt, index):
        return "hang" if index == 0 and prompt == first else f"{prompt}{index}"

    def ends(size):
        for row in range(size):
            yield np.array([row])
            # All but the first are graded before the next is drawn.
            wait_for(lambda: len(graded.read_text().split()) == row)  # noqa: B023

    graded = tmp_path / "graded"
    graded.touch()
    pool, tools = workers(tmp_path)
    explore = Explore(planner=Fixed(group=4))
    first = int(explore.curriculum(np.zeros(8), 0, 0, 4)[0])
    clock = Clock()
    with pool:
        ledger = init_ledger(explore, 8, 8)
        draw = Draw(says=hanging, ends=ends)
        _, progress = collect(explore, tools, draw, None, ledger, SHAPE, 0, 0, clock)
    statuses = [row.verdict.status for rows in progress.rollouts for row in rows]
    assert statuses == ["timed_out"] + ["wrong"] * 15
    assert np.isnan(progress.rollouts[0][0].reward)
    assert clock.seconds["verify_hidden"] > 0


def test_workers_and_this_process_say_the_same(tmp_path):
    pool, tools = workers(tmp_path)
    explore = base.make("xrpo", BUDGET).explore
    with pool:
        found = [play(explore, tools, ends) for ends in ENDS]
    expected = play(explore, tools_for(TASK, 40), ENDS[0])
    for run in found:
        assert [repr(told) for _, _, told in run] == [repr(told) for _, _, told in expected]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_in_the_draw_leaves_no_worker(tmp_path, error):
    seen = []

    def ends(size):
        yield np.arange(4)
        zygote = pool._zygote.process.pid
        wait_for(lambda: len(children(zygote)) == 2)
        seen.extend(children(zygote))
        raise error("the device is gone")

    pool, tools = workers(tmp_path, deadline=60.0)
    with pool:
        began = time.monotonic()
        with pytest.raises(error, match="the device is gone"):
            play(
                Explore(planner=Fixed(group=4)),
                tools,
                ends,
                says=lambda text, prompt, index: f"hang{index}",
            )
        assert time.monotonic() - began < 30 and gone(seen)
        play(Explore(planner=Fixed(group=4)), tools, ENDS[0])  # and goes on
    assert (tmp_path / "graded").read_text()
