"""Rollouts drawn one step ahead: from which policy and ledger, and how a draw ends early."""

import dataclasses
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import Draw, Texts, tools_for
from test_grading import ANSWERS, PROMPTS, SHAPE, wait_for, workers
from test_verify_pool import children, gone

from xrpo_jax import ahead
from xrpo_jax import mesh as meshes
from xrpo_jax.explore.collect import Explore, init_ledger
from xrpo_jax.explore.planner import Fixed
from xrpo_jax.explore.values import Running
from xrpo_jax.log import Clock

TASK = Texts(prompts=PROMPTS, answers=ANSWERS)
EXPLORE = Explore(planner=Fixed(group=4), values=Running(keep=0.5))


@dataclasses.dataclass(kw_only=True)
class Noting(Draw):
    """Keeps which parameters it is given; its texts depend on them."""

    given: list = dataclasses.field(default_factory=list)

    def __call__(self, params, *arguments, **more):
        self.given.append(int(params["w"][0]))
        self.says = lambda text, prompt, index: f"{self.given[-1]}{index}"
        return super().__call__(params, *arguments, **more)


def now_of(draw, tools=None) -> ahead.Now:
    tools = tools or tools_for(TASK, 40)
    return ahead.Now(explore=EXPLORE, tools=tools, draw=draw, shape=SHAPE, seed=0)


def params_of(step: int):
    return {"w": jnp.full(3, step, jnp.int32)}


def ledger_of(step: int):
    """A ledger that is told from others."""
    ledger = init_ledger(EXPLORE, len(TASK), 8)
    return ledger | {"values": {"mean": np.full(len(TASK), step / 10)}}


def same(found, expected):
    (batch, progress), (batch_, progress_) = found, expected
    jax.tree.map(np.testing.assert_array_equal, batch, batch_)
    assert repr(progress.rollouts) == repr(progress_.rollouts)
    np.testing.assert_array_equal(progress.values["mean"], progress_.values["mean"])


@pytest.mark.parametrize("begin", [0, 3])
def test_a_step_is_drawn_with_what_there_was_before_the_one_before(begin):
    draw, told = Noting(says=None), []
    before = max(begin - 1, 0)
    first = dataclasses.replace(ahead.first(params_of(before), ledger_of(before)), step=before)
    with ahead.Ahead(now_of(draw), begin + 4, begin, first) as source:
        for step in range(begin, begin + 4):
            params, clock = params_of(step), Clock()
            batch, progress, said = source.take(params, ledger_of(step), step, clock)
            jax.tree.map(lambda leaf: leaf.delete(), params)  # as an update that donates it does
            assert source.origin.step == step and int(source.origin.params["w"][0]) == step
            assert source.origin.ledger["values"]["mean"][0] == step / 10
            before = max(step - 1, 0)
            alone = now_of(Noting(says=None)).take(
                params_of(before), ledger_of(before), step, Clock()
            )
            same((batch, progress), alone[:2])
            told.append(said)
            source.wait(clock)
    assert draw.given == [max(step - 1, 0) for step in range(begin, begin + 4)]
    assert [said["staleness"] for said in told] == [begin > 0, 1, 1, 1]
    assert {"seconds/sample_ahead", "seconds/verify_ahead"} <= told[0].keys()


def test_now_draws_with_what_it_is_given():
    draw = Noting(says=None)
    with now_of(draw) as source:
        for step in range(3):
            _, progress, told = source.take(params_of(step), ledger_of(step), step, Clock())
            assert told == {} and progress.values["mean"][0] == step / 10
    assert draw.given == [0, 1, 2] and source.origin is None


def test_the_next_step_is_drawn_while_this_one_is_trained_on():
    """The draw of step 1 only ends when the thread that took step 0 lets it."""
    free, drawing = threading.Event(), []

    def ends(size):
        drawing.append(threading.current_thread().name)
        if len(drawing) == 2:
            assert free.wait(20)
        yield np.arange(size)

    with ahead.Ahead(
        now_of(Noting(says=None, ends=ends)), 2, 0, ahead.first(params_of(0), ledger_of(0))
    ) as source:
        source.take(params_of(0), ledger_of(0), 0, Clock())
        wait_for(lambda: len(drawing) == 2)
        free.set()
        source.take(params_of(1), ledger_of(1), 1, Clock())
    assert drawing == ["ahead"] * 2


def test_an_error_in_the_draw_is_the_trainers():
    def ends(size):
        raise RuntimeError("the device is gone")

    source = ahead.Ahead(
        now_of(Noting(says=None, ends=ends)), 2, 0, ahead.first(params_of(0), ledger_of(0))
    )
    with source, pytest.raises(RuntimeError, match="the device is gone"):
        source.take(params_of(0), ledger_of(0), 0, Clock())


@pytest.mark.parametrize("ending", [1, 0])
def test_a_draw_that_is_given_up_ends_with_its_chunk(ending):
    """Whether a row ends in it or none."""
    seen = []

    def ends(size):
        for row in range(size):
            seen.append(row)
            if row == 2:
                wait_for(source._over.is_set)
            yield np.arange(row, row + ending)

    source = ahead.Ahead(
        now_of(Noting(says=None, ends=ends)), 2, 0, ahead.first(params_of(0), ledger_of(0))
    )
    with source:
        wait_for(lambda: seen == [0, 1, 2])
        thread = next(one for one in threading.enumerate() if one.name == "ahead")
    wait_for(lambda: not thread.is_alive())
    assert seen == [0, 1, 2]


def test_giving_up_ends_the_workers_that_grade(tmp_path):
    pool, tools = workers(tmp_path, deadline=60.0)
    draw = Draw(says=lambda text, prompt, index: f"hang{index}")
    source = ahead.Ahead(now_of(draw, tools), 2, 0, ahead.first(params_of(0), ledger_of(0)))
    with pool:
        began = time.monotonic()
        with source:
            zygote = pool._zygote.process.pid
            wait_for(lambda: len(children(zygote)) == 2)
            pids = children(zygote)
        assert gone(pids) and time.monotonic() - began < 30


def test_programs_of_several_threads_are_handed_over_one_at_a_time(monkeypatch):
    inside, together = [], []

    def jit(function, **_):
        def call(number):
            inside.append(number)
            time.sleep(0.02)
            together.append(len(inside))
            inside.remove(number)

        call.lower = None
        return call

    def most(run) -> int:
        together.clear()
        threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return max(together)

    monkeypatch.setattr(jax, "jit", jit)
    run = meshes.program(None)
    assert most(run) > 1
    with meshes.several_threads():
        assert most(run) == 1
    assert most(run) > 1
