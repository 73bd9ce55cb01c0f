"""Drawing a token, against a float64 sort of the vocabulary and against chi-square tests.

Shapes: N rows · V vocabulary.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from scipy import stats

from xrpo_jax.sampling import BLOCK, COLDEST, HOTTEST, NOTHING, Method, draw_token, floor

METHODS = {
    "plain": Method(),
    "hot": Method(temperature=1.7),
    "cold": Method(temperature=0.5),
    "top_k": Method(top_k=4),
    "top_p": Method(top_p=0.7),
    "all": Method(temperature=1.3, top_k=9, top_p=0.8),
}
LAST = np.nextafter(np.float32(1), np.float32(0))  # the largest number that is drawn: 1 - 2^-24
SIZES = (40, 3 * BLOCK + 17)

draw = jax.jit(draw_token, static_argnums=2)
find_floor = jax.jit(floor, static_argnums=1)


def oracle(row: np.ndarray, method: Method) -> np.ndarray:
    return np.array(oracles.token_chances(row, method.temperature, method.top_k, method.top_p))


def kept(logits: np.ndarray, method: Method) -> np.ndarray:
    """The tokens bool[N,V] above the floor; the last columns make up a multiple of 16."""
    padded = np.pad(logits, ((0, 0), (0, -logits.shape[1] % 16)), constant_values=-np.inf)
    found = find_floor(jnp.asarray(padded), method)
    return logits > (-np.inf if found is None else np.asarray(found)[:, None])


def on_a_grid(rows: int, size: int, step: float, seed: int = 0) -> np.ndarray:
    """Logits that are multiples of `step`: those that do not tie differ in float32, too."""
    noise = np.random.default_rng(seed).normal(0, 2, (rows, size))
    return (np.round(noise / step) * step).astype(np.float32)


def off_the_edge(logits: np.ndarray, method: Method) -> np.ndarray:
    """The rows in which no token ends within rounding of `top_p`."""
    rows = []
    for i, row in enumerate(logits):
        chances = np.sort(oracle(row, Method(temperature=method.temperature, top_k=method.top_k)))
        if method.top_p == 1 or np.abs(np.cumsum(chances[::-1]) - method.top_p).min() > 3e-7:
            rows.append(i)
    return np.array(rows, int)


# --- what is kept --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [5, *SIZES])
@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 1}, {"top_k": 4}, {"top_k": 39}, {"top_k": 300}, {"top_k": 10**6},
        {"top_p": 1e-9}, {"top_p": 0.01}, {"top_p": 0.3}, {"top_p": 0.95}, {"top_p": 0.9999},
        {"top_p": 0.9, "temperature": 3.0}, {"top_p": 0.9, "temperature": 0.3},
        {"top_k": 20, "top_p": 0.9}, {"top_k": 3, "top_p": 0.5, "temperature": 1.5},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_kept_is_what_a_sort_keeps(size, settings):
    method = Method(**settings)
    for step in (2.0**-12, 0.5):  # with the second most logits tie
        logits = on_a_grid(12, size, step)
        rows = off_the_edge(logits, method)
        assert len(rows) > 8 or settings.get("top_p", 1) > 0.999
        expected = np.array([oracle(row, method) > 0 for row in logits])
        np.testing.assert_array_equal(kept(logits, method)[rows], expected[rows])


@pytest.mark.parametrize("settings", [{"top_k": 50}, {"top_p": 0.95}, {"top_k": 40, "top_p": 0.9}])
def test_a_vocabulary_of_a_language_model(settings):
    method, logits = Method(**settings), on_a_grid(3, 49_152, 2.0**-18)
    rows = off_the_edge(logits, method)
    expected = np.array([oracle(row, method) > 0 for row in logits])
    assert len(rows)
    np.testing.assert_array_equal(kept(logits, method)[rows], expected[rows])


def test_logits_that_differ_in_the_last_bit_do_not_tie_in_top_k():
    """Nor around 0, where floating-point numbers lie densest. Their probabilities are the same."""
    logits = np.array([[0.0, 1e-30, -1e-30, -0.0, -1e30]], np.float32)
    for top_k, expected in ((1, [1]), (2, [0, 1, 3]), (3, [0, 1, 3]), (4, [0, 1, 2, 3])):
        assert np.flatnonzero(kept(logits, Method(top_k=top_k))[0]).tolist() == expected
    near = np.array([[20.0, np.nextafter(np.float32(1), np.float32(2)), 1.0]], np.float32)
    assert kept(near, Method(top_k=2)).tolist() == [[True, True, False]]
    assert kept(-near, Method(top_k=2)).tolist() == [[False, True, True]]


def test_half_precision_is_read_as_it_is():
    """Many logits tie in 8 bits."""
    logits = jnp.asarray(on_a_grid(6, 8 * BLOCK, 2.0**-12)).astype(jnp.bfloat16)
    whole = logits.astype(jnp.float32)
    uniform = np.random.default_rng(0).random(6, np.float32)
    for method in METHODS.values():
        for found, expected in zip(
            draw(logits, uniform, method), draw(whole, uniform, method), strict=True
        ):
            np.testing.assert_array_equal(found, expected)
    method = Method(top_k=30)
    expected = np.array([oracle(row, method) > 0 for row in np.asarray(whole)])
    assert (expected.sum(axis=1) > 30).any()
    np.testing.assert_array_equal(kept(np.asarray(whole), method), expected)


def test_the_likeliest_is_always_kept_and_the_impossible_never():
    logits = np.full((4, 40), -np.inf, np.float32)
    logits[:, 7], logits[1:, 9], logits[2, 11] = 3.0, 3.0, -2.0
    logits[3] = -1e30
    for temperature in (1e-9, 1.0, 1e9):
        for settings in ({}, {"top_k": 1}, {"top_p": 1e-9}, {"top_k": 39}, {"top_p": 0.999999}):
            found = kept(logits, Method(temperature=temperature, **settings))
            assert found[0].nonzero()[0].tolist() == [7]
            assert found[1].nonzero()[0].tolist() == [7, 9]
            assert found[2, [7, 9]].all() and not found[2, np.isinf(logits[2])].any()
            assert found[3].all()


# --- what is drawn -------------------------------------------------------------------------------


@functools.cache
def sweep(size: int, method: Method, count: int = 2048):
    """Logits f32[V], chances f64[V] by the oracle, tokens and log-probs of `count` even numbers."""
    logits = on_a_grid(1, size, 2.0**-12, seed=size)[0]
    uniform = ((np.arange(count) + 0.5) / count).astype(np.float32)
    tokens, logp = draw(jnp.broadcast_to(logits, (count, size)), uniform, method)
    return logits, oracle(logits, method), np.asarray(tokens), np.asarray(logp)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", METHODS)
def test_log_probs_are_those_of_the_distribution_drawn_from(name, size):
    _, chances, tokens, logp = sweep(size, METHODS[name])
    assert (chances[tokens] > 0).all()
    np.testing.assert_allclose(logp, np.log(chances[tokens]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", METHODS)
def test_every_token_has_its_share_of_the_unit_interval(name, size):
    """Over even numbers each is drawn as often as its probability says, to one at either end."""
    _, chances, tokens, _ = sweep(size, METHODS[name])
    counts = np.bincount(tokens, minlength=size)
    assert np.abs(counts - chances * len(tokens)).max() < 1 + 0.01 * len(tokens) ** 0.5
    order = np.flatnonzero(counts)
    assert (np.diff(tokens) >= 0).all()  # the sum is inverted in the order of the vocabulary
    assert order.tolist() == sorted(set(tokens.tolist()))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", METHODS)
def test_tokens_are_drawn_by_their_probabilities(name, size):
    count, parts = 30_000, 10
    logits, chances, _, _ = sweep(size, METHODS[name])
    counts = np.zeros(size)
    generator = np.random.default_rng(3)
    for _ in range(parts):
        uniform = generator.random(count // parts, np.float32)
        rows = jnp.broadcast_to(jnp.asarray(logits), (len(uniform), size))
        counts += np.bincount(draw(rows, uniform, METHODS[name])[0], minlength=size)
    assert not counts[chances == 0].any()
    rare = chances * count < 5  # they share a cell, as the chi-square's approximation wants
    cells = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(chances[~rare], chances[rare].sum()) * count
    assert stats.chisquare(cells[wanted > 0], wanted[wanted > 0]).pvalue > 1e-3


@pytest.mark.parametrize("settings", [{}, {"top_k": 1}, {"top_p": 0.5}, {"temperature": 0.0}])
def test_one_certain_token_is_always_drawn(settings):
    uniform = np.array([0.0, 0.3, LAST, 1.0], np.float32)
    for place in (0, BLOCK - 1, BLOCK, 2 * BLOCK + 5, 3 * BLOCK - 2):
        logits = np.full((4, 3 * BLOCK - 1), -np.inf, np.float32)
        logits[:, place] = -7.0
        token, logp = draw(jnp.asarray(logits), uniform, Method(**settings))
        assert token.tolist() == [place] * 4 and not np.asarray(logp).any()


@pytest.mark.parametrize("size", [40, 3 * BLOCK + 17, 49_152])
@pytest.mark.parametrize("shape", ["flat", "peaked", "ends"])
def test_the_ends_of_the_unit_interval_draw_what_is_possible(size, shape):
    """The first token that can be drawn at 0; at the other end one of the last, by rounding."""
    generator = np.random.default_rng(1)
    logits = generator.normal(0, 2, (8, size)).astype(np.float32)
    if shape == "flat":
        logits[:] = 0.1
    if shape == "peaked":
        logits[np.arange(8), generator.integers(0, size, 8)] = 60.0
    if shape == "ends":
        logits[:, [*range(3), *range(size - 3, size)]] = -np.inf
    for method in (Method(), Method(temperature=3.0), Method(top_p=0.9), Method(top_k=11)):
        possible = kept(logits, method) & np.isfinite(logits)
        first = np.asarray(draw(jnp.asarray(logits), np.zeros(8, np.float32), method)[0])
        last, logp = map(np.asarray, draw(jnp.asarray(logits), np.full(8, LAST), method))
        for i in range(8):
            underflow = logits[i] - logits[i].max() < -80 * method.temperature
            assert first[i] == np.flatnonzero(possible[i] & ~underflow)[0]
            assert possible[i, last[i]] and np.isfinite(logp[i])
            beyond = oracle(logits[i], method)[last[i] + 1 :].sum()
            assert beyond < 2e-6


def test_no_rounding_at_a_block_s_edge_draws_the_impossible():
    """Where the sums round, what is left of a number within its block may be below 0."""
    generator = np.random.default_rng(6)
    logits = generator.normal(0, 2, 40 * BLOCK).astype(np.float32)
    logits.reshape(-1, BLOCK)[:, [0, 1, 64, -2, -1]] = -np.inf
    chances = oracle(logits, Method())
    edges = np.cumsum(chances.reshape(-1, BLOCK).sum(axis=1))[:-1].astype(np.float32)
    steps = edges[:, None] + np.arange(-12, 13) * np.spacing(edges)[:, None]
    uniform = steps.astype(np.float32).reshape(-1)
    rows = jnp.broadcast_to(jnp.asarray(logits), (len(uniform), len(logits)))
    token, logp = map(np.asarray, draw(rows, uniform, Method()))
    assert (chances[token] > 0).all() and np.isfinite(logp).all()
    assert len(set(token // BLOCK)) == 40


def test_greedy_takes_the_first_of_the_likeliest():
    logits = np.random.default_rng(0).normal(size=(6, 3 * BLOCK + 17)).astype(np.float32)
    logits[0, [5, 200, 399]] = 9.0
    logits[1, [399, 400]] = 9.0
    logits[2] = -3.0
    uniform = np.linspace(0, LAST, 6, dtype=np.float32)
    token, logp = draw(jnp.asarray(logits), uniform, Method(temperature=0.0))
    assert token.tolist() == np.argmax(logits, axis=1).tolist() and not np.asarray(logp).any()


def test_what_is_too_unlikely_for_float32_is_never_drawn():
    logits = np.zeros((3, 2 * BLOCK), np.float32)
    logits[:, ::2] = -NOTHING - 1.0
    uniform = np.array([0.0, 0.5, LAST], np.float32)
    for scale in (1.0, 1e-6, 1e6):
        for settings in ({}, {"top_k": 200}, {"top_p": 0.9999}):
            method = Method(temperature=scale, **settings)
            token, logp = draw(jnp.asarray(logits * scale), uniform, method)
            assert (np.asarray(token) % 2 == 1).all()
            # Of the 128 that are equally likely none is left out.
            np.testing.assert_allclose(logp, -np.log(BLOCK), atol=1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_a_row_depends_on_itself_alone(name):
    """To the bit, whatever rows are beside it and how many."""
    size, method = 40 * BLOCK, METHODS[name]
    logits = np.random.default_rng(2).normal(0, 3, (64, size)).astype(np.float32)
    uniform = np.random.default_rng(4).random(64, np.float32)
    token, logp = map(np.asarray, draw(jnp.asarray(logits), uniform, method))
    for rows in ([0], [3, 1], [9, 8, 63], list(range(5, 21))):
        some = draw(jnp.asarray(logits[rows]), uniform[rows], method)
        assert np.asarray(some[0]).tolist() == token[rows].tolist()
        assert np.asarray(some[1]).tobytes() == logp[rows].tobytes()
    # A row that takes all passes of the search beside it changes nothing, either.
    logits[1:] = np.where(logits[1:] > 0, 1.0, 0.0)
    beside = draw(jnp.asarray(logits), uniform, method)
    assert np.asarray(beside[0])[0] == token[0]
    assert np.asarray(beside[1])[:1].tobytes() == logp[:1].tobytes()


@pytest.mark.parametrize("temperature", [COLDEST, HOTTEST])
def test_the_ends_of_the_temperatures_draw_what_is_possible(temperature):
    logits = np.array([[40.0, -40.0, 40.0, -np.inf]] * 2, np.float32)
    uniform = np.array([0.0, LAST], np.float32)
    for settings in ({}, {"top_k": 2}, {"top_p": 0.7}):
        method = Method(temperature=temperature, **settings)
        token, logp = map(np.asarray, draw(jnp.asarray(logits), uniform, method))
        assert token.tolist() == [0, 2]
        assert np.isfinite(logp).all() and (logp <= 0).all()


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"temperature": -0.1}, r"temperature=-0.1; allowed: 0 \(greedy\) or 1e-9 to 1e9"),
        ({"temperature": float("inf")}, "temperature=inf; allowed: 0"),
        ({"temperature": float("nan")}, "temperature=nan; allowed: 0"),
        ({"temperature": 1e39}, r"temperature=1e\+39; allowed: 0"),
        ({"temperature": 1e-46}, "temperature=1e-46; allowed: 0"),
        ({"top_k": -1}, "top_k=-1; allowed: 0"),
        ({"top_p": 0.0}, "top_p=0.0; allowed: above 0"),
        ({"top_p": 1.5}, "top_p=1.5; allowed: above 0, at most 1"),
    ],
)
def test_a_method_must_make_sense(settings, message):
    with pytest.raises(ValueError, match=message):
        Method(**settings)
