"""EXPO's two modules against the golden numbers of its specification (a.5) and its control."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from fakes import progress
from test_learn import BUDGET, RAGGED, loss_of, make_batch, score_of

from xrpo_jax.algorithms import base
from xrpo_jax.algorithms.expo import AccuracyK3, Gaussian
from xrpo_jax.arrays import Scores
from xrpo_jax.explore import curriculum
from xrpo_jax.explore.curriculum import Shuffled, evenness
from xrpo_jax.explore.values import Running
from xrpo_jax.learn.advantage import GroupZ
from xrpo_jax.learn.objective import Learn
from xrpo_jax.learn.penalty import ReferenceKL


def scores_at(accuracy):
    ones = jnp.ones((1, 1))
    return Scores(advantage=ones, weight=ones, accuracy=jnp.full(1, accuracy))


@pytest.mark.parametrize(
    "accuracy, golden",
    [(0, 0.01), (0.25, 0.01244919), (0.5, 0.01462117), (0.75, 0.01635149), (1, 0.01761594)],
)
def test_golden_coefficient(accuracy, golden):
    assert AccuracyK3(beta=0.02).coefficient(scores_at(accuracy))[0] == pytest.approx(golden, 1e-6)


def test_golden_weights_of_the_draw():
    values = np.array([0, 0.125, 0.25, 0.375, 0.5])
    golden = [0.360448, 0.563279, 0.774837, 0.938216, 1]
    np.testing.assert_allclose(Gaussian().weight(values), golden, atol=5e-7)
    np.testing.assert_allclose(Gaussian().weight(1 - values), golden, atol=5e-7)
    weight = Gaussian().weight(np.array([0.5, 0.1, 0.9, 0.3]))
    golden = [0.345989, 0.180070, 0.180070, 0.293871]
    np.testing.assert_allclose(weight / weight.sum(), golden, atol=5e-7)


def test_golden_tracker():
    part, seen = Running(), []
    memory = part.init(2, 7)
    for share in (0.25, 1, 0, 0.625):
        memory = part.observe(memory, outcomes(int(8 * share)), {}, None)
        seen.append(memory["mean"][0])
    np.testing.assert_allclose(seen, [0.475, 0.5275, 0.47475, 0.489775], atol=1e-12)
    assert memory["mean"][1] == 0.5  # never drawn


def outcomes(right):
    return progress([(right, 8)])


def test_rollouts_that_could_not_be_graded_say_nothing():
    step = outcomes(4)
    rows = [dataclasses.replace(row, reward=math.nan) for row in step.rollouts[0][4:]]
    mixed = dataclasses.replace(step, rollouts=((*step.rollouts[0][:4], *rows),))
    part = Running(keep=0.5)
    assert part.observe(part.init(1, 7), mixed, {}, None)["mean"][0] == 0.75
    none = dataclasses.replace(step, rollouts=(tuple(rows),))
    assert part.observe(part.init(1, 7), none, {}, None)["mean"][0] == 0.5


def test_golden_advantage():
    """By the population's deviation .484123; the sample's .517549 would give +1.2076 and -.7246."""
    reward = np.array([1.0, 0, 0, 1, 1, 0, 0, 0])
    golden = np.where(reward == 1, 1.29099, -0.77460)
    part = base.make("expo", BUDGET).learn.advantage
    assert part == GroupZ(ddof=0)
    np.testing.assert_allclose(oracles.group_z(reward, np.zeros(8, int), ddof=0), golden, atol=1e-5)


def test_draw_is_without_replacement_by_weight_and_a_function_of_seed_and_step():
    weight = np.array([4.0, 2.0, 1.0, 1.0])
    first = np.array([curriculum.draw(np.log(weight), seed, 3, 1)[0] for seed in range(4000)])
    shares = np.bincount(first, minlength=4) / len(first)
    # Four standard deviations of a share over 4,000 draws are at most .032.
    np.testing.assert_allclose(shares, weight / weight.sum(), atol=0.032)
    # The second of a pair: P(b) = sum over a of P(a) w_b / (W - w_a).
    pairs = np.array([curriculum.draw(np.log(weight), seed, 0, 2) for seed in range(4000)])
    assert (pairs[:, 0] != pairs[:, 1]).all()
    chance = weight / weight.sum()
    expected = [
        sum(chance[a] * weight[b] / (8 - weight[a]) for a in range(4) if a != b) for b in range(4)
    ]
    shares = np.bincount(pairs[:, 1], minlength=4) / len(pairs)
    np.testing.assert_allclose(shares, expected, atol=0.032)
    for seed, step in [(0, 0), (0, 1), (1, 0)]:
        again = curriculum.draw(np.log(weight), seed, step, 4)
        assert sorted(again) == [0, 1, 2, 3]
        np.testing.assert_array_equal(again, curriculum.draw(np.log(weight), seed, step, 4))
    orders = {tuple(curriculum.draw(np.zeros(20), 0, step, 20)) for step in range(5)}
    assert len(orders) == 5
    only = np.array([-np.inf, 0, -np.inf, 0])
    assert set(curriculum.draw(only, 0, 0, 2)) == {1, 3}
    last = {tuple(curriculum.draw(only, seed, 0, 4)[2:]) for seed in range(20)}
    assert last == {(0, 2), (2, 0)}  # no other is left: these at random, not by their number


def test_evenness_is_the_effective_share_of_prompts():
    assert evenness(np.ones(7)) == pytest.approx(1)
    assert evenness(np.array([1.0, 0, 0, 0])) == pytest.approx(0.25)
    assert evenness(np.zeros(3)) == 0
    assert Gaussian().report(np.array([0.5, 0.1, 0.9, 0.3]))["draw_evenness"] == pytest.approx(
        1 / (4 * np.sum(np.square([0.345989, 0.180070, 0.180070, 0.293871]))), rel=1e-5
    )


def test_a_wide_draw_is_uniform_and_a_narrow_one_a_window():
    values = np.linspace(0, 1, 11)
    assert evenness(Gaussian(width=100.0).weight(values)) == pytest.approx(1, abs=1e-6)
    narrow = Gaussian(width=0.05)
    assert set(narrow(values, 0, 0, 3)) == {4, 5, 6}
    far = Gaussian(center=0.9, width=0.01)  # every weight is 0 as a float
    draws = {tuple(far(np.full(100, 0.5), seed, 0, 4)) for seed in range(5)}
    assert len(draws) == 5


def test_accuracy_is_of_verdicts_over_all_graded_rows_whatever_is_trained_on():
    reward = RAGGED.reward.copy()
    reward[[0, 5]] = np.nan  # the verifier failed
    correct = RAGGED.correct & np.isfinite(reward)
    rows = dataclasses.replace(RAGGED, reward=reward, correct=correct)
    _, batch = make_batch(rows, garbage=1e4)
    scores = score_of(base.make("expo", BUDGET).learn, batch)
    np.testing.assert_allclose(scores.accuracy, correct.sum() / 11, rtol=1e-6)
    dropped = base.keeping(base.make("expo", BUDGET), stopped=False, mixed=True).learn
    np.testing.assert_allclose(score_of(dropped, batch).accuracy, correct.sum() / 11, rtol=1e-6)


def test_one_program_serves_every_accuracy():
    learn = base.make("expo", BUDGET, beta=0.5).learn
    traced = []

    @jax.jit
    def compiled(stats, batch, scores):
        traced.append(1)
        return loss_of(learn, stats, batch, scores)

    stats, batch = make_batch(RAGGED)
    scores = score_of(learn, batch)
    values = []
    for accuracy in (0.0, 0.3, 1.0):
        at = scores.replace(accuracy=jnp.full_like(scores.accuracy, accuracy))
        (value, sums), _ = compiled(stats, batch, at)
        values.append(float(value))
        expected = 0.5 * (math.tanh(accuracy) + 1) / 2
        assert sums["beta_effective"] / sums["tokens"] == pytest.approx(expected, rel=1e-5)
    assert len(traced) == 1 and len(set(values)) == 3


def test_each_module_alone_and_neither():
    both = base.make("expo", BUDGET)
    akl = base.make("expo", BUDGET, curriculum=False)
    gcs = base.make("expo", BUDGET, beta_rule="constant")
    neither = base.make("expo", BUDGET, beta_rule="constant", curriculum=False)
    assert akl.learn == both.learn and akl.explore.curriculum == Shuffled()
    assert gcs.explore == both.explore and gcs.learn.penalties == (ReferenceKL(beta=0.02),)
    assert neither.explore == akl.explore and neither.learn == gcs.learn
    control = base.make("expo", BUDGET, beta_rule="akl_matched_const").learn
    assert control.penalties == (ReferenceKL(beta=pytest.approx(0.014)),)
    none = base.make("expo", BUDGET, beta=0.0).learn
    assert none.penalties == () and not none.needs_reference and both.learn.needs_reference
    assert isinstance(none, Learn)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"beta_rule": "tanh"}, "algorithm.beta_rule='tanh'; allowed: accuracy, akl_matched_const"),
        ({"width": 0.0}, "algorithm.width=0.0; allowed: above 0"),
        ({"retention": 1.0}, "algorithm.retention=1.0; allowed: 0 to below 1"),
        ({"beta": -1.0}, "algorithm.beta=-1.0; allowed: 0 or more"),
    ],
)
def test_settings_are_checked(given, message):
    with pytest.raises(ValueError, match=message):
        base.make("expo", BUDGET, **given)
