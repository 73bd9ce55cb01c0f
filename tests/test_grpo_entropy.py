"""GRPO with an entropy bonus: value and gradient by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from test_learn import by_logits, close, learn_of, make_batch, run

from xrpo_jax.arrays import TokenStats


def test_without_its_bonus_it_is_grpo():
    assert learn_of("grpo_entropy", coefficient=0.0) == learn_of("grpo")


def test_golden_entropy_derivative():
    """Section c.5 of the specification: `-p (log p + H)`."""
    golden = [-0.326688, 0.116701, 0.130076, 0.079911]
    logits = jnp.array([2.0, 1.0, 0.0, -1.0])

    def bonus(logits):
        logp = jax.nn.log_softmax(logits)
        stats = TokenStats(logp=logp[None], entropy=-jnp.sum(jnp.exp(logp) * logp)[None])
        (part,) = learn_of("grpo_entropy", coefficient=1.0).penalties
        return -jnp.sum(part(stats, None, None))

    close(jax.grad(bonus)(logits), golden, 1e-6)
    close(oracles.entropy_by_logits(np.asarray(logits)), golden, 1e-6)


def test_gradient_of_a_softmax_policy_by_hand():
    """Every token gets `r A / (rows |o|)` where GRPO does, and c / (rows |o|) of its entropy's."""
    logits, tokens, rows = oracles.tiny_softmax()
    coefficient = 0.7
    advantage = np.array(oracles.group_z(rows.reward, rows.group))[:, None]
    share = rows.mask / rows.mask.sum(axis=1, keepdims=True) / rows.number
    ratio = np.exp(rows.now - rows.old)
    clipped = ((advantage > 0) & (ratio > 1.2)) | ((advantage < 0) & (ratio < 0.8))
    assert 0 < np.sum(clipped * rows.mask) < rows.mask.sum()
    by_logp = -share * advantage * ratio * ~clipped
    learn = learn_of("grpo_entropy", coefficient=coefficient)
    value, gradient = by_logits(learn, logits, tokens, rows)
    wanted = oracles.logits_gradient(logits, tokens, by_logp, -coefficient * share)
    close(gradient, wanted)
    assert np.abs(wanted - oracles.logits_gradient(logits, tokens, by_logp)).max() > 0.01
    assert value == pytest.approx(oracles.grpo_entropy(rows, coefficient=coefficient), abs=1e-6)


def test_certain_tokens_and_equal_rewards():
    """Only the bonus is left, and it has a maximum where the policy is uniform."""
    rows = oracles.tiny_softmax()[2]
    equal = dataclasses.replace(rows, reward=np.ones(5), now=0 * rows.now, entropy=0 * rows.now)
    value, gradient, sums = run(learn_of("grpo_entropy"), *make_batch(equal))
    assert value == 0 and not np.any(gradient) and np.all(np.isfinite(list(sums.values())))
    logits, tokens = np.zeros((5, 3, 5)), np.zeros((5, 3), int)
    value, gradient = by_logits(learn_of("grpo_entropy"), logits, tokens, equal)
    assert value == pytest.approx(-1e-3 * np.log(5), rel=1e-5)
    close(gradient, 0, 1e-9)
