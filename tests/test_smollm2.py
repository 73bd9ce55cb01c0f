"""A real pretrained model: logits, tokens and text against transformers reading the same GGUF.

`XRPO_SMOLLM2` names the model (a directory or the GGUF file); scripts/fetch_smollm2.sh makes the
directory that is taken otherwise.
"""

import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xrpo_jax import tokenizer
from xrpo_jax.model import compare, export, hf, params
from xrpo_jax.model.source import find

MODEL = os.environ.get(
    "XRPO_SMOLLM2", str(Path(__file__).parents[1] / "checkpoints" / "SmolLM2-135M-Instruct")
)
GOLDEN = np.load(Path(__file__).parent / "golden" / "smollm2.npz")
TEXTS = [str(text) for text in GOLDEN["texts"]]

pytestmark = pytest.mark.skipif(
    not Path(MODEL).exists(), reason=f"{MODEL} is not there: scripts/fetch_smollm2.sh, XRPO_SMOLLM2"
)


@pytest.fixture(scope="module")
def source():
    return find(MODEL)


@pytest.fixture(scope="module")
def model(source):
    """The config and the parameters."""
    return hf.load(source)


def logits(model, tokens) -> np.ndarray:
    with jax.default_matmul_precision("highest"):
        return compare._logits(*model, np.asarray(tokens)[None])[0]


@pytest.mark.parametrize("number", range(len(TEXTS)))
def test_logits_are_those_of_transformers(model, number):
    tokens, best = GOLDEN[f"tokens{number}"], GOLDEN[f"best{number}"]
    found = logits(model, tokens).astype(np.float64)
    np.testing.assert_allclose(found[:, GOLDEN["shown"]], GOLDEN[f"logits{number}"], atol=2e-3)
    total = np.log(np.exp(found).sum(axis=-1))
    np.testing.assert_allclose(total, GOLDEN[f"total{number}"], atol=2e-3)
    ranked = np.argsort(-found, axis=-1)
    np.testing.assert_array_equal(ranked[:, 0], best[:, 0])
    for mine, theirs in zip(ranked[:, :7], best, strict=True):
        assert set(theirs) <= set(mine)  # near ties may change places
    assert found.max() > 10


def test_text_is_cut_as_in_training(source):
    words = tokenizer.load(source.folder)
    for number, text in enumerate(TEXTS):
        assert words.encode(text) == GOLDEN[f"tokens{number}"].tolist()
        assert words.decode(words.encode(text, special=False)) == text
    # Digits one by one, and before that apart from the spaces: [" ="], ["  "], ["5"].
    assert words.encode("x =  5") == [104, 446, 256, 37]
    assert words.encode("1234567") == [33, 34, 35, 36, 37, 38, 39]
    assert words.stop_ids == (2,) and words.vocab_size == 49152


def test_the_chat_template_and_what_the_model_says(model, source):
    words = tokenizer.load(source.folder)
    prompt = words.render([{"role": "user", "content": "What is the capital of France?"}])
    assert prompt == str(GOLDEN["prompt"])
    tokens = words.encode(prompt, begin=False)
    assert tokens == GOLDEN["asked"].tolist()
    # One pass: every greedy token must be the best one after those before it.
    said = GOLDEN["said"].tolist()
    best = logits(model, tokens + said)[len(tokens) - 1 : -1].argmax(axis=-1)
    assert best.tolist() == said
    assert "Paris" in words.decode(said)


def test_it_is_the_model_that_it_says_it_is(model, source):
    config, weights = model
    assert params.count(weights) == 134_515_008
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 9, 3)
    assert (config.rope_theta, config.rms_norm_eps, config.tie_word_embeddings) == (1e5, 1e-5, True)
    assert "apache-2.0" in (source.folder / "LICENSE").read_text()
    raw = json.loads((source.folder / "tokenizer_config.json").read_text())
    assert (raw["bos_token"], raw["eos_token"]) == ("<|im_start|>", "<|im_end|>")


def test_an_export_of_it_passes_the_check(model, source, tmp_path):
    config, weights = model
    export.save(tmp_path / "out", config, weights, dtype="bfloat16", tokenizer_dir=source.folder)
    found = compare.check(tmp_path / "out", config, weights, "bfloat16")
    assert found.reloaded == 0
    assert found.transformers is None or found.transformers < 1e-3 * found.largest
    assert hf.load(tmp_path / "out")[1]["embed"].dtype == jnp.float32
