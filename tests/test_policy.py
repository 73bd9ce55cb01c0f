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
# Three prompts that two rows each continue; a length of 0 is a padding row.
PROMPTS, SHARE, PROMPT_COLUMNS, COLUMNS = 3, 2, 4, 9
ROWS = PROMPTS * SHARE
_draws = np.random.default_rng(0)
PROMPT = _draws.integers(0, 24, (PROMPTS, PROMPT_COLUMNS)).astype(np.int32)
PROMPT_LENGTH = np.array([4, 1, 3], np.int32)
TOKENS = _draws.integers(0, 24, (ROWS, COLUMNS)).astype(np.int32)
LENGTH = np.array([9, 5, 1, 0, 8, 9], np.int32)
REAL = np.arange(COLUMNS) < LENGTH[:, None]
INPUTS = (PROMPT, PROMPT_LENGTH, TOKENS, LENGTH)
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
    """Stats of (params, *INPUTS), and the gradient of a sum that reads all of them."""
    shares = np.random.default_rng(1).standard_normal((2, ROWS, COLUMNS)).astype(np.float32)

    def total(params, *inputs):
        stats = token_stats(policy, params, *inputs)
        return jnp.sum(shares[0] * stats.logp + shares[1] * stats.entropy), stats

    return jax.jit(jax.grad(total, has_aux=True))


def same(one, other, tolerance=2e-6):
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(left, right, atol=tolerance, rtol=1e-5)


def whole(row):
    """A row as one sequence of its prompt and its completion."""
    prompt = row // SHARE
    return np.concatenate([PROMPT[prompt, : PROMPT_LENGTH[prompt]], TOKENS[row, : LENGTH[row]]])


def test_token_stats_are_those_of_the_full_logits(params):
    """At the temperature, of each row as a sequence of its own, with sums in float64."""
    wanted = np.zeros((2, ROWS, COLUMNS))

    @jax.jit
    def logits_of(params, tokens):
        columns = jnp.arange(tokens.shape[1])[None, :]
        valid = jnp.ones_like(tokens, bool)
        hidden = transformer.forward(params, MODEL, tokens, columns, valid, dtype=jnp.float32)
        return transformer.logits(params, MODEL, hidden)

    for row in range(ROWS):
        tokens, start = whole(row), PROMPT_LENGTH[row // SHARE]
        scores = np.asarray(logits_of(params, tokens[None]), np.float64)[0] / 0.7
        logp = scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))
        for column in range(LENGTH[row]):
            before = start + column - 1
            wanted[0, row, column] = logp[before, tokens[before + 1]]
            wanted[1, row, column] = -(np.exp(logp[before]) * logp[before]).sum()
    _, stats = compiled(BASE)(params, *INPUTS)
    same((stats.logp, stats.entropy), tuple(wanted), 5e-6)
    assert stats.logp.dtype == stats.entropy.dtype == jnp.float32
    assert np.std(stats.entropy[REAL]) > 0.05  # the model is not uniform


def test_sharing_a_prompt_changes_nothing(params):
    """Stats and gradient of rows that hold a prompt each."""
    alone = (PROMPT.repeat(SHARE, axis=0), PROMPT_LENGTH.repeat(SHARE), TOKENS, LENGTH)
    same(compiled(BASE)(params, *INPUTS), compiled(BASE)(params, *alone))
    with pytest.raises(ValueError, match="do not continue 2 prompts"):
        token_stats(BASE, params, PROMPT[:2], PROMPT_LENGTH[:2], TOKENS[:5], LENGTH[:5])


def test_rows_of_a_prompt_do_not_see_each_other(params):
    """Another completion beside it leaves a row's stats as they are, to the bit."""
    other = TOKENS.copy()
    other[0] = (other[0] + 7) % 24
    one = compiled(BASE)(params, *INPUTS)[1]
    changed = compiled(BASE)(params, PROMPT, PROMPT_LENGTH, other, LENGTH)[1]
    assert np.abs(one.logp - changed.logp)[0].max() > 0.01
    np.testing.assert_array_equal(one.logp[1:], changed.logp[1:])


def test_padding_is_zero_and_without_effect(params):
    """Exactly, with zero gradient of what is padded, whatever tokens lie there."""
    gradient, stats = compiled(BASE)(params, *INPUTS)
    for values in (stats.logp, stats.entropy):
        assert np.all(np.asarray(values)[~REAL] == 0) and np.all(np.asarray(values)[REAL] != 0)
    padded = np.arange(PROMPT_COLUMNS) >= PROMPT_LENGTH[:, None]
    other = (
        np.where(padded, (PROMPT + 5) % 24, PROMPT),
        PROMPT_LENGTH,
        np.where(REAL, TOKENS, (TOKENS + 5) % 24),
        LENGTH,
    )
    for left, right in zip(
        jax.tree.leaves((gradient, stats)),
        jax.tree.leaves(compiled(BASE)(params, *other)),
        strict=True,
    ):
        np.testing.assert_array_equal(left, right)


def test_tiles_and_rematerialisation_change_nothing(params):
    """Stats and gradient, where the last tile has 4 of the 24 entries; stats, where none has."""
    wanted = compiled(BASE)(params, *INPUTS)
    other = compiled(dataclasses.replace(BASE, tile=10, remat="layer"))
    same(wanted, other(params, *INPUTS), 1e-5)
    last = jax.jit(functools.partial(token_stats, dataclasses.replace(BASE, tile=12)))
    same(wanted[1], last(params, *INPUTS))


def test_the_gradient_is_that_of_differences(params):
    """Of every parameter, along a random direction: no rule is compared with itself alone."""
    gradient, _ = compiled(BASE)(params, *INPUTS)
    shares = np.random.default_rng(1).standard_normal((2, ROWS, COLUMNS)).astype(np.float32)
    stats_of = jax.jit(functools.partial(token_stats, BASE))

    def total(params):
        stats = stats_of(params, *INPUTS)
        return np.sum(shares[0] * np.float64(stats.logp) + shares[1] * np.float64(stats.entropy))

    leaves, tree = jax.tree.flatten(params)
    draws = np.random.default_rng(3)
    for i, (path, slope) in enumerate(jax.tree.leaves_with_path(gradient)):
        way = draws.standard_normal(slope.shape)
        way = np.float32(way / np.linalg.norm(way))

        def moved(by, i=i, way=way):
            return total(tree.unflatten([*leaves[:i], leaves[i] + by * way, *leaves[i + 1 :]]))

        found = (moved(0.01) - moved(-0.01)) / 0.02
        scale = np.linalg.norm(slope) / np.sqrt(slope.size)
        assert found == pytest.approx(np.sum(np.float64(slope) * way), rel=0.02, abs=0.1 * scale), (
            path
        )


@pytest.fixture
def optimised(quick):
    """XLA's CPU backend has not all products of bfloat16 without its optimisations."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.mark.parametrize("remat, tied", [("none", False), ("layer", False), ("none", True)])
def test_the_gradient_of_bfloat16_is_near_and_float32(optimised, remat, tied):
    """Sums are float32: no leaf of it is rounded to the dtype of the products."""
    model = dataclasses.replace(MODEL, tie_word_embeddings=tied)
    base, params = dataclasses.replace(BASE, model=model), parameters.init(model, jax.random.key(0))
    exact, _ = compiled(base)(params, *INPUTS)
    rough, _ = compiled(dataclasses.replace(base, dtype="bfloat16", remat=remat))(params, *INPUTS)
    for (path, one), other in zip(
        jax.tree.leaves_with_path(exact), jax.tree.leaves(rough), strict=True
    ):
        assert other.dtype == jnp.float32, path
        both = np.ravel(one), np.ravel(other)
        cosine = both[0] @ both[1] / np.linalg.norm(both[0]) / np.linalg.norm(both[1])
        assert cosine > 0.99, path
        if other.ndim > 2:  # a product's: in bfloat16 it would be the same there and back
            assert np.any(other.astype(jnp.bfloat16) != other), path


def test_bfloat16_computes_near_and_returns_float32(params):
    low = jax.jit(functools.partial(token_stats, dataclasses.replace(BASE, dtype="bfloat16")))
    stats = low(params, *INPUTS)
    assert stats.logp.dtype == stats.entropy.dtype == jnp.float32
    error = np.abs(stats.logp - compiled(BASE)(params, *INPUTS)[1].logp)[REAL]
    assert 1e-4 < error.mean() < 0.05


# --- given logits -------------------------------------------------------------------------------


@pytest.fixture
def given():
    """(logp, entropy) f32[n] by `policy.given` of given logits [n,V] at ids i[n]."""

    def stats(logits, ids, temperature=1.0, tile=3):
        found = [
            # A model of width 1, whose table of the vocabulary is the row of logits.
            policy.given(
                tile, temperature, jnp.ones((1, 1)), row[:, None], jnp.asarray(ids)[i : i + 1]
            )
            for i, row in enumerate(jnp.asarray(logits))
        ]
        return tuple(jnp.concatenate(values) for values in zip(*found, strict=True))

    return stats


@pytest.mark.parametrize("tile", [5, 8, 4096])
@pytest.mark.parametrize("read", ["logp", "entropy", "both"])
def test_given_tokens_against_the_formulas(tile, read):
    """Values and gradients in float64: p - 1 of the token, and p (log p + H) of the entropy."""
    draws = np.random.default_rng(2)
    hidden, table = draws.standard_normal((6, 4)), 2 * draws.standard_normal((16, 4))
    target = draws.integers(0, 16, 6)
    by_logp, by_entropy = draws.standard_normal((2, 6))
    by_logp, by_entropy = by_logp * (read != "entropy"), by_entropy * (read != "logp")

    def total(hidden, table):
        logp, entropy = policy.given(tile, 0.7, hidden, table, jnp.asarray(target))
        first = jnp.sum(logp * by_logp) if read != "entropy" else 0.0
        return first + (jnp.sum(entropy * by_entropy) if read != "logp" else 0.0), (logp, entropy)

    arrays = (jnp.asarray(hidden, jnp.float32), jnp.asarray(table, jnp.float32))
    (by_hidden, by_table), (found, spread) = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(
        *arrays
    )
    scores = hidden @ table.T / 0.7
    logp = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    chance = np.exp(logp)
    entropy = -(chance * logp).sum(axis=1)
    same((found, spread), (logp[np.arange(6), target], entropy), 5e-6)
    pull = (np.eye(16)[target] - chance) * by_logp[:, None]
    pull = (pull - chance * (logp + entropy[:, None]) * by_entropy[:, None]) / 0.7
    same((by_hidden, by_table), (pull @ table, pull.T @ hidden), 2e-5)


@pytest.mark.parametrize("score", [-100.0, 100.0])
def test_logits_far_from_zero_have_a_finite_gradient(score):
    """Also where the last tile is filled up with entries that nobody has."""
    draws = np.random.default_rng(2)
    hidden = jnp.ones((2, 1))
    table = jnp.asarray(score + draws.standard_normal((10, 1)), jnp.float32)

    def total(tile, hidden, table):
        return sum(map(jnp.sum, policy.given(tile, 1.0, hidden, table, jnp.array([1, 3]))))

    wanted = jax.grad(total, argnums=(1, 2))(5, hidden, table)
    assert np.all(np.isfinite(wanted[0])) and np.all(np.isfinite(wanted[1]))
    same(jax.grad(total, argnums=(1, 2))(4, hidden, table), wanted, 1e-4)


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
