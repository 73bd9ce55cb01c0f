"""TEPO: golden values of section c.5 of its specification, invariants, and its gradient by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from test_learn import (
    BUDGET,
    by_logits,
    close,
    learn_of,
    loss_of,
    make_batch,
    run,
    score_of,
)

from xrpo_jax.algorithms import base
from xrpo_jax.learn.objective import loss


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rewards:
    """Advantages that are given."""

    def __call__(self, batch, groups):
        return jnp.where(groups.weight > 0, batch.reward, 0.0)


WIDE = {"clip_low": 0.2, "clip_high": 0.2}
DELTA = np.array([[0.10, -0.05, 0.04], [-0.20, 0.30, 0.0]])
FALL = np.array([[-0.1, 0.2, -0.05], [-0.3, -0.3, 0.0]])  # the second row has a negative advantage
OLD = np.array([[-0.7, -1.1, -0.4], [-2.0, -0.9, 0.0]])
GOLDEN = oracles.Rows(
    now=OLD + DELTA,
    old=OLD,
    mask=np.array([[1, 1, 1], [1, 1, 0]]),
    reward=np.array([1.0, -1.0]),
    correct=np.array([True, False]),
    group=np.zeros(2, int),
    entropy=1.0 + FALL,
    old_entropy=np.ones((2, 3)),
)


def given(**settings):
    return dataclasses.replace(learn_of("tepo", **settings), advantage=Rewards())


def masked_kl(learn, rows):
    """Mask and masked KL of every token, as the log has them."""
    stats, batch = jax.tree.map(jnp.asarray, make_batch(rows))
    (penalty,) = learn.penalties
    found = penalty.report(stats, batch, score_of(learn, batch))
    n, s = rows.mask.shape
    return np.asarray(found["mask_share"])[:n, :s], np.asarray(found["masked_kl"])[:n, :s]


# --- golden values --------------------------------------------------------------------------------


def test_golden_surrogate():
    stats, batch = jax.tree.map(jnp.asarray, make_batch(GOLDEN))
    close(np.exp(given().ratio(stats, batch))[:2, 0], [1.03045453, 1.05127110], 2e-7)
    for token_level, objective, coefficients in [
        (True, 0.19776428, (0.20609091, -0.21025422)),
        (False, -0.01040828, (0.17174242, -0.26281777)),  # GSPO
    ]:
        learn = given(**WIDE, beta=0.0, token_level=token_level)
        value, gradient, _ = run(learn, *make_batch(GOLDEN))
        assert -value == pytest.approx(objective, abs=1e-7)
        close(-gradient[:2, :3], np.array(coefficients)[:, None] * GOLDEN.mask, 1e-7)
    gspo = dataclasses.replace(learn_of("gspo", **WIDE), advantage=Rewards())
    assert -run(gspo, *make_batch(GOLDEN))[0] == pytest.approx(-0.01040828, abs=1e-7)


def test_golden_masked_kl():
    mask, kl = masked_kl(given(), GOLDEN)
    np.testing.assert_array_equal(mask, [[1, 0, 1], [0, 0, 0]])
    close(kl, [[0.00483742, 0, 0.00078944], [0, 0, 0]], 3e-8)
    assert oracles.k3(0.05) == pytest.approx(0.00127110, abs=1e-8)
    values = [run(given(**WIDE, beta=beta), *make_batch(GOLDEN)) for beta in (0.0, 1.0, 3.0)]
    for beta, (value, _, sums) in zip((1.0, 3.0), values[1:], strict=True):
        assert value - values[0][0] == pytest.approx(beta * 0.00112537, abs=1e-7)
        assert sums["masked_kl"] / sums["tokens"] == pytest.approx(0.00112537, abs=1e-8)
        assert sums["mask_share"] / sums["tokens"] == pytest.approx(2 / 5)
    everywhere, kl = masked_kl(given(masked=False), GOLDEN)
    np.testing.assert_array_equal(everywhere, GOLDEN.mask)
    close(kl[0, 1], 0.00127110, 3e-8)


def test_predicted_fall_is_where_more_of_a_token_lowers_the_entropy():
    """By the derivative's sign at each token of the specification's logits: only the likeliest."""
    logits = np.array([2.0, 1.0, 0.0, -1.0])
    derivative = oracles.entropy_by_logits(logits)
    close(derivative, [-0.326688, 0.116701, 0.130076, 0.079911], 1e-6)
    rows = dataclasses.replace(
        GOLDEN,
        now=np.array([logits - np.log(np.exp(logits).sum())]),
        old=np.zeros((1, 4)),
        mask=np.ones((1, 4)),
        reward=np.ones(1),
        correct=np.ones(1),
        group=np.zeros(1, int),
        entropy=np.full((1, 4), oracles.entropy_of(logits)),
        old_entropy=None,
    )
    mask, _ = masked_kl(given(entropy_drop="predicted"), rows)
    np.testing.assert_array_equal(mask[0], derivative < 0)


# --- readings and switches ------------------------------------------------------------------------


def test_readings_ask_for_what_they_read():
    assert learn_of("tepo").needs == {"old_entropy"}
    assert learn_of("tepo", entropy_drop="ref").needs == {"ref_logp", "ref_entropy"}
    assert learn_of("tepo", entropy_drop="predicted").needs == set()
    assert learn_of("tepo", masked=False).needs == set()
    assert learn_of("tepo", masked=False, entropy_drop="ref").needs == {"ref_logp"}
    assert not learn_of("tepo").needs_reference
    assert learn_of("tepo", entropy_drop="ref").needs_reference
    assert not learn_of("tepo", entropy_drop="ref", beta=0.0).needs_reference
    with pytest.raises(ValueError, match="entropy_drop='new'; allowed: old, ref, predicted"):
        base.make("tepo", BUDGET, entropy_drop="new")


def test_the_kl_is_to_the_policy_of_the_fall():
    """The same differences to the initial policy, and other ones to the old."""
    rows = dataclasses.replace(
        GOLDEN,
        old=GOLDEN.old - 0.5 * GOLDEN.mask,
        reference=GOLDEN.old,
        old_entropy=0 * GOLDEN.old_entropy,
        reference_entropy=GOLDEN.old_entropy,
    )
    mask, kl = masked_kl(given(entropy_drop="ref"), rows)
    np.testing.assert_array_equal(mask, [[1, 0, 1], [0, 0, 0]])
    close(kl.sum() / 5, 0.00112537, 1e-8)
    assert not np.any(masked_kl(given(), rows)[0])


def test_dead_band():
    """A difference of rounding is no fall; a band of 0 is the literal reading."""
    for fall, literal, banded in [(-5e-5, 1, 0), (-2e-4, 1, 1), (0.0, 0, 0), (5e-5, 0, 0)]:
        rows = dataclasses.replace(GOLDEN, entropy=GOLDEN.old_entropy + fall)
        for band, wanted in [(0.0, literal), (1e-4, banded)]:
            mask, _ = masked_kl(given(entropy_band=band), rows)
            np.testing.assert_array_equal(mask, wanted * np.array([[1, 1, 1], [0, 0, 0]]))


def test_ablations_are_the_algorithms_next_to_it():
    assert learn_of("tepo", beta=0.0, token_level=False) == learn_of("gspo")
    assert learn_of("tepo", beta=0.0, sequence_ratio=False) == learn_of("dapo")
    assert learn_of("tepo", beta=0.0).penalties == ()


# --- invariants -----------------------------------------------------------------------------------


def test_equal_lengths_without_kl_are_gspo():
    ragged = oracles.ragged()
    mask = (np.arange(12) % 3 > 0) * np.ones((13, 1))
    now = np.where(ragged.now < 0, ragged.now, -0.3)
    rows = dataclasses.replace(ragged, mask=mask, now=now)
    one, other = (
        run(learn, *make_batch(rows)) for learn in (learn_of("tepo", beta=0.0), learn_of("gspo"))
    )
    assert one[0] == pytest.approx(other[0], rel=1e-6) and abs(one[0]) > 1e-3
    close(one[1], other[1], 1e-8)


def test_duplicating_the_batch_changes_nothing():
    rows = oracles.tiny_softmax()[2]
    twice = {}
    for field in dataclasses.fields(rows):
        value = getattr(rows, field.name)
        more = 2 if field.name == "group" else 0
        twice[field.name] = None if value is None else np.concatenate([value, value + more])
    one = run(learn_of("tepo"), *make_batch(rows))
    two = run(learn_of("tepo"), *make_batch(oracles.Rows(**twice)))
    assert one[0] == pytest.approx(two[0], rel=1e-6)
    close(two[1][:5], one[1][:5] / 2, 1e-8)


def test_without_positive_advantages_there_is_no_kl():
    """To the bit, although entropies fall and log-probs differ; to zero advantages, too."""
    for reward in ([-1.0, -0.5], [0.0, -1.0], [0.0, 0.0]):
        rows = dataclasses.replace(GOLDEN, reward=np.array(reward))
        mask, kl = masked_kl(given(), rows)
        assert not np.any(mask) and not np.any(kl)
        one, other = (run(given(beta=beta), *make_batch(rows)) for beta in (1.0, 0.0))
        assert one[0] == other[0]
        np.testing.assert_array_equal(one[1], other[1])


@pytest.mark.parametrize("reading", ["old", "ref", "predicted"])
def test_the_mask_has_no_gradient(reading):
    stats, batch = jax.tree.map(jnp.asarray, make_batch(oracles.tiny_softmax()[2]))
    learn = learn_of("tepo", entropy_drop=reading)
    scores = score_of(learn, batch)

    def by_entropy(entropy):
        return loss(learn, stats.replace(entropy=entropy), batch, scores)[0]

    assert not np.any(jax.grad(by_entropy)(stats.entropy))


# --- the gradient by hand -------------------------------------------------------------------------


@pytest.mark.parametrize("reading", ["old", "ref", "predicted"])
def test_gradient_of_a_softmax_policy_by_hand(reading):
    """Every token gets `s A / Σ|o|` within the clip, less `β M (1 - exp(-δ)) / Σ|o|`."""
    logits, tokens, rows = oracles.tiny_softmax()
    beta, count, length = 2.0, rows.mask.sum(), rows.mask.sum(axis=1)
    advantage = np.array(oracles.group_z(rows.reward, rows.group))
    level = np.exp((rows.now - rows.old).sum(axis=1) / length)
    inside = ~(((advantage > 0) & (level > 1.2)) | ((advantage < 0) & (level < 0.8)))
    assert 0 < inside.sum() < 5
    other = rows.reference if reading == "ref" else rows.old
    fall = {
        "old": rows.entropy < rows.old_entropy - 1e-4,
        "ref": rows.entropy < rows.reference_entropy - 1e-4,
        "predicted": -rows.now < rows.entropy,
    }[reading]
    mask = (advantage[:, None] > 0) * fall * rows.mask
    assert 0 < mask.sum() < (rows.mask * (advantage[:, None] > 0)).sum()
    coefficient = (level * advantage * inside)[:, None] * rows.mask
    coefficient = coefficient - beta * mask * (1 - np.exp(other - rows.now))
    learn = learn_of("tepo", **WIDE, beta=beta, entropy_drop=reading)
    _, gradient = by_logits(learn, logits, tokens, rows)
    close(gradient, oracles.logits_gradient(logits, tokens, -coefficient / count), 1e-6)


# --- degenerate batches ---------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"entropy_drop": "predicted"}, {"masked": False}])
def test_rows_of_one_token_certain_tokens_and_equal_rewards(settings):
    rows = oracles.tiny_softmax()[2]
    one = np.zeros_like(rows.mask)
    one[:, 0] = 1
    certain = {"now": 0 * rows.now, "entropy": 0 * rows.now}
    for change in ({"mask": one}, certain, {"mask": one} | certain, {"reward": np.ones(5)}):
        stats, batch = make_batch(dataclasses.replace(rows, **change))
        learn = learn_of("tepo", **settings)
        (value, sums), gradient = loss_of(learn, stats, batch, score_of(learn, batch))
        assert np.isfinite(value) and np.all(np.isfinite(gradient))
        assert np.all(np.isfinite(list(sums.values())))
    if "masked" not in settings:  # equal rewards: nothing has a positive advantage
        assert value == 0 and not np.any(gradient)
