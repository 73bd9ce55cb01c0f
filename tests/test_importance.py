"""Importance weights: golden numbers, the oracle, and that no split of a batch changes them."""

import dataclasses
import functools
import math

import jax
import numpy as np
import oracles
import pytest
from test_learn import BUDGET, RAGGED, close, make_batch, run, score_of
from test_update import (
    COLUMNS,
    PLACES,
    PROMPT,
    ROWS,
    SHUFFLED,
    SLOTS,
    TABLE,
    TOKENS,
    annotated,
    bigram_state,
    cut,
    quick,  # noqa: F401 - a fixture
    recording,
    rows_at,
)

from xrpo_jax import mesh as meshes
from xrpo_jax.algorithms import base
from xrpo_jax.learn.importance import Truncated
from xrpo_jax.learn.update import Schedule, make_learner

LEVELS = ("token", "sequence")
NAN = float("nan")


def learn_of(name, level, cap=1.5, **settings):
    learn = base.make(name, BUDGET, **settings).learn
    return dataclasses.replace(learn, importance=Truncated(level=level, cap=cap))


def sampled_by(rows, seed=3, spread=0.5):
    """Log-probs of a sampler that is near; two rows were drawn under another context."""
    noise = spread * np.random.default_rng(seed).standard_normal(rows.mask.shape)
    sampled = (rows.old + noise) * rows.mask
    sampled[[2, 7]] = np.nan
    return sampled


def with_sampler(batch, sampled, order=None):
    """The batch of test_learn with what the sampler said; it is NaN on padding."""
    wide = np.full(batch.mask.shape, np.nan, np.float32)
    rows = np.arange(len(sampled)) if order is None else order
    wide[rows, : sampled.shape[1]] = sampled
    return batch.replace(sampler_logp=wide)


# --- golden numbers ------------------------------------------------------------------------------

RATIO = np.array([[1.5, 4, 0.5, 1], [1.6, 0.25, 1, 1], [NAN] * 4, [9, 1, 1, 1]])


def golden():
    """The four rollouts of 3, 2, 4 and 1 tokens, whose ratios are RATIO."""
    toy = oracles.toy()
    stats, batch = make_batch(toy)
    return stats, with_sampler(batch, toy.old - np.log(RATIO))


@pytest.mark.parametrize(
    "level, expected",
    [
        ("token", [[1.5, 2, 0.5], [1.6, 0.25], [1, 1, 1, 1], [2]]),
        ("sequence", [[2, 2, 2], [0.4, 0.4], [1, 1, 1, 1], [2]]),  # products 3, 0.4, none, 9
    ],
)
def test_golden_weights(level, expected):
    stats, batch = golden()
    part = Truncated(level=level, cap=2.0)
    found = np.asarray(part(jax.tree.map(np.asarray, batch)))
    for row, wanted in zip(found, expected, strict=False):
        close(row[: len(wanted)], wanted)
    # The weight of a token in the loss: 1/4 of a row's mean, times its importance.
    weight = np.asarray(score_of(learn_of("grpo", level, 2.0), batch).weight)
    for row, wanted in zip(weight, expected, strict=False):
        close(row[: len(wanted)], np.array(wanted) / len(wanted) / 4)


def test_golden_loss():
    """Before the policy moves from π_old each token's loss is -w A: by hand, A = ±.86602."""
    stats, batch = golden()
    stats = stats.replace(logp=batch.old_logp)
    loss, gradient, _ = run(learn_of("grpo", "token", 2.0), stats, batch)
    level = 1 / math.sqrt(4 / 3)  # rewards 1, 0, 0, 1: (1 - 1/2) / their deviation
    rows = [(1.5 + 2 + 0.5) / 3, -(1.6 + 0.25) / 2, -1, 2]
    assert loss == pytest.approx(-level * sum(rows) / 4, abs=2e-6)
    assert gradient[0, 1] == pytest.approx(-level * 2 / 3 / 4, abs=2e-6)


def test_golden_statistics():
    _, batch = golden()
    told = Truncated(level="token", cap=2.0).statistics(batch)
    weights = [1.5, 2, 0.5, 1.6, 0.25, 1, 1, 1, 1, 2]
    assert told["importance_mean"] == pytest.approx(np.mean(weights))
    assert told["importance_max"] == pytest.approx(9)
    assert told["importance_truncated"] == pytest.approx(2 / 10)
    told = Truncated(level="sequence", cap=2.0).statistics(batch)
    assert told["importance_max"] == pytest.approx(9)
    assert told["importance_truncated"] == pytest.approx(4 / 10)  # tokens of the first and last row
    nothing = batch.replace(mask=np.zeros_like(batch.mask))
    assert Truncated(level="token", cap=2.0).statistics(nothing) == {}


def test_ratios_beyond_all_measure_stay_finite():
    stats, batch = golden()
    for far in (-np.inf, 500.0, -500.0):
        sampled = np.where(batch.mask > 0, far, np.nan).astype(np.float32)
        for level in LEVELS:
            loss, gradient, _ = run(
                learn_of("grpo", level), stats, batch.replace(sampler_logp=sampled)
            )
            assert np.isfinite(loss) and np.isfinite(gradient).all()


# --- the oracle ----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "name, settings", [("grpo", {"beta": 0.1}), ("dapo", {}), ("cispo", {}), ("xrpo_token", {})]
)
def test_loss_and_gradient_are_the_oracles(name, settings, level):
    rows = dataclasses.replace(RAGGED, sampled=sampled_by(RAGGED), correction=(level, 1.5))
    oracle = functools.partial(oracles.LOSSES[name], **settings)
    learn = learn_of(name, level, **settings)
    seen = []
    for order, shift, garbage in ((None, 0, 0.0), (np.arange(13)[::-1] + 2, 3, 1e4)):
        stats, batch = make_batch(rows, order=order, shift=shift, garbage=garbage)
        places = np.arange(13) if order is None else order
        wide = np.full(batch.mask.shape, 1e4 if garbage else np.nan, np.float32)
        wide[places, shift : shift + 12] = np.where(rows.mask > 0, rows.sampled, np.nan)
        loss, gradient, _ = run(learn, stats, batch.replace(sampler_logp=wide))
        assert loss == pytest.approx(oracle(rows), abs=2e-6)
        close(gradient[places, shift : shift + 12], oracles.gradient(oracle, rows), 3e-6)
        seen.append(loss)
    plain = dataclasses.replace(rows, correction=None)
    assert abs(oracle(plain) - oracle(rows)) > 1e-3  # it makes a difference
    assert seen[0] == pytest.approx(seen[1], abs=1e-6)


def test_where_both_agree_nothing_changes_to_the_bit():
    stats, batch = make_batch(RAGGED)
    batch = with_sampler(batch, np.where(RAGGED.mask > 0, batch.old_logp[:13, :12], np.nan))
    without = run(base.make("grpo", BUDGET).learn, stats, batch)
    for level in LEVELS:
        loss, gradient, _ = run(learn_of("grpo", level), stats, batch)
        assert loss == without[0]
        np.testing.assert_array_equal(gradient, without[1])


@pytest.mark.parametrize("level", LEVELS)
def test_devices_micro_batches_and_order_give_the_oracles_update(level):
    sampled = sampled_by(ROWS)
    rows = dataclasses.replace(rows_at(TABLE), sampled=sampled, correction=(level, 1.5))
    loss = oracles.grpo(rows)
    gradient = oracles.bigram_gradient(TABLE, TOKENS, oracles.gradient(oracles.grpo, rows))
    usual = {"minibatches": 1, "epochs": 1, "groups": 5}
    usual |= {"prompt_lengths": (PROMPT,), "lengths": (COLUMNS,)}
    found = []
    for (devices, size, share), order in zip(PLACES, [None, SHUFFLED, SHUFFLED[::-1]], strict=True):
        schedule = Schedule(**usual, rows=size, share=share)
        learner = make_learner(
            learn_of("grpo", level), "bigram", recording(1.0), schedule, meshes.make(devices)
        )
        wide = np.full((SLOTS, COLUMNS), np.nan, np.float32)
        wide[np.arange(13) if order is None else order] = cut(sampled)
        batch = annotated(order).replace(sampler_logp=wide)
        state, metrics, _ = learner.update(bigram_state(devices), batch, 0, 0)
        assert metrics["loss"] == pytest.approx(loss, abs=2e-6)
        close(state.optimizer["table"], gradient, 3e-6)
        found.append(np.asarray(state.optimizer["table"]))
    close(found[0], found[1], 1e-6)
    close(found[0], found[2], 1e-6)
