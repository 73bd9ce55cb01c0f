"""ReCo: golden values of section d.6 of its specification, invariants, and its gradient by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from test_learn import (
    BUDGET,
    RAGGED,
    by_logits,
    close,
    groups_of,
    learn_of,
    loss_of,
    make_batch,
    run,
    score_of,
)

from xrpo_jax.algorithms import base
from xrpo_jax.algorithms.reco import Occurrence, Variance, WherePositive

# p_old, p, ratio, ratio of variances v, dv / d log p
GOLDEN = np.array(
    [
        [0.5, 0.5, 1, 1, 0],
        [0.5, 0.7, 1.4, 0.84, -1.12],
        [0.5, 0.9, 1.8, 0.36, -2.88],
        [0.2, 0.3, 1.5, 1.3125, 0.75],
        [0.2, 0.1, 0.5, 0.5625, 0.5],
        [0.9, 0.95, 1.05556, 0.52778, -9.5],
        [0.9, 0.8, 0.88889, 1.77778, -5.33333],
        [0.99, 0.999, 1.00909, 0.10091, -100.707],
    ]
)


def rows_of(old, now, reward=(1.0, 0.0), group=None):
    """Rows of probabilities `now` and `old` [n,s], all trained."""
    old, now = np.log(np.asarray(old, float)), np.log(np.asarray(now, float))
    n = len(old)
    return oracles.Rows(
        now=now,
        old=old,
        mask=np.ones(old.shape),
        reward=np.resize(np.array(reward), n),
        correct=np.resize(np.array(reward), n) > 0,
        group=np.zeros(n, int) if group is None else np.asarray(group),
    )


def table():
    """The golden tokens, in a right row and in a wrong one."""
    return rows_of([GOLDEN[:, 0]] * 2, [GOLDEN[:, 1]] * 2)


def on(rows, **settings):
    """Minus the gradient over weight and advantage: what multiplies `∇ log π`; and clip fractions.

    The first row has a positive advantage, the second a negative one.
    """
    learn = learn_of("reco", **settings)
    stats, batch = make_batch(rows)
    scores = score_of(learn, batch)
    (_, sums), gradient = loss_of(learn, stats, batch, scores)
    n, s = rows.mask.shape
    by = np.asarray(scores.weight * scores.advantage)[:n, :s]
    return -np.asarray(gradient)[:n, :s] / by, sums


# --- golden values --------------------------------------------------------------------------------


def test_golden_variance_ratio():
    stats, batch = jax.tree.map(jnp.asarray, make_batch(table()))
    found = np.exp(Variance()(stats, batch))[0, :8]
    close(found, GOLDEN[:, 3], 6e-6)
    close(np.exp(stats.logp - batch.old_logp)[0, :8], GOLDEN[:, 2], 6e-6)
    ratio = GOLDEN[:, 1] / GOLDEN[:, 0]
    close(found, ratio * (1 - GOLDEN[:, 1]) / (1 - GOLDEN[:, 0]), 1e-5)


def test_variance_ratio_near_certainty():
    """Float32 log-probs hold 1 - p, which 1 - exp(log p) loses."""
    old, now = np.array([[-2e-5, -3e-4, -1e-5, -1e-3]]), np.array([[-7e-5, -1.1e-5, -1e-9, -8e-4]])
    rows = dataclasses.replace(rows_of([[1.0] * 4], [[1.0] * 4]), old=old, now=now)
    stats, batch = jax.tree.map(jnp.asarray, make_batch(rows))
    pairs = zip(now[0], old[0], strict=True)
    wanted = [oracles.variance(logp) / oracles.variance(before) for logp, before in pairs]
    close(np.exp(Variance()(stats, batch))[0, :4], wanted, 0, 3e-6)


def test_golden_multipliers_and_not_the_derivative():
    """In each mode the gradient is v's clipped value times `∇ log π`, never the derivative of v."""
    old, now, _, v, literal = GOLDEN.T
    ratio, v = now / old, now * (1 - now) / (old * (1 - old))
    bounded = np.clip(v, 0.8, 1.2)
    wanted = {
        "clamp_ratio_mask": (bounded * (ratio <= 1.2), bounded * (ratio >= 0.8)),
        "ppo_on_rvar": (v * (v <= 1.2), v * (v >= 0.8)),
        "clamp_only": (bounded, bounded),
    }
    for mode, multipliers in wanted.items():
        found, sums = on(table(), clip_mode=mode)
        close(found, multipliers, 1e-5)
        assert np.all(found >= 0)
        assert np.all(np.abs(found - literal)[:, [1, 2, 5, 6, 7]] > 0.5)
        if mode != "clamp_only":
            assert sums["clip_fraction"] == sum(np.sum(row == 0) for row in multipliers)
        assert sums["variance_ratio"] == pytest.approx(2 * v.sum(), rel=1e-5)


def test_the_literal_reading_has_a_hard_cap():
    """A falling token of a wrong row: v is 990 and PPO's test never sees it."""
    rows = rows_of([[1 - 1e-5]] * 2, [[0.99]] * 2)
    found, _ = on(rows, clip_mode="ppo_on_rvar")
    close(found, [[0], [10]], 1e-4)
    close(on(rows)[0], [[1.2], [1.2]], 1e-5)


@pytest.mark.parametrize(
    "likely, golden", [(0.5, 0.25), (0.8, 0.15625), (0.9, 0.138889), (0.975, 0.128205)]
)
def test_golden_response_weights(likely, golden):
    """For G = 8 the weight of a token is w / |o|; π̄ is a geometric mean."""
    old = np.exp(np.log(likely) + np.array([[0.02, -0.02, 0.01, -0.01]] * 8))
    _, batch = make_batch(rows_of(old, old))
    scores = score_of(learn_of("reco"), batch)
    close(scores.weight[:8, :4], golden / 4, 3e-7)
    close(scores.report["response_weight"][:8], 8 * golden, 3e-6)
    assert np.all(np.isnan(scores.report["response_weight"][8:]))


def test_response_weights_of_ragged_groups():
    """By the oracle, in each form; divided by their mean, those of a group add up to 1."""
    size = np.bincount(RAGGED.group)[RAGGED.group]
    advantage = np.array(oracles.group_z(RAGGED.reward, RAGGED.group))
    for settings in [{}, {"mean_weights": True}, {"positive_only": True}]:
        _, batch = make_batch(RAGGED)
        scores = score_of(learn_of("reco", **settings), batch)
        weights = oracles.response_weights(RAGGED, **settings)
        close(scores.report["response_weight"][:13] / size, list(weights.values()), 1e-6)
        close(np.sum(scores.weight, axis=1)[:13] * 4, list(weights.values()), 1e-6)
        if "mean_weights" in settings:
            close(np.sum(scores.weight), 1.0, 1e-6)
        if "positive_only" in settings:
            close(scores.report["response_weight"][:13][advantage <= 0], 1.0, 0)


def test_positive_rows_are_those_of_positive_advantage():
    """Not a row at the mean of its group, nor equal rewards whose mean is rounded below them."""
    sizes = [3, 3, 5, 6, 7, 9, 10, 11]
    reward = np.concatenate([[1.0, 0.5, 0.0], [1.0, 0.0, 0.0], np.full(48, 0.7)])
    group = np.repeat(np.arange(len(sizes)), sizes)
    half = np.full((len(group), 1), 0.5)
    _, batch = make_batch(rows_of(half, half, reward, group), slots=len(group))
    groups = groups_of(jax.tree.map(jnp.asarray, batch), len(sizes))
    assert np.any(groups.mean(batch.reward)[6:] < batch.reward[6:])
    found = WherePositive(of=Occurrence())(batch, groups)
    close(found, np.where(np.isin(np.arange(len(group)), [0, 3]), 2.0, 1.0), 1e-6)


def test_a_row_that_is_left_out_counts_in_no_response_weight():
    learn = base.keeping(base.make("reco", BUDGET, mean_weights=True), stopped=True, mixed=False)
    _, batch = make_batch(RAGGED)
    batch.stopped[[1, 5, 6, 8]] = 0
    scores = score_of(learn.learn, batch)
    kept = ~np.isin(np.arange(13), [1, 5, 6, 8])
    weights = oracles.response_weights(dataclasses.replace(RAGGED, kept=kept), mean_weights=True)
    close(np.sum(scores.weight, axis=1)[:13][kept] * 3, list(weights.values()), 1e-6)
    assert np.all(np.isnan(scores.report["response_weight"][:13]) == ~kept)


# --- invariants -----------------------------------------------------------------------------------


def test_on_policy_and_certain_it_is_grpo():
    """Where π̄ is 1 and nothing has moved yet; certain tokens, too, have a gradient."""
    rows = rows_of(np.ones((6, 3)), np.ones((6, 3)), (1.0, 0.0, 0.0), [0, 0, 0, 1, 1, 1])
    ours, grpo = (run(learn_of(name), *make_batch(rows)) for name in ("reco", "grpo"))
    close(ours[1], grpo[1], 1e-8)
    assert np.abs(grpo[1]).max() > 0.01
    unlikely = rows_of(np.full((6, 3), 0.4), np.full((6, 3), 0.4), (1.0, 0.0, 0.0), rows.group)
    by_token, grpo = (
        run(learn, *make_batch(unlikely))[1]
        for learn in (learn_of("reco", response=False), learn_of("grpo"))
    )
    close(by_token, grpo, 1e-7)  # the token part alone is GRPO on policy
    close(run(learn_of("reco"), *make_batch(unlikely))[1], 2.5 * grpo, 1e-6)


def test_switches_choose_parts():
    assert learn_of("reco", response=False, token=False) == learn_of("grpo")
    assert learn_of("reco", response=False, token=False, beta=0.1) == learn_of("grpo", beta=0.1)
    assert learn_of("reco").weight == learn_of("reco", token=False).weight
    assert learn_of("reco", token=False).clip == learn_of("grpo").clip
    assert learn_of("reco", response=False).weight == learn_of("grpo").weight
    assert learn_of("reco", response=False).clip == learn_of("reco").clip
    assert not learn_of("reco").needs_reference and learn_of("reco", beta=0.1).needs_reference


def test_weights_have_no_gradient_and_the_gradient_has_the_advantages_sign():
    stats, batch = jax.tree.map(jnp.asarray, make_batch(RAGGED))

    def total(old_logp):
        learn = learn_of("reco", mean_weights=True)
        return jnp.sum(jnp.square(score_of(learn, batch.replace(old_logp=old_logp)).weight))

    assert not np.any(jax.grad(total)(batch.old_logp))
    advantage = np.array(oracles.group_z(RAGGED.reward, RAGGED.group))[:, None]
    for settings in [{"clip_mode": mode} for mode in ("ppo_on_rvar", "clamp_only")] + [{}]:
        gradient = run(learn_of("reco", **settings), stats, batch)[1][:13, :12]
        moved = gradient != 0
        assert moved.sum() > 20
        assert np.all((np.sign(-gradient) == np.sign(advantage))[moved])


def test_absolute_weights_by_hand():
    """`4 p (1 - p)`, in the first update too, and no clamp but the mask of the true ratio."""
    old, now = GOLDEN[:, 0], GOLDEN[:, 1]
    value, ratio = 4 * now * (1 - now), now / old
    found, _ = on(table(), absolute=True)
    close(found, [value * (ratio <= 1.2), value * (ratio >= 0.8)], 1e-5)
    close(on(table(), absolute=True, clip_mode="clamp_only")[0], [value, value], 1e-5)


# --- the gradient by hand -------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_gradient_of_a_softmax_policy_by_hand(beta):
    """Every token gets `w c A / (|o| prompts)` where it is active, and as much of the KL's."""
    logits, tokens, rows = oracles.tiny_softmax()
    length = rows.mask.sum(axis=1, keepdims=True)
    advantage = np.array(oracles.group_z(rows.reward, rows.group))[:, None]
    size = np.array([3, 3, 3, 2, 2])[:, None]
    likely = np.exp(rows.old.sum(axis=1, keepdims=True) / length)
    w = np.minimum(1 / (size * likely), 5 / size)
    assert (w == 5 / size).any() and (w < 5 / size).any()
    p, old = np.exp(rows.now), np.exp(rows.old)
    with np.errstate(divide="ignore", invalid="ignore"):
        v = np.clip(p * (1 - p) / (old * (1 - old)), 0.8, 1.2)
    ratio = p / old
    active = ~(((advantage > 0) & (ratio > 1.2)) | ((advantage < 0) & (ratio < 0.8)))
    assert 0 < np.sum(active * rows.mask) < rows.mask.sum()
    value = np.where(rows.mask > 0, v * active * advantage, 0.0)
    value = value - beta * rows.mask * (1 - np.exp(rows.reference - rows.now))
    _, gradient = by_logits(learn_of("reco", beta=beta), logits, tokens, rows)
    close(gradient, oracles.logits_gradient(logits, tokens, -w * value / length / 2), 2e-6)


# --- degenerate batches ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"clip_mode": "ppo_on_rvar"},
        {"absolute": True},
        {"mean_weights": True},
        {"token": False},
    ],
    ids=str,
)
def test_rows_of_one_token_certain_tokens_and_equal_rewards(settings):
    certain, tiny = [[1.0], [1.0]], [[1e-30], [1e-30]]
    for old, now in [(certain, tiny), (tiny, certain), (certain, certain), (tiny, tiny)]:
        for reward in ((1.0, 0.0), (1.0, 1.0)):
            rows = rows_of(old, now, reward)
            value, gradient, sums = run(learn_of("reco", **settings), *make_batch(rows))
            assert np.isfinite(value) and np.all(np.isfinite(gradient))
            assert np.all(np.isfinite(list(sums.values())))
            if reward == (1.0, 1.0):
                assert value == 0 and not np.any(gradient)


def test_an_old_log_prob_that_is_no_number_reaches_the_loss():
    """Its row's weight is a number, or the row would be left out and nobody would know."""
    stats, batch = make_batch(RAGGED)
    batch.old_logp[0, np.argmax(RAGGED.mask[0])] = np.nan
    weights = Occurrence()(jax.tree.map(jnp.asarray, batch), groups_of(batch))
    assert np.all(np.isfinite(weights))
    assert np.isnan(run(learn_of("reco"), stats, batch)[0])


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"clip_mode": "ppo"}, "clip_mode='ppo'; allowed: clamp_ratio_mask, ppo_on_rvar, clamp_"),
        ({"response_cap": 0.0}, "response_cap=0.0; allowed: above 0"),
        ({"response_cap": -1.0}, "response_cap=-1.0; allowed: 0 or more"),
        ({"response": False, "mean_weights": True}, "mean_weights=True; .*algorithm.response"),
        ({"response": False, "positive_only": True}, "positive_only=True; .*algorithm.response"),
        ({"token": False, "absolute": True}, "absolute=True; allowed: False without .*token"),
        ({"absolute": True, "clip_mode": "ppo_on_rvar"}, "clip_mode='ppo_on_rvar'; allowed: cl"),
    ],
)
def test_settings_that_do_not_go_together(settings, message):
    with pytest.raises(ValueError, match=f"algorithm.{message}"):
        base.make("reco", BUDGET, **settings)
