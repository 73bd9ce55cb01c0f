"""Exports: exact round trips, shards, nothing lost, and a check that sees a wrong export."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny import policy as tiny

from xrpo_jax import checkpoint
from xrpo_jax.arrays import TrainState
from xrpo_jax.model import compare, export, files, hf, params
from xrpo_jax.model.config import LinearScaling, Llama3Scaling, ModelConfig

ROOT = Path(__file__).parents[1]
SIZES = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "eos_token_ids": (2,),
}
LLAMA3 = Llama3Scaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
QWEN2 = {"family": "qwen2", "attention_bias": True}
MODELS = {  # tiny models with what tells these families apart
    "Llama-2": {"family": "llama", "num_kv_heads": 4, "head_dim": 4},
    "Llama-3.1": {"family": "llama", "rope_theta": 500.0, "rope_scaling": LLAMA3},
    "Llama-3.2": {"family": "llama", "rope_scaling": LLAMA3, "tie_word_embeddings": True},
    "Llama with biases": {
        "family": "llama",
        "attention_bias": True,
        "output_bias": True,
        "rope_scaling": LinearScaling(factor=2.0),
    },
    "SmolLM2": {"family": "llama", "rope_theta": 1e5, "tie_word_embeddings": True},
    "Qwen2.5-0.5B": {**QWEN2, "rope_theta": 1e6, "tie_word_embeddings": True},
    "R1-Distill-Qwen": {**QWEN2, "bos_token_id": 1, "eos_token_ids": (2, 5)},
    "Qwen3-0.6B": {"family": "qwen3", "qk_norm": True, "tie_word_embeddings": True},
    "Qwen3-8B": {"family": "qwen3", "qk_norm": True, "head_dim": 8, "pad_token_id": 1},
}


def make(name: str) -> tuple[ModelConfig, dict]:
    config = ModelConfig(**{**SIZES, **MODELS[name]})
    return config, tiny.weights(config)


@pytest.fixture
def model(tmp_path):
    """A saved model, its config and its parameters."""
    config, weights = make("Llama-2")
    export.save(tmp_path / "model", config, weights)
    return tmp_path / "model", config, weights


def rewrite(folder: Path, change) -> None:
    tensors = load_file(folder / files.WEIGHTS)
    change(tensors)
    save_file(tensors, folder / files.WEIGHTS, metadata={"written_by": "xrpo_jax"})


@pytest.mark.parametrize("name", sorted(MODELS))
def test_round_trip_is_exact(name, tmp_path):
    config, weights = make(name)
    export.save(tmp_path / "new" / "model", config, weights)
    again, loaded = hf.load(tmp_path / "new" / "model")
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, loaded, weights)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model"]
    tied = config.tie_word_embeddings
    assert ("lm_head.weight" in load_file(tmp_path / "new/model/model.safetensors")) == (not tied)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_check_agrees_with_transformers(name, tmp_path):
    pytest.importorskip("torch")
    config, weights = make(name)
    for dtype in export.DTYPES:
        export.save(tmp_path / "model", config, weights, dtype=dtype, shard_bytes=5000)
        assert (tmp_path / "model" / files.INDEX).is_file()
        found = compare.check(tmp_path / "model", config, weights, dtype)
        assert found.reloaded == 0 and found.transformers < 1e-5 * found.largest
        assert found.largest > 1 and found.tokens == 64


@pytest.mark.parametrize("name", sorted(MODELS))
def test_greedy_text_is_that_of_transformers(name, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config, weights = make(name)
    tiny.save(tmp_path / "tokenizer")
    export.save(tmp_path / "model", config, weights, tokenizer_dir=tmp_path / "tokenizer")
    tokens = tiny.encode("fade:")
    length = len(tokens) + 16
    padded = np.zeros((1, length), np.int32)
    for end in range(len(tokens), length):
        padded[0, :end] = tokens
        tokens.append(int(compare._logits(config, weights, padded)[0, end - 1].argmax()))

    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    drawn = theirs.generate(
        torch.tensor([words.encode("fade:")]),
        do_sample=False,
        min_new_tokens=16,
        max_new_tokens=16,
        eos_token_id=-1,
    )[0].tolist()
    assert drawn == tokens
    assert words.decode(drawn, skip_special_tokens=True) == tiny.decode(tokens)


def test_shards_hold_every_tensor_once_and_no_more_than_they_may(tmp_path):
    config, weights = make("Qwen3-8B")
    export.save(tmp_path, config, weights, shard_bytes=4000)
    index = json.loads((tmp_path / files.INDEX).read_text())
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert [path.name for path in shards][:1] == [f"model-00001-of-{len(shards):05d}.safetensors"]
    assert len(shards) > 3
    found = {}
    for path in shards:
        tensors = load_file(path)
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert size <= 4000 or len(tensors) == 1
        assert not found.keys() & tensors.keys()
        found |= dict.fromkeys(tensors, path.name)
    assert index["weight_map"] == found and found.keys() == hf.table(config).keys()
    assert index["metadata"]["total_size"] == 4 * params.count(weights)
    jax.tree.map(np.testing.assert_array_equal, hf.load(tmp_path)[1], weights)


def test_bfloat16_is_stored_rounded(model):
    folder, config, weights = model
    export.save(folder, config, weights, dtype="bfloat16")
    stored = load_file(folder / files.WEIGHTS)
    assert {tensor.dtype for tensor in stored.values()} == {np.dtype(ml_dtypes.bfloat16)}
    assert json.loads((folder / files.CONFIG).read_text())["torch_dtype"] == "bfloat16"
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), weights)
    jax.tree.map(np.testing.assert_array_equal, hf.load(folder)[1], rounded)
    assert compare.check(folder, config, weights, "bfloat16").reloaded == 0


def test_a_wrong_export_is_seen(model):
    folder, config, weights = model
    name = "model.layers.1.self_attn.k_proj.weight"
    rewrite(folder, lambda tensors: tensors.update({name: -tensors[name]}))
    with pytest.raises(ValueError, match="gives other logits when it is read again: they differ"):
        compare.check(folder, config, weights, "float32")
    rewrite(folder, lambda tensors: tensors.update({name: np.nan * tensors[name]}))
    with pytest.raises(ValueError, match="differ by nan"):
        compare.check(folder, config, weights, "float32")
    raw = json.loads((folder / files.CONFIG).read_text())
    (folder / files.CONFIG).write_text(json.dumps({**raw, "rope_theta": 5.0}))
    with pytest.raises(ValueError, match="reads back as another model"):
        compare.check(folder, config, weights, "float32")


def test_what_transformers_reads_otherwise_is_seen(model, monkeypatch):
    folder, config, weights = model
    monkeypatch.setattr(compare, "_transformers_logits", lambda *_: np.zeros((2, 32, 24)))
    with pytest.raises(ValueError, match="gives other logits in transformers"):
        compare.check(folder, config, weights, "float32")
    monkeypatch.setattr(compare, "_transformers_logits", lambda *_: None)
    found = compare.check(folder, config, weights, "float32")
    assert found.transformers is None
    assert "transformers was not asked" in compare.describe(found)


def test_save_replaces_only_what_it_wrote(model):
    folder, config, weights = model
    changed = {**weights, "final_norm": weights["final_norm"] + 1}
    export.save(folder, config, changed, shard_bytes=4000)
    export.save(folder, config, changed)
    np.testing.assert_array_equal(hf.load(folder)[1]["final_norm"], changed["final_norm"])
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    assert len(list(folder.glob("*.safetensors"))) == 1

    (folder / "notes.txt").write_text("precious")
    with pytest.raises(FileExistsError, match="was not written by this function"):
        export.save(folder, config, weights)
    (folder / "notes.txt").unlink()
    save_file(load_file(folder / files.WEIGHTS), folder / files.WEIGHTS)  # by another program
    with pytest.raises(FileExistsError):
        export.save(folder, config, weights)
    np.testing.assert_array_equal(hf.load(folder)[1]["final_norm"], changed["final_norm"])


def test_one_foreign_shard_is_enough_to_keep_the_folder(model):
    folder, config, weights = model
    export.save(folder, config, weights, shard_bytes=4000)
    file = sorted(folder.glob("*.safetensors"))[1]
    save_file(load_file(file), file)
    with pytest.raises(FileExistsError, match="was not written by this function"):
        export.save(folder, config, weights)
    (folder / "config.json").write_text("mine")
    for path in folder.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(FileExistsError):  # no weights by which to know it
        export.save(folder, config, weights)


def test_a_save_that_fails_leaves_the_old_model_and_nothing_else(model, monkeypatch):
    folder, config, weights = model

    def full_disk(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(export, "_write_shard", full_disk)
    with pytest.raises(OSError, match="disk full"):
        export.save(folder, config, jax.tree.map(np.zeros_like, weights))
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    jax.tree.map(np.testing.assert_array_equal, hf.load(folder)[1], weights)


def test_save_refuses_what_does_not_fit(model, tmp_path):
    _, config, weights = model
    other = tmp_path / "other"
    with pytest.raises(ValueError, match="dtype = 'float16' is not supported; allowed"):
        export.save(other, config, weights, dtype="float16")
    with pytest.raises(ValueError, match="shard_bytes = 0; allowed"):
        export.save(other, config, weights, shard_bytes=0)
    with pytest.raises(ValueError, match=r"missing or unknown \['head'\]"):
        export.save(other, config, {k: v for k, v in weights.items() if k != "head"})
    with pytest.raises(ValueError, match=r"final_norm has shape \(3,\)"):
        export.save(other, config, {**weights, "final_norm": np.ones(3)})
    with pytest.raises(FileNotFoundError, match="holds no tokenizer; needed is one of.*: copy it"):
        export.save(other, config, weights, tokenizer_dir=tmp_path)
    assert not other.exists()


def test_tokenizer_generation_config_and_licence_come_along(model, tmp_path):
    folder, config, weights = model
    assert json.loads((folder / files.GENERATION).read_text()) == {"eos_token_id": 2}
    source = tmp_path / "source"
    source.mkdir()
    taken = ("tokenizer.json", "chat_template.jinja", "generation_config.json", "LICENSE")
    for name in (*taken, "README.md", "config.json"):
        (source / name).write_text(name)
    for _ in range(2):  # also over an earlier one
        export.save(folder, config, weights, tokenizer_dir=source)
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.json", "model.safetensors", *taken}
    assert (folder / files.GENERATION).read_text() == "generation_config.json"
    assert hf.load(folder)[0] == config


def test_parameters_alone_are_restored_or_the_reason_is_told(tmp_path):
    manager = checkpoint.open_manager(tmp_path, 9)
    state = TrainState(params=tiny.weights(seed=4), optimizer={"mean": np.zeros(3)})
    checkpoint.save(manager, 7, state, {})
    manager.close()
    place = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), state.params
    )
    step, found = checkpoint.restore_params(tmp_path, None, like)
    assert step == 7 and {leaf.sharding for leaf in jax.tree.leaves(found)} == {place}
    jax.tree.map(np.testing.assert_array_equal, found, state.params)

    wrong = jax.ShapeDtypeStruct((3,), np.float32, sharding=place)
    with pytest.raises(ValueError, match="checkpoints/7 cannot be .*only one side has.*'head"):
        checkpoint.restore_params(tmp_path, 7, {**like, "head": wrong})
    with pytest.raises(ValueError, match="only one side has.*'embed'"):
        checkpoint.restore_params(tmp_path, 7, {k: v for k, v in like.items() if k != "embed"})
    with pytest.raises(ValueError, match=r"shape \(16,\) there and \(3,\) here.*another --step"):
        checkpoint.restore_params(tmp_path, 7, {**like, "final_norm": wrong})
    with pytest.raises(FileNotFoundError, match=r"holds no step 6; allowed: \[7\]"):
        checkpoint.restore_params(tmp_path, 6, like)
    with pytest.raises(FileNotFoundError, match="nowhere/checkpoints holds no checkpoint; give"):
        checkpoint.restore_params(tmp_path / "nowhere", None, like)
    assert not (tmp_path / "nowhere").exists()


def run_script(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "scripts/export_hf.py", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def test_the_script_exports_a_checkpoint_of_a_run(tmp_path):
    source = tiny.save(tmp_path / "source")
    manager = checkpoint.open_manager(tmp_path / "run", 9)
    for step in (1, 2):
        state = TrainState(params=tiny.weights(seed=step), optimizer={"mean": np.zeros(3)})
        checkpoint.save(manager, step, state, {})
    manager.close()
    (tmp_path / "run" / "config.json").write_text(json.dumps({"init_from": str(source)}))
    out = tmp_path / "out"
    for step, flags in ((2, ()), (1, ("--step=1", "--shard_gb=0.000004"))):
        done = run_script(f"--workdir={tmp_path / 'run'}", f"--out={out}", *flags)
        assert done.returncode == 0, done.stderr
        assert f"step {step} of" in done.stdout and "checked: 64 tokens" in done.stdout
        assert "use it with --config.init_from=" in done.stdout
        jax.tree.map(np.testing.assert_array_equal, hf.load(out)[1], tiny.weights(seed=step))
        assert (out / "tokenizer.json").is_file()
    done = run_script(f"--workdir={tmp_path / 'run'}", f"--out={out}", "--step=3")
    assert done.returncode == 2 and "holds no step 3; allowed: [1, 2]" in done.stderr
    jax.tree.map(np.testing.assert_array_equal, hf.load(out)[1], tiny.weights(seed=1))


def test_the_script_converts_a_directory_and_refuses_in_one_line(tmp_path):
    source, out = tiny.save(tmp_path / "source"), tmp_path / "out"
    done = run_script(f"--from={source}", f"--out={out}", "--dtype=bfloat16")
    assert done.returncode == 0, done.stderr
    assert hf.load(out)[0] == tiny.MODEL
    for flags, message in (
        ((f"--from={source}", "--workdir=x"), "give either --workdir=RUN or --from=MODEL"),
        ((), "give either --workdir=RUN or --from=MODEL"),
        ((f"--from={source}", "--step=3"), "--step=3 is of a run"),
        ((f"--from={source}", "--shard_gb=0"), "--shard_gb=0.0; allowed: above 0"),
        ((f"--workdir={tmp_path}",), "config.json is missing; --workdir must be"),
    ):
        done = run_script(f"--out={out}", *flags)
        assert done.returncode == 2 and message in done.stderr
        assert done.stderr.count("\n") == 1
    assert hf.load(out)[0] == tiny.MODEL
