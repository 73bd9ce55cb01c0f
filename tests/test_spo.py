"""SPO: the tracker's golden numbers, whitening, one rollout a prompt, and offline estimates."""

import dataclasses
import types

import jax
import numpy as np
import oracles
import pytest
from fakes import Draw, Texts, tools, tools_for
from test_learn import RAGGED, close, make_batch, run, score_of

from xrpo_jax import checkpoint, rng, train
from xrpo_jax.algorithms import base
from xrpo_jax.algorithms.spo import Single
from xrpo_jax.explore.collect import Shape, collect, init_ledger, remember
from xrpo_jax.explore.curriculum import Prioritized
from xrpo_jax.explore.values import Discounted
from xrpo_jax.learn.advantage import Tracker
from xrpo_jax.log import Clock

BUDGET = base.Budget(group=4, max_new_tokens=7)
SPO = base.make("spo", BUDGET)


# --- the tracker --------------------------------------------------------------------------------


def seen(reward, moved=0.0):
    """An offline tracker of 3 of 8 after one more response, the policy having moved by `moved`."""
    part = SPO.explore.values
    memory = part.begin(part.init(1, 4), np.array([3]), np.array([8]))
    value, count = memory["value"][0], memory["count"][0]
    rho = float(np.clip(2 ** (-moved / part.half), part.low, part.high))
    a, b = rho * value * count + reward, rho * (1 - value) * count + 1 - reward
    return memory, a, b


def test_golden_tracker():
    memory, a, b = seen(1.0)
    value, count = memory["value"][0], memory["count"][0]
    close([value * count, (1 - value) * count, value], [3.111111, 4.888889, 0.388889], 5e-7)
    close([a, b, a / (a + b)], [3.986667, 4.693333, 0.459293], 5e-7)
    batch, ledger, *_ = play(lambda *_: "A", offline=3 / 8)
    close(batch.baseline[batch.valid > 0], 3.5 / 9, 1e-7)  # what was known before the step
    drawn = ledger["values"]["count"] != 8
    assert drawn.sum() == 8
    close(ledger["values"]["value"][drawn], 0.459293, 5e-7)
    close(ledger["values"]["count"][drawn], 3.986667 + 4.693333, 5e-6)
    assert (ledger["values"]["rho"][drawn] == 0.96).all()  # a first visit: D is 0


@pytest.mark.parametrize(
    "moved, rho", [(0, 0.96), (0.003, 0.96), (0.006, 0.933033), (0.0116, 0.875), (0.06, 0.875)]
)
def test_golden_rho(moved, rho):
    """The second visit asks the policy of then and now about the first visit's response."""
    _, ledger, *_ = play(lambda *_: "A", offline=0.0)
    asked = []

    def logp_of(texts):
        asked.extend(texts)
        return [np.full(len(tokens), -0.25 - moved, np.float32) for _, tokens in texts]

    _, after, progress, _ = play(lambda *_: "A", ledger=ledger, step=1, logp_of=logp_of)
    again = [p for p in progress.prompts if ledger["values"]["length"][p]]
    assert len(asked) == len(again) > 0
    assert {tokens.tolist() == [65, 1] for _, tokens in asked} == {True}
    close(after["values"]["rho"][again], rho, 5e-7)
    fresh = [p for p in progress.prompts if p not in again]
    assert fresh and (after["values"]["rho"][fresh] == 0.96).all()


def test_golden_draw():
    close(Prioritized().weight(np.array([0, 0.25, 0.5, 0.75, 1])),
          [0.05, 0.483013, 0.55, 0.483013, 0.05], 5e-7)  # fmt: skip
    assert SPO.explore.curriculum == Prioritized(floor=0.05)


# --- the advantage ------------------------------------------------------------------------------


def advantage_of(reward, baseline, valid=None):
    rows = dataclasses.replace(
        oracles.toy(),
        now=np.zeros((len(reward), 1)),
        old=np.zeros((len(reward), 1)),
        mask=np.ones((len(reward), 1)),
        reward=np.asarray(reward, np.float64),
        baseline=np.asarray(baseline, np.float64),
        correct=np.asarray(reward) == 1,
        group=np.arange(len(reward)),
    )
    _, batch = make_batch(rows)
    if valid is not None:
        batch.valid[: len(valid)] = valid
    return score_of(SPO.learn, batch), rows


def test_golden_whitening():
    """Gaps .611111 and -.388889, .5, -.9 by hand: ddof 1, 1e-8."""
    reward, baseline = [1, 0, 1, 0], [3.5 / 9, 3.5 / 9, 0.5, 0.9]
    scores, rows = advantage_of(reward, baseline)
    gap = np.array([5.5 / 9, -3.5 / 9, 0.5, -0.9])
    std = np.sqrt(((gap - gap.mean()) ** 2).sum() / 3)
    close(scores.advantage[:4, 0], (gap - gap.mean()) / (std + 1e-8), 1e-6)
    close(scores.advantage[:4, 0], [0.904239, -0.475109, 0.750978, -1.180108], 2e-6)
    close(oracles.spo_advantage(rows), scores.advantage[:4, 0])
    close(scores.report["tracker_gap"][:4], gap, 1e-6)


@pytest.mark.parametrize("reward, value", [(1.0, 0.1), (0.0, 1 / 3), (0.7, 0.2)])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 11])
def test_equal_differences_are_exactly_zero(reward, value, size):
    scores, _ = advantage_of([reward] * size, [value] * size)
    assert not np.any(scores.advantage)


def test_rows_that_were_not_graded_count_nowhere():
    scores, rows = advantage_of([1, np.nan, 0, 1, 5, np.inf], [0.5, 0.5, 0.2, 0.9, 0, 0],
                                valid=[1, 1, 1, 1, 0, 1])  # fmt: skip
    alone, _ = advantage_of([1, 0, 1], [0.5, 0.2, 0.9])
    close(np.asarray(scores.advantage)[[0, 2, 3], 0], alone.advantage[:3, 0], 1e-6)
    assert not np.any(np.asarray(scores.advantage)[[1, 4, 5]])
    assert np.isfinite(scores.advantage).all()


def test_groups_do_not_matter():
    """No row is compared with those of its own prompt."""
    _, batch = make_batch(RAGGED)
    found = score_of(SPO.learn, batch).advantage
    other = score_of(SPO.learn, batch.replace(group=np.zeros_like(batch.group))).advantage
    np.testing.assert_array_equal(found, other)
    close(found[: RAGGED.number, 0], oracles.spo_advantage(RAGGED))
    value, gradient, _ = run(SPO.learn, *make_batch(RAGGED))
    assert value == pytest.approx(oracles.spo(RAGGED), rel=1e-5) and np.any(gradient)


# --- a step -------------------------------------------------------------------------------------

PROMPTS = tuple(f"{letter}{other}:" for letter in "abcdefgh" for other in "abcde")
TOOLS = tools(PROMPTS, ["A"] * len(PROMPTS))
SHAPE = Shape(prompts=2, rows=8, prompt_length=4, seeded_length=4, max_new_tokens=7)


def play(says, *, ledger=None, offline=None, seed=0, step=0, logp_of=None, shape=SHAPE):
    """A step with a fake draw; `offline` is the share of right first samples."""
    explore = SPO.explore
    if ledger is None:
        ledger = init_ledger(explore, len(PROMPTS), 7)
    if offline is not None:
        correct = np.full(len(PROMPTS), round(8 * offline))
        ledger = ledger | {
            "values": explore.values.begin(
                ledger["values"], correct, np.full(len(correct), explore.values.offline)
            )
        }
    draw = Draw(says=says, new=7)
    batch, progress = collect(explore, TOOLS, draw, None, ledger, shape, seed, step, Clock())
    batch = batch.replace(old_logp=np.where(batch.mask > 0, np.float32(-0.25), 0))
    after = remember(explore, ledger, progress, batch, logp_of=logp_of)
    return batch, after, progress, draw.calls


def test_one_rollout_for_each_of_prompts_times_group():
    batch, _, progress, calls = play(lambda *_: "A")
    (call,) = calls
    assert len(call["row"]) == 8 and len(set(progress.prompts)) == 8
    assert call["index"].tolist() == [0] * 8 and call["prompt"].tolist() == list(progress.prompts)
    assert sorted(batch.group) == list(range(8)) and batch.valid.all()
    assert all(len(rows) == 1 for rows in progress.rollouts)


@pytest.mark.parametrize("batch, group", [(1, 8), (8, 1), (3, 5)])
def test_the_budget_is_that_of_the_others(batch, group):
    planner = Single(group=group)
    planner.check(batch)
    assert planner.slots(batch) == planner.rows(batch) == batch * group
    assert base.make("spo", base.Budget(group=group, max_new_tokens=3)).explore.planner == planner


def test_a_single_row_is_refused():
    with pytest.raises(ValueError, match="prompts x rollout.group = 1; allowed: at least 2"):
        Single(group=1).check(1)


def test_draws_are_functions_of_seed_step_and_values():
    _, ledger, progress, _ = play(lambda text, prompt, index: "A" if prompt % 2 else "no")
    assert play(lambda *_: "A")[2].prompts == progress.prompts
    assert play(lambda *_: "A", seed=1)[2].prompts != progress.prompts

    def logp_of(texts):
        return [np.full(len(tokens), -0.25) for _, tokens in texts]

    after = [play(lambda *_: "A", ledger=ledger, step=1, logp_of=logp_of)[2] for _ in range(2)]
    assert after[0].prompts == after[1].prompts
    # What is solved or hopeless is drawn less: 11 to 1 against prompts of which nothing is known.
    known = set(progress.prompts)
    values = ledger["values"]["value"]
    assert {values[prompt] for prompt in known} == {0.0, 1.0}
    often = [SPO.explore.curriculum(values, 0, step, 8) for step in range(200)]
    assert np.isin(np.concatenate(often), list(known)).mean() < 0.1 < 8 / len(PROMPTS)


def test_the_ledger_comes_back_from_disk(tmp_path):
    _, ledger, progress, _ = play(lambda text, prompt, index: "A" if prompt % 2 else "no")
    before = init_ledger(SPO.explore, len(PROMPTS), 7)
    for name, values in ledger["values"].items():
        assert values.shape == before["values"][name].shape
        assert values.dtype == before["values"][name].dtype
    manager = checkpoint.open_manager(tmp_path, 1)
    state = {"params": np.ones(2, np.float32)}
    checkpoint.save(manager, 1, state, ledger)
    found = checkpoint.restore(manager, 1, checkpoint.shapes(state), before)[1]
    manager.close()
    jax.tree.map(np.testing.assert_array_equal, found, ledger)

    def logp_of(texts):
        return [np.full(len(tokens), -0.3) for _, tokens in texts]

    one, other = (
        play(lambda *_: "A", ledger=each, step=1, logp_of=logp_of)[1:3] for each in (ledger, found)
    )
    assert one[1].prompts == other[1].prompts
    jax.tree.map(np.testing.assert_array_equal, one[0], other[0])


def test_metrics():
    _, ledger, _, _ = play(lambda *_: "A", offline=3 / 8)
    told = SPO.explore.values.report(ledger["values"])
    assert told["value_rho"] == pytest.approx(0.96)
    assert told["value_count"] == pytest.approx((32 * 8 + 8 * 8.68) / 40)
    evenness = SPO.explore.curriculum.report(ledger["values"]["value"])["draw_evenness"]
    assert 0.9 < evenness < 1


def test_settings():
    made = base.make("spo", BUDGET, offline=0, rho_low=0.9, rho_high=0.9, draw_floor=0.2)
    assert made.explore.values == Discounted(low=0.9, high=0.9, half=0.06, offline=0)
    assert made.explore.curriculum == Prioritized(floor=0.2)
    assert SPO.explore.values == Discounted(low=0.875, high=0.96, half=0.06, offline=8)
    assert SPO.learn.advantage == Tracker(right=1.0, wrong=0.0, ddof=1, eps=1e-8)
    with pytest.raises(ValueError, match="rho_low=0.97, algorithm.rho_high=0.96; allowed"):
        base.make("spo", BUDGET, rho_low=0.97)


def test_first_estimates_are_draws_of_their_own_and_leave_out_what_failed():
    """Two samples of each of five prompts, of which prompt 3 cannot be graded once."""
    keys, indices = [], []

    def draw(params, prompts, row, rows, limit, **more):
        keys.append(np.array(rows.step_key))
        indices.append(np.array(rows.index).tolist())
        return drawn(params, prompts, row, rows, limit, **more)

    drawn = Draw(says=lambda text, prompt, index: "A" if prompt < 2 or index else "no", new=7)

    class Failing(Texts):
        failed = []

        def rewards(self, i, completion):
            if i == 3 and not self.failed:
                self.failed.append(i)
                raise RuntimeError("scorer")
            return super().rewards(i, completion)

    explore = base.make("spo", BUDGET, offline=2).explore
    five = Failing(prompts=tuple(f"q{i}:" for i in range(5)), answers=("A",) * 5)
    parts = types.SimpleNamespace(
        tools=tools_for(five),
        draw=draw,
        shape=types.SimpleNamespace(prompts=2, max_new_tokens=7),
    )
    settings = types.SimpleNamespace(
        seed=4,
        algorithm=types.SimpleNamespace(explore=explore),
        verify=types.SimpleNamespace(alarm=1.0),
    )
    ledger = init_ledger(explore, 5, 7)
    bar = types.SimpleNamespace(set_postfix_str=lambda text: None)
    going = types.SimpleNamespace(stop=False)
    found = train._estimated(parts, settings, None, ledger, bar, going)
    assert all((key == np.array(rng.key(4, 0, "offline"))).all() for key in keys)
    assert not (keys[0] == np.array(rng.key(4, 0, "rollout"))).all()
    assert indices == [[0, 1, 0, 1], [0, 1, 0, 1], [0, 1]]
    # Both right; one of two; one of the one that was graded.
    np.testing.assert_allclose(
        found["values"]["value"], [2.5 / 3, 2.5 / 3, 1.5 / 3, 1.5 / 2, 1.5 / 3]
    )
    assert found["values"]["count"].tolist() == [2, 2, 2, 1, 2]
    assert found["decoded"]["tokens"] == 7 * 2 + 3 * 3  # "A" and "no", each with its end
    stopped = types.SimpleNamespace(stop=True)
    found = train._estimated(parts, settings, None, ledger, bar, stopped)
    assert not found["values"]["count"].any() and found["decoded"]["tokens"] == 0
