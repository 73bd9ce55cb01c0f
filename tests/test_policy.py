"""`token_stats` against full logits in NumPy, and what must not change it."""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xrpo_jax import config, policy
from xrpo_jax.model import params as parameters
from xrpo_jax.model import transformer
from xrpo_jax.model.config import ModelConfig
from xrpo_jax.policy import Policy, token_stats

MODEL = ModelConfig(
    family="llama",
    vocab_size=24,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    initializer_range=0.4,
)
ROWS, COLUMNS = 5, 11
TOKENS = np.random.default_rng(0).integers(0, 24, (ROWS, COLUMNS)).astype(np.int32)
LENGTH = np.array([11, 7, 1, 0, 10], np.int32)  # 1 has nothing to predict, 0 is a padding row
REAL = (np.arange(COLUMNS) >= 1) & (np.arange(COLUMNS) < LENGTH[:, None])
BASE = Policy(model=MODEL, temperature=0.7)


@pytest.fixture(scope="module", autouse=True)
def quick():
    """XLA does not optimise what runs once: compiling is most of this file's time."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def params():
    return parameters.init(MODEL, jax.random.key(0))


@functools.cache
def compiled(policy):
    """Stats of (params, tokens, length), and the gradient of a sum that reads all of them."""
    shares = np.random.default_rng(1).standard_normal((2, ROWS, COLUMNS)).astype(np.float32)

    def total(params, tokens, length):
        stats = token_stats(policy, params, tokens, length)
        return jnp.sum(shares[0] * stats.logp + shares[1] * stats.entropy), stats

    return jax.jit(jax.grad(total, has_aux=True))


def same(one, other, tolerance=2e-6):
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(left, right, atol=tolerance, rtol=1e-5)


def test_token_stats_are_those_of_the_full_logits(params):
    """At the temperature, from logits of every position at once and sums in float64."""
    columns = np.tile(np.arange(COLUMNS), (ROWS, 1))
    logits = jax.jit(
        lambda params: transformer.logits(
            params,
            MODEL,
            transformer.forward(
                params, MODEL, TOKENS, columns, columns < LENGTH[:, None], dtype=jnp.float32
            ),
        )
    )(params)
    scores = np.asarray(logits, np.float64) / 0.7
    logp = scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))
    entropy = -(np.exp(logp) * logp).sum(axis=-1)
    wanted = np.zeros((2, ROWS, COLUMNS))
    for row in range(ROWS):
        for column in range(1, LENGTH[row]):
            wanted[0, row, column] = logp[row, column - 1, TOKENS[row, column]]
            wanted[1, row, column] = entropy[row, column - 1]
    _, stats = compiled(BASE)(params, TOKENS, LENGTH)
    same((stats.logp, stats.entropy), tuple(wanted), 5e-6)
    assert stats.logp.dtype == stats.entropy.dtype == jnp.float32
    assert np.std(stats.entropy[REAL]) > 0.05  # the model is not uniform


def test_what_nothing_predicts_and_padding_are_zero(params):
    """Exactly, with zero gradient of what is padded, whatever tokens lie there."""
    gradient, stats = compiled(BASE)(params, TOKENS, LENGTH)
    for values in (stats.logp, stats.entropy):
        assert np.all(np.asarray(values)[~REAL] == 0) and np.all(np.asarray(values)[REAL] != 0)
    columns = np.arange(COLUMNS)
    other = np.where(columns < LENGTH[:, None], TOKENS, (TOKENS + 5) % 24)
    for left, right in zip(
        jax.tree.leaves((gradient, stats)),
        jax.tree.leaves(compiled(BASE)(params, other, LENGTH)),
        strict=True,
    ):
        np.testing.assert_array_equal(left, right)


def test_chunks_and_rematerialisation_change_nothing(params):
    """Stats and gradient, where the last chunk has 2 of the 10 positions; stats, where it has 1."""
    wanted = compiled(BASE)(params, TOKENS, LENGTH)
    other = compiled(dataclasses.replace(BASE, chunk=4, remat=True))
    same(wanted, other(params, TOKENS, LENGTH))
    last = jax.jit(functools.partial(token_stats, dataclasses.replace(BASE, chunk=3)))
    same(wanted[1], last(params, TOKENS, LENGTH))


def test_bfloat16_computes_near_and_returns_float32(params):
    low = jax.jit(functools.partial(token_stats, dataclasses.replace(BASE, dtype="bfloat16")))
    stats = low(params, TOKENS, LENGTH)
    assert stats.logp.dtype == stats.entropy.dtype == jnp.float32
    error = np.abs(stats.logp - compiled(BASE)(params, TOKENS, LENGTH)[1].logp)[REAL]
    assert 1e-4 < error.mean() < 0.05


# --- given logits -------------------------------------------------------------------------------


@pytest.fixture
def given(monkeypatch):
    """(logp, entropy) f32[n] by `token_stats` of given logits [n,V] at ids i[n], one a row."""
    monkeypatch.setattr(policy.transformer, "forward", lambda params, *_, **__: params)
    monkeypatch.setattr(policy.transformer, "logits", lambda params, _, hidden: hidden)

    def stats(logits, ids, temperature=1.0):
        hidden = jnp.pad(jnp.asarray(logits)[:, None], ((0, 0), (0, 1), (0, 0)))
        tokens = jnp.stack([jnp.zeros_like(jnp.asarray(ids)), jnp.asarray(ids)], axis=1)
        at = Policy(model=MODEL, temperature=temperature)
        found = token_stats(at, hidden, tokens, jnp.full(len(tokens), 2))
        return found.logp[:, 1], found.entropy[:, 1]

    return stats


def test_temperature_divides_logits(given):
    """Logits 2, 1, 0 at temperature 1/2 by hand."""
    logp, entropy = given(np.float32([[2, 1, 0]]), [2], temperature=0.5)
    chance = np.exp([4, 2, 0]) / np.exp([4, 2, 0]).sum()
    assert float(logp[0]) == pytest.approx(np.log(chance[2]), rel=1e-6)
    assert float(entropy[0]) == pytest.approx(-(chance * np.log(chance)).sum(), rel=1e-6)


CASES = pathlib.Path(__file__).parents[2] / "shared" / "cases" / "numerics.jsonl"


def read_cases():
    if not CASES.exists():
        return []
    rows = [json.loads(line) for line in CASES.read_text().splitlines()]
    return [row for row in rows if row["input"]["op"] in ("logprob", "entropy", "onpolicy_ratio")]


@pytest.mark.skipif(not CASES.exists(), reason="../shared/cases is not there")
@pytest.mark.parametrize("case", read_cases(), ids=lambda case: f"{case['id']}-{case['fault']}")
def test_public_fault(case, given):
    args, expected = case["input"]["args"], case["expected"]
    logits = np.atleast_2d(np.array(args["logits"], dtype=object).astype(np.float32))
    temperature = args.get("temperature", 1.0)
    if "error_names" in expected:
        settings = config.default()
        settings.rollout.temperature = temperature
        with pytest.raises(ValueError, match="temperature=0"):
            config.parse(settings)
        return
    tolerance = {"atol": expected["atol"], "rtol": 0}
    if case["input"]["op"] == "entropy":
        ids = np.zeros(len(logits), np.int32)
        (_, found), gradient = (
            given(logits, ids),
            jax.grad(lambda logits: jnp.sum(given(logits, ids)[1]))(jnp.asarray(logits)),
        )
        assert np.all(np.isfinite(gradient))
    elif case["input"]["op"] == "logprob":
        found, _ = given(logits, np.array(args["ids"], np.int32), temperature)
    else:
        logp, _ = given(logits, np.array([args["sampled_id"]], np.int32), temperature)
        np.testing.assert_allclose(logp, expected["logp"], **tolerance)
        found = jnp.exp(logp - logp)[0]  # old log-probs are the trainer's own
    np.testing.assert_allclose(found, expected["value"], **tolerance)
