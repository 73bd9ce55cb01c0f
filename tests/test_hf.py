"""Hugging Face directories: layout, shards, and an error that names what is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from xrpo_jax import mesh
from xrpo_jax.model import export, files, hf, params
from xrpo_jax.model.config import LinearScaling, Llama3Scaling, ModelConfig

SMALL = {
    "family": "llama",
    "vocab_size": 24,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 6,
}
QWEN2 = {
    "model_type": "qwen2",
    "vocab_size": 24,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": None,
    "rope_theta": 1e6,
    "use_sliding_window": False,
    "sliding_window": 32768,
    "max_window_layers": 1,
    "eos_token_id": [7, 9],
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def random_params(config):
    generator = np.random.default_rng(0)
    return jax.tree.map(
        lambda param: jnp.asarray(generator.standard_normal(param.shape), jnp.float32),
        params.declare(config),
    )


@pytest.fixture
def model(tmp_path):
    """A saved model, its config and its parameters."""
    config = ModelConfig(**SMALL)
    weights = random_params(config)
    export.save(tmp_path / "model", config, weights)
    return tmp_path / "model", config, weights


def rewrite(folder: Path, change) -> None:
    """Applies `change` to the dict of tensors in a model directory."""
    tensors = load_file(folder / files.WEIGHTS)
    change(tensors)
    save_file(tensors, folder / files.WEIGHTS)


def set_config(folder: Path, **changes) -> None:
    raw = json.loads((folder / files.CONFIG).read_text())
    (folder / files.CONFIG).write_text(json.dumps({**raw, **changes}))


def shard(folder: Path, **extra: np.ndarray) -> None:
    """Splits the weights into two shards with an index; `extra` goes into both."""
    tensors = load_file(folder / files.WEIGHTS)
    (folder / files.WEIGHTS).unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[:5], names[5:])):
        file = f"model-{number}.safetensors"
        save_file({name: tensors[name] for name in part} | extra, folder / file)
        weight_map |= {name: file for name in part}
    (folder / files.INDEX).write_text(json.dumps({"weight_map": weight_map}))


FAMILIES = {
    "llama": {
        "attention_bias": True,
        "output_bias": True,
        "rope_scaling": LinearScaling(factor=2.0),
    },
    "qwen2": {"attention_bias": True, "tie_word_embeddings": True, "eos_token_ids": (3,)},
    "qwen3": {"qk_norm": True, "rope_theta": 123.0, "eos_token_ids": (3, 5), "pad_token_id": 1},
}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_round_trip_is_exact(family, tmp_path):
    config = ModelConfig(**{**SMALL, "family": family, **FAMILIES[family]})
    weights = random_params(config)
    export.save(tmp_path / "new" / "model", config, weights)
    again, loaded = hf.load(tmp_path / "new" / "model")
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, loaded, weights)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(loaded))
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["model"]


def test_layout_is_out_by_in_with_heads_in_order(model):
    folder, _, weights = model
    tensors = load_file(folder / files.WEIGHTS)
    query = weights["layers"]["query"][1]  # [width, heads, size]
    stored = tensors["model.layers.1.self_attn.q_proj.weight"]  # [heads * size, width]
    np.testing.assert_array_equal(stored[2 * 6 + 5], query[:, 2, 5])
    output = weights["layers"]["output"][0]  # [heads, size, width]
    stored = tensors["model.layers.0.self_attn.o_proj.weight"]  # [width, heads * size]
    np.testing.assert_array_equal(stored[:, 3 * 6 + 1], output[3, 1])
    np.testing.assert_array_equal(tensors["lm_head.weight"], weights["head"].T)


def test_shards_give_the_same(model):
    folder, _, weights = model
    shard(folder)
    jax.tree.map(np.testing.assert_array_equal, hf.load(folder)[1], weights)


def test_inverse_frequencies_are_ignored(model):
    folder, _, weights = model
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(folder, lambda tensors: tensors.update({name: np.ones(3, np.float32)}))
    jax.tree.map(np.testing.assert_array_equal, hf.load(folder)[1], weights)


def test_head_of_a_tied_model_is_ignored_only_if_equal(model):
    folder, _, weights = model
    set_config(folder, tie_word_embeddings=True)
    with pytest.raises(ValueError, match="lm_head.weight differs from model.embed_tokens.weight"):
        hf.load(folder)
    embed = np.array(weights["embed"])
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": embed}))
    assert "head" not in hf.load(folder)[1]


def test_float16_and_bfloat16_are_read_as_float32(model):
    folder, _, weights = model
    halves = {"model.norm.weight": np.float16, "model.embed_tokens.weight": jnp.bfloat16}

    def change(tensors):
        tensors.update({name: tensors[name].astype(dtype) for name, dtype in halves.items()})

    rewrite(folder, change)
    loaded = hf.load(folder)[1]
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded)} == {np.dtype(np.float32)}
    np.testing.assert_array_equal(loaded["final_norm"], weights["final_norm"].astype(np.float16))
    np.testing.assert_array_equal(loaded["embed"], weights["embed"].astype(jnp.bfloat16))
    np.testing.assert_array_equal(loaded["head"], weights["head"])


def test_every_parameter_is_placed_where_it_is_asked_for(model):
    folder, _, weights = model
    everywhere = mesh.everywhere(mesh.make())
    loaded = hf.load(folder, everywhere)[1]
    assert all(leaf.sharding == everywhere for leaf in jax.tree.leaves(loaded))
    jax.tree.map(np.testing.assert_array_equal, loaded, weights)
    assert len(hf.load(folder)[1]["embed"].devices()) == 1


MEASURE = """
import sys

import jax

from xrpo_jax.model import hf, params

def kilobytes(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))

jax.block_until_ready(jax.device_put(1.0))
for folder in sys.argv[1:]:
    before = kilobytes("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")  # the peak from here on
    weights = hf.load(folder)[1]
    print((kilobytes("VmHWM") - before) * 1024 / (4 * params.count(weights)))
    del weights
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_loading_takes_little_more_memory_than_the_parameters(tmp_path):
    sizes = {"vocab_size": 24000, "hidden_size": 256, "intermediate_size": 1024, "num_layers": 16}
    heads = {"num_heads": 8, "num_kv_heads": 8, "head_dim": 32, "tie_word_embeddings": True}
    config = ModelConfig(family="llama", **sizes, **heads)
    weights = jax.tree.map(lambda p: np.ones(p.shape, np.float32), params.declare(config))
    export.save(tmp_path / "one", config, weights, dtype="bfloat16")
    export.save(tmp_path / "many", config, weights, shard_bytes=10_000_000)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "one"), str(tmp_path / "many")],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    one, many = map(float, done.stdout.split())
    assert 0.9 < one < 1.3 and many < 1.3


def drop(name):
    return lambda folder: rewrite(folder, lambda tensors: tensors.pop(name))


def put(name, value):
    return lambda folder: rewrite(folder, lambda tensors: tensors.update({name: value}))


ONES = np.ones(8, np.float32)
BROKEN = {
    "unknown": (
        put("model.norm.bias", ONES),
        "unknown tensors model.norm.bias, missing tensors none",
    ),
    "missing": (
        drop("model.layers.1.mlp.up_proj.weight"),
        "missing tensors model.layers.1.mlp.up_p",
    ),
    "shape": (
        put("model.norm.weight", np.ones(9, np.float32)),
        r"model.norm.weight has shape \(9,\)",
    ),
    "transposed": (
        lambda folder: rewrite(
            folder,
            lambda tensors: tensors.update(
                {"lm_head.weight": np.ascontiguousarray(tensors["lm_head.weight"].T)}
            ),
        ),
        r"lm_head.weight has shape \(8, 24\) in .*model.safetensors; the config asks for \(24, 8\)",
    ),
    "dtype": (put("model.norm.weight", np.ones(8, np.int8)), "model.norm.weight has dtype I8"),
    "twice": (
        lambda folder: shard(folder, **{"extra.weight": ONES}),
        "extra.weight is stored twice, in model-0.safetensors and model-1.safetensors",
    ),
    "other_config": (
        lambda folder: set_config(folder, num_hidden_layers=3),
        "layers.2.input_layer",
    ),
}


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_broken_weights_are_named(name, model):
    damage, message = BROKEN[name]
    damage(model[0])
    with pytest.raises(ValueError, match=message):
        hf.load(model[0])


def test_nothing_is_read_before_all_names_and_shapes_are_right(model, monkeypatch):
    folder, _, _ = model
    put("model.norm.weight", np.ones(9, np.float32))(folder)
    monkeypatch.setattr(files, "_read", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises(ValueError, match="has shape"):
        hf.load(folder)


@pytest.mark.parametrize("keep", [3, 200, -20], ids=["length", "header", "tensors"])
def test_a_truncated_file_is_named_with_the_cure(model, keep):
    file = model[0] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match="model.safetensors is damaged .*; copy or download it"):
        hf.load(model[0])


def test_a_truncated_shard_is_named_with_the_cure(model):
    shard(model[0])
    file = model[0] / "model-1.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="model-1.safetensors is damaged .*; copy or download it"):
        hf.load(model[0])


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("text", [b'{"model_type": ', b"\xff\xfe", b""])
def test_damaged_json_is_named_with_the_cure(model, name, text):
    shard(model[0])
    (model[0] / name).write_bytes(text)
    with pytest.raises(ValueError, match=f"{name} is damaged .*; copy or download it again"):
        hf.load(model[0])


def test_json_of_something_else_is_named(model):
    folder, _, _ = model
    shard(folder)
    (folder / files.INDEX).write_text("{}")
    with pytest.raises(ValueError, match="index.json has no weight_map; copy or download it again"):
        hf.load(folder)
    (folder / files.CONFIG).write_text("[]")
    with pytest.raises(ValueError, match="config.json holds a list, not an object"):
        hf.load(folder)


def test_a_config_that_cannot_be_honoured_names_the_file(model):
    set_config(model[0], hidden_act="gelu")
    with pytest.raises(ValueError, match="model/config.json: hidden_act = 'gelu' .* allowed"):
        hf.config_of(model[0])
    set_config(model[0], hidden_act="silu", num_attention_heads="four")
    with pytest.raises(ValueError, match="model/config.json: "):
        hf.config_of(model[0])


def test_missing_files_are_named(model, tmp_path):
    folder, _, _ = model
    with pytest.raises(FileNotFoundError, match="nowhere/config.json is missing; a model dir"):
        hf.load(tmp_path / "nowhere")
    shard(folder)
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-1.safetensors is missing"):
        hf.load(folder)
    (folder / files.INDEX).unlink()
    with pytest.raises(FileNotFoundError, match="model.safetensors is missing; a model directory"):
        hf.load(folder)
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(FileNotFoundError, match="only PyTorch's .bin files are there; save the"):
        hf.load(folder)
    (folder / files.CONFIG).unlink()
    (folder / "model.Q8_0.gguf").touch()
    with pytest.raises(FileNotFoundError, match="give the file itself, .*model/model.Q8_0.gguf"):
        hf.load(folder)


def test_qwen2_config_as_the_hub_has_it():
    config = ModelConfig.from_hf(QWEN2)
    assert (config.head_dim, config.rope_theta, config.eos_token_ids) == (2, 1e6, (7, 9))
    assert (config.attention_bias, config.output_bias, config.qk_norm) == (True, False, False)
    assert not config.tie_word_embeddings and config.rope_scaling is None


@pytest.mark.parametrize(
    "places",
    [
        {"rope_theta": 5.0, "rope_scaling": LLAMA3},
        {"rope_theta": 5.0, "rope_scaling": {**LLAMA3, "type": "llama3"}},
        {"rope_parameters": {"rope_theta": 5.0, **LLAMA3}},
        {"rope_scaling": {"rope_theta": 5.0, **LLAMA3}},
        {"rope_theta": 5.0, "rope_scaling": None, "rope_parameters": LLAMA3},
    ],
)
def test_rope_is_found_in_every_place(places):
    config = ModelConfig.from_hf({**QWEN2, "rope_theta": None, **places})
    assert config.rope_theta == 5.0
    assert config.rope_scaling == Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    )
    assert ModelConfig.from_hf(config.to_hf()) == config


def test_fields_that_may_be_absent():
    raw = {key: value for key, value in QWEN2.items() if key not in ("head_dim", "rope_theta")}
    assert ModelConfig.from_hf(raw).rope_theta == 10000.0
    assert ModelConfig.from_hf({**raw, "model_type": "qwen3"}).head_dim == 128
    raw.pop("num_key_value_heads")
    assert ModelConfig.from_hf({**raw, "model_type": "llama"}).num_kv_heads == 4
    with pytest.raises(ValueError, match="no num_key_value_heads"):
        ModelConfig.from_hf(raw)


REFUSED = {
    "model_type": ({"model_type": "gpt2"}, r"model_type = 'gpt2' .* one of \('llama', 'qwen2'"),
    "hidden_act": ({"hidden_act": "gelu"}, "hidden_act = 'gelu' .* allowed: one of .'silu'"),
    "rope": ({"rope_scaling": {"type": "yarn"}}, r"rope_type = 'yarn' .* 'linear', 'llama3'"),
    "rope_twice": ({"rope_parameters": {"rope_theta": 2.0}}, "rope_theta = .* the same value"),
    "llama3_part": ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
    "partial": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    "window": ({"use_sliding_window": True}, "sliding_window = 32768"),
    "window_types": (
        {
            "use_sliding_window": True,
            "max_window_layers": 2,
            "layer_types": ["full_attention", "sliding_attention"],
        },
        "sliding_window = 32768",
    ),
    "mlp_bias": ({"mlp_bias": True}, "mlp_bias = True"),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "absent": ({"hidden_size": None}, "config.json has no hidden_size"),
    "odd_head": ({"head_dim": 3}, "head_dim = 3 .* even"),
    "heads": ({"num_key_value_heads": 3}, "num_kv_heads = 3 .* divisor of num_heads = 4"),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_unsupported_config_is_refused_by_name(name):
    changes, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf({**QWEN2, **changes})


def test_a_window_switched_on_for_no_layer_is_accepted():
    assert ModelConfig.from_hf({**QWEN2, "use_sliding_window": True, "max_window_layers": 2})


@pytest.mark.parametrize(
    "changes",
    [{"family": "qwen2"}, {"attention_bias": True}, {"qk_norm": True}, {"family": "qwen3"}],
)
def test_config_that_hugging_face_cannot_express_is_refused(changes):
    with pytest.raises(ValueError, match="is not supported; allowed: .*(qwen2|qwen3)"):
        ModelConfig(**{**SMALL, **changes})
