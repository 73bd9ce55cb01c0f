"""The model against transformers' logits (stored, and live when torch is there) and invariances."""

import dataclasses
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xrpo_jax.model import decode, export, hf, params, transformer
from xrpo_jax.model.config import LinearScaling, Llama3Scaling, ModelConfig

GOLDEN = Path(__file__).parent / "golden"
SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = Llama3Scaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
CONFIGS = {
    "llama_biases": ModelConfig(
        family="llama",
        attention_bias=True,
        output_bias=True,
        rope_scaling=LinearScaling(factor=4.0),
        **SMALL,
    ),
    "llama3": ModelConfig(family="llama", rope_theta=500.0, rope_scaling=LLAMA3, **SMALL),
    "qwen2": ModelConfig(family="qwen2", attention_bias=True, **SMALL),
    "qwen3": ModelConfig(
        family="qwen3", qk_norm=True, tie_word_embeddings=True, **{**SMALL, "head_dim": 16}
    ),
}


@pytest.fixture(autouse=True)
def no_rank_promotion():
    with jax.numpy_rank_promotion("raise"):
        yield


def random_params(config, seed=0):
    """Parameters in which every tensor, norms and biases too, differs from its neutral value."""
    generator = np.random.default_rng(seed)

    def make(param):
        noise = 0.2 * generator.standard_normal(param.shape)
        return jnp.asarray(noise + (param.init == "ones"), jnp.float32)

    return jax.tree.map(make, params.declare(config))


QWEN3 = CONFIGS["qwen3"]
WEIGHTS = random_params(QWEN3)


# Always jitted: run eagerly, every small operation is compiled by itself.
forward = partial(
    jax.jit(transformer.forward, static_argnames=("config", "dtype")), dtype=jnp.float32
)


@partial(jax.jit, static_argnames=("config", "dtype"))
def run(weights, config, tokens, positions, valid, dtype=jnp.float32):
    hidden = forward(weights, config, tokens, positions, valid, dtype=dtype)
    return transformer.logits(weights, config, hidden)


def whole(tokens):
    """The tokens with positions and validity of rows without padding."""
    tokens = jnp.asarray(tokens, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    return tokens, positions, jnp.ones(tokens.shape, bool)


def some_tokens(rows, slots, seed=0):
    return np.random.default_rng(seed).integers(1, SMALL["vocab_size"], (rows, slots))


def pad(rows, before, slots):
    """Rows of unequal length, row i after before[i] slots of garbage, as arrays [N, slots]."""
    tokens = some_tokens(len(rows), slots, seed=99)
    valid = np.zeros(tokens.shape, bool)
    for row, (text, start) in enumerate(zip(rows, before, strict=True)):
        tokens[row, start : start + len(text)] = text
        valid[row, start : start + len(text)] = True
    positions = np.maximum(np.cumsum(valid, axis=1) - 1, 0)
    return jnp.asarray(tokens), jnp.asarray(positions), jnp.asarray(valid)


BATCH = whole(some_tokens(2, 12))
# Eight rows of one to five tokens, some padded on the left, the last without any token.
PADDED = pad([some_tokens(1, 1 + n % 5, seed=n)[0] for n in range(7)] + [[]], [0, 1] * 4, 6)


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.glob("*/") if path.is_dir()))
def test_logits_equal_transformers_golden(name):
    config, weights = hf.load(GOLDEN / name)
    golden = np.load(GOLDEN / name / "logits.npz")
    got = run(weights, config, *whole(golden["tokens"]))
    np.testing.assert_allclose(got, golden["logits"], atol=1e-4)
    assert np.abs(golden["logits"]).max() > 1  # else the tolerance would mean nothing


def test_goldens_cover_the_families():
    configs = [hf.load(path.parent)[0] for path in GOLDEN.glob("*/logits.npz")]
    assert {config.family for config in configs} == {"llama", "qwen2", "qwen3"}
    assert {config.tie_word_embeddings for config in configs} == {True, False}
    assert any(isinstance(config.rope_scaling, Llama3Scaling) for config in configs)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_our_export_gives_the_same_logits_in_transformers(name, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = CONFIGS[name]
    weights = random_params(config)
    tokens = some_tokens(2, 24)
    ours = run(weights, config, *whole(tokens))
    export.save(tmp_path / "ours", config, weights)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert model.dtype == torch.float32
    with torch.no_grad():
        theirs = model(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(ours, theirs, atol=1e-4)

    model.save_pretrained(tmp_path / "theirs")
    again, reloaded = hf.load(tmp_path / "theirs")
    assert dataclasses.replace(again, max_position_embeddings=1) == dataclasses.replace(
        config, max_position_embeddings=1
    )
    jax.tree.map(np.testing.assert_array_equal, reloaded, weights)


@pytest.mark.parametrize("field", ["rope_theta", "rope_scaling", "rms_norm_eps"])
def test_number_of_the_config_is_used(field):
    other = {"rope_theta": 50.0, "rope_scaling": LLAMA3, "rms_norm_eps": 0.5}[field]
    before = run(WEIGHTS, QWEN3, *BATCH)
    after = run(WEIGHTS, dataclasses.replace(QWEN3, **{field: other}), *BATCH)
    assert np.abs(before - after).max() > 1e-2


def test_llama3_frequencies_by_hand():
    """Factor 8, context 64: f = 1 turns 10 times and stays, the slowest is divided by 8."""
    got = transformer.frequencies(CONFIGS["llama3"])
    plain = 500.0 ** -np.array([0, 0.25, 0.5, 0.75])
    assert got[0] == 1.0
    np.testing.assert_allclose(got[2:], plain[2:] / 8, rtol=1e-6)
    blend = (64 * plain[1] / (2 * np.pi) - 1) / (4 - 1)
    np.testing.assert_allclose(got[1], plain[1] * (blend + (1 - blend) / 8), rtol=1e-5)


def test_causality_by_gradient():
    tokens = jnp.arange(1, 7)[None]  # a token a slot, so that a row of `embed` is a slot
    batch = whole(tokens)

    def by_slot(embed):
        return jnp.sum(forward({**WEIGHTS, "embed": embed}, QWEN3, *batch)[0] ** 3, axis=-1)

    gradient = jax.jit(jax.jacrev(by_slot))(WEIGHTS["embed"])  # [slot, vocabulary, width]
    touched = np.any(gradient[:, 1:7] != 0, axis=-1)
    np.testing.assert_array_equal(touched, np.tril(np.ones((6, 6), bool)))


@partial(jax.jit, static_argnames=("config", "length"))
def teacher_forced(weights, config, prompts, starts, answers, length):
    """Hidden states of `answers` [N,T] fed one by one, from slot `starts` of their rows on."""
    page = decode.prefill(weights, config, prompts, dtype=jnp.float32)
    cache = decode.empty(config, len(prompts), length, jnp.float32)
    cache = jax.tree.map(lambda old, new: old.at[:, :, : new.shape[2]].set(new), cache, page)
    prepared, out = decode.for_decoding(weights, config, jnp.float32), []
    for step in range(answers.shape[1]):
        hidden, cache = decode.step(
            prepared, config, answers[:, step], starts + step, cache, dtype=jnp.float32
        )
        out.append(hidden)
    return jnp.stack(out, axis=1), decode.logits(prepared, hidden)


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_cached_decode_equals_full_forward(family):
    """Rows at different places, each after its own prompt; the last prompt token is fed again."""
    config = CONFIGS[family]
    weights = random_params(config)
    lengths = np.array([3, 5, 4])
    prompts = [some_tokens(1, n, seed=n)[0] for n in lengths]
    answers = jnp.asarray(some_tokens(3, 5, seed=7))
    tokens, _, _ = pad(prompts, [0, 0, 0], 5)
    fed = jnp.concatenate([jnp.array([prompt[-1] for prompt in prompts])[:, None], answers], axis=1)
    starts = jnp.asarray(lengths - 1)
    decoded, last = teacher_forced(weights, config, tokens, starts, fed, length=11)
    for row, prompt in enumerate(prompts):
        alone = whole(jnp.concatenate([prompt, answers[row]])[None])
        expected = forward(weights, config, *alone)[0, len(prompt) - 1 :]
        np.testing.assert_allclose(decoded[row], expected, atol=2e-5)
        wanted = transformer.logits(weights, config, expected[-1:])
        np.testing.assert_allclose(last[row], wanted[0], atol=1e-4)


@pytest.mark.parametrize("scattered", [False, True])
def test_a_token_beyond_the_cache_is_written_nowhere(scattered):
    prepared = decode.for_decoding(WEIGHTS, QWEN3, jnp.float32)
    cache = decode.empty(QWEN3, 2, 4, jnp.float32)
    token = jnp.array([1, 2])
    step = jax.jit(decode.step, static_argnames=("config", "dtype", "scattered"))
    _, after = step(
        prepared, QWEN3, token, jnp.array([4, 1]), cache, dtype=jnp.float32, scattered=scattered
    )
    for leaf in jax.tree.leaves(after):
        assert not np.any(leaf[0]) and np.any(leaf[1, :, 1]) and not np.any(leaf[1, :, 2:])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_both_ways_to_write_a_cache_are_the_same_to_the_bit(dtype):
    prepared = decode.for_decoding(WEIGHTS, QWEN3, dtype)
    step = jax.jit(decode.step, static_argnames=("config", "dtype", "scattered"))
    found = []
    for scattered in (False, True):
        cache, hiddens = decode.empty(QWEN3, 3, 6, dtype), []
        for place in range(4):
            token, position = jnp.array([1, 2, 3]) + place, jnp.array([0, 3, 1]) + place
            hidden, cache = step(
                prepared, QWEN3, token, position, cache, dtype=dtype, scattered=scattered
            )
            hiddens.append(hidden)
        found.append((hiddens, cache))
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_padding_side_and_amount_and_the_other_rows_change_nothing():
    rows = [some_tokens(1, n, seed=n)[0] for n in (4, 7, 1)]
    want = run(WEIGHTS, QWEN3, *pad(rows, [0, 0, 0], 7))
    np.testing.assert_allclose(
        run(WEIGHTS, QWEN3, *whole(rows[0][None]))[0], want[0, :4], atol=2e-5
    )
    for slots, before in [(7, [3, 0, 6]), (16, [0, 0, 0]), (16, [12, 9, 4])]:
        got = run(WEIGHTS, QWEN3, *pad(rows, before, slots))
        for row, (start, text) in enumerate(zip(before, rows, strict=True)):
            part = got[row, start : start + len(text)]
            np.testing.assert_allclose(part, want[row, : len(text)], atol=2e-5)


def test_bfloat16_is_close_and_logits_stay_float32():
    exact = run(WEIGHTS, QWEN3, *BATCH)
    rough = run(WEIGHTS, QWEN3, *BATCH, dtype=jnp.bfloat16)
    assert rough.dtype == jnp.float32
    assert 0 < np.abs(exact - rough).mean() < 0.02 * np.abs(exact).mean()
    cache = jax.eval_shape(
        partial(decode.prefill, config=QWEN3, dtype=jnp.bfloat16), WEIGHTS, tokens=BATCH[0]
    )
    assert {cache.keys[0].dtype, cache.values[1].dtype} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_declaration_and_initialisation_agree(name):
    declared = params.declare(CONFIGS[name])
    shapes = jax.eval_shape(partial(params.init, CONFIGS[name]), jax.random.key(0))
    assert (
        params.count(declared) == params.count(shapes) == params.count(random_params(CONFIGS[name]))
    )

    def check(param, array):
        assert array.shape == param.shape and array.dtype == jnp.float32
        assert len(param.axes) == len(param.shape) == len(set(param.axes))

    jax.tree.map(check, declared, shapes)


def test_initial_values_depend_on_the_name_alone():
    # Sizes that make many shapes equal: each distinct one costs a compilation.
    sizes = {"vocab_size": 32, "intermediate_size": 32, "num_kv_heads": 4}
    config = ModelConfig(family="llama", **{**SMALL, **sizes})
    plain = params.init(config, jax.random.key(0))
    biases = {"attention_bias": True, "output_bias": True}
    other = params.init(dataclasses.replace(config, **biases), jax.random.key(0))
    other["layers"] = {name: other["layers"][name] for name in plain["layers"]}
    jax.tree.map(np.testing.assert_array_equal, plain, other)
    assert 0.9 < np.std(plain["head"]) / config.initializer_range < 1.1
    assert not np.array_equal(plain["layers"]["gate"], plain["layers"]["up"])
    assert np.all(plain["final_norm"] == 1)


def test_shapes_are_checked_at_the_door():
    tokens, positions, valid = whole(some_tokens(2, 4))
    with pytest.raises(ValueError, match="equal shapes of rank 2"):
        run(WEIGHTS, QWEN3, tokens, positions[:1], valid)
    cache = decode.empty(QWEN3, 3, 6, jnp.float32)
    for position, message in ((positions[:1, 0], "equal shapes of rank 1"), (0, "do not fit")):
        position = positions[:, 0] if message == "do not fit" else position
        with pytest.raises(ValueError, match=message):
            decode.step(WEIGHTS, QWEN3, tokens[:, 0], position, cache, dtype=jnp.float32)
