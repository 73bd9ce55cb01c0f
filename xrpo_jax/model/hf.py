"""Hugging Face checkpoints to parameters and back, through one table checked from both sides."""

import dataclasses
import json
import math
import os
import shutil
import tempfile
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import traverse_util
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from xrpo_jax.model.config import ModelConfig
from xrpo_jax.model.params import declare
from xrpo_jax.tokenizer import VOCABULARIES

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
_WRITTEN_BY = {"format": "pt", "written_by": "xrpo_jax"}  # marks a folder as ours to replace
_SAVED_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
_READ_DTYPES = ("F32", "F16", "BF16")
_HEAD = "lm_head.weight"

# Our name -> (Hugging Face's name, how many leading axes are inputs). Torch stores a linear map
# as [out, in], so those are transposed; 0 marks a vector and None a tensor that is kept as it is.
_TOP = {
    "embed": ("model.embed_tokens.weight", None),
    "final_norm": ("model.norm.weight", 0),
    "head": (_HEAD, 1),
}
_LAYER = {
    "attention_norm": ("input_layernorm.weight", 0),
    "query": ("self_attn.q_proj.weight", 1),
    "key": ("self_attn.k_proj.weight", 1),
    "value": ("self_attn.v_proj.weight", 1),
    "output": ("self_attn.o_proj.weight", 2),
    "query_bias": ("self_attn.q_proj.bias", 0),
    "key_bias": ("self_attn.k_proj.bias", 0),
    "value_bias": ("self_attn.v_proj.bias", 0),
    "output_bias": ("self_attn.o_proj.bias", 0),
    "query_norm": ("self_attn.q_norm.weight", 0),
    "key_norm": ("self_attn.k_norm.weight", 0),
    "mlp_norm": ("post_attention_layernorm.weight", 0),
    "gate": ("mlp.gate_proj.weight", 1),
    "up": ("mlp.up_proj.weight", 1),
    "down": ("mlp.down_proj.weight", 1),
}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a Hugging Face tensor lives in our tree; `layer` indexes the stacked axis, if any."""

    path: tuple[str, ...]
    layer: int | None
    shape: tuple[int, ...]  # in our layout, without the layer axis
    inputs: int | None  # leading axes that are inputs, as in the table

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """The tensor's shape in the file."""
        if self.inputs is None:
            return self.shape
        if self.inputs == 0:
            return (math.prod(self.shape),)
        return math.prod(self.shape[self.inputs :]), math.prod(self.shape[: self.inputs])


def table(config: ModelConfig) -> dict[str, Place]:
    """Returns the place of every tensor that a checkpoint of this architecture must have."""
    places = {}
    for path, param in traverse_util.flatten_dict(declare(config)).items():
        if path[0] == "layers":
            name, inputs = _LAYER[path[1]]
            for layer in range(config.num_layers):
                place = Place(path, layer, param.shape[1:], inputs)
                places[f"model.layers.{layer}.{name}"] = place
        else:
            name, inputs = _TOP[path[0]]
            places[name] = Place(path, None, param.shape, inputs)
    return places


def load(path: str | os.PathLike, dtype=jnp.float32) -> tuple[ModelConfig, dict]:
    """Reads config.json and the safetensors (one file or shards with an index) of a directory.

    The parameters are cast to `dtype`. Raises FileNotFoundError naming a missing file, ValueError
    naming tensors that are unknown, missing, stored twice, of a wrong shape or of another dtype
    than float32, float16 and bfloat16.
    """
    folder = Path(path)
    config = ModelConfig.from_hf(json.loads(_existing(folder / CONFIG).read_text()))
    places = table(config)
    flat = {
        path: np.empty(param.shape, np.float32)
        for path, param in traverse_util.flatten_dict(declare(config)).items()
    }
    seen: dict[str, str] = {}
    unknown, spare_head = [], None
    for file in _weight_files(folder):
        with _open(file) as tensors:
            for name in tensors.keys():  # not a dict: it has no __iter__
                if name in seen:
                    raise ValueError(f"{name} is stored twice, in {seen[name]} and {file.name}")
                seen[name] = file.name
                if name.endswith("rotary_emb.inv_freq"):
                    continue  # derived from the config; old exports still carry it
                if name == _HEAD and config.tie_word_embeddings:
                    spare_head = _read(tensors, name)
                elif name not in places:
                    unknown.append(name)
                else:
                    place = places[name]
                    target = flat[place.path]
                    value = _from_hf(name, _read(tensors, name), place)
                    target[... if place.layer is None else place.layer] = value
    missing = [name for name in places if name not in seen]
    if unknown or missing:
        raise ValueError(
            f"{folder} does not hold a {config.family} of its own {CONFIG}: "
            f"unknown tensors {_some(unknown)}, missing tensors {_some(missing)}"
        )
    if spare_head is not None and not np.array_equal(spare_head, flat["embed",]):
        raise ValueError(
            f"{_HEAD} differs from {_TOP['embed'][0]} although {CONFIG} has "
            "tie_word_embeddings = true; set it to false to use both"
        )
    return config, traverse_util.unflatten_dict(
        {path: jnp.asarray(value, dtype) for path, value in flat.items()}
    )


def save(
    path: str | os.PathLike,
    config: ModelConfig,
    params: dict,
    dtype: str = "float32",
    tokenizer_dir: str | os.PathLike | None = None,
) -> None:
    """Writes a directory that transformers loads: config, weights and, if given, tokenizer files.

    All or nothing: a sibling folder is written, then renamed. Raises FileExistsError when `path`
    holds anything that an earlier `save` did not write, ValueError on an unknown dtype or on
    parameters that do not fit the config.
    """
    if dtype not in _SAVED_DTYPES:
        raise ValueError(f"dtype = {dtype!r} is not supported; allowed: {tuple(_SAVED_DTYPES)}")
    folder = Path(path).absolute()
    if not _replaceable(folder):
        raise FileExistsError(
            f"{folder} is not empty and was not written by this function; remove it or choose "
            "another path"
        )
    flat = traverse_util.flatten_dict(params)
    _check_params(config, flat)
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        fresh.chmod(0o755)  # mkdtemp makes it private, which an export is not meant to be
        raw = {**config.to_hf(), "torch_dtype": dtype}
        (fresh / CONFIG).write_text(json.dumps(raw, indent=2) + "\n")
        tensors = {
            name: _to_hf(flat[place.path], place, _SAVED_DTYPES[dtype])
            for name, place in table(config).items()
        }
        save_file(tensors, fresh / WEIGHTS, metadata=_WRITTEN_BY)
        os.chmod(fresh / WEIGHTS, 0o644)  # safetensors leaves it readable by its owner alone
        if tokenizer_dir is not None:
            _copy_tokenizer(Path(tokenizer_dir), fresh)
        if folder.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
            folder.rename(old / folder.name)  # kept until the new one is in its place
            fresh.rename(folder)
            shutil.rmtree(old)
        else:
            fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _existing(file: Path) -> Path:
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} is missing; a model directory needs {CONFIG} and either {WEIGHTS} or {INDEX} "
            "with the shards it lists"
        )
    return file


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file() or not (folder / INDEX).is_file():
        return [_existing(folder / WEIGHTS)]
    shards = json.loads((folder / INDEX).read_text())["weight_map"].values()
    return [_existing(folder / shard) for shard in sorted(set(shards))]


def _open(file: Path):
    try:
        return safe_open(file, framework="np")
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged ({error}); copy or download it again") from error


def _read(tensors, name: str) -> np.ndarray:
    stored = tensors.get_slice(name).get_dtype()
    if stored not in _READ_DTYPES:
        raise ValueError(f"{name} has dtype {stored}; allowed: {_READ_DTYPES}")
    return tensors.get_tensor(name).astype(np.float32)


def _from_hf(name: str, tensor: np.ndarray, place: Place) -> np.ndarray:
    if tensor.shape != place.hf_shape:
        raise ValueError(f"{name} has shape {tensor.shape}; the config asks for {place.hf_shape}")
    return (tensor.T if place.inputs else tensor).reshape(place.shape)


def _to_hf(stacked, place: Place, dtype: np.dtype) -> np.ndarray:
    tensor = np.asarray(stacked if place.layer is None else stacked[place.layer])
    if place.inputs:
        tensor = tensor.reshape(place.hf_shape[::-1]).T
    # Contiguous, because save_file writes the memory as it lies and ignores strides.
    return np.ascontiguousarray(tensor.reshape(place.hf_shape).astype(dtype))


def _check_params(config: ModelConfig, flat: dict) -> None:
    declared = traverse_util.flatten_dict(declare(config))
    if flat.keys() != declared.keys():
        strange = sorted("/".join(path) for path in flat.keys() ^ declared.keys())
        raise ValueError(f"the parameters do not fit the config: missing or unknown {strange}")
    for path, param in declared.items():
        if flat[path].shape != param.shape:
            raise ValueError(
                f"{'/'.join(path)} has shape {flat[path].shape}; the config asks for {param.shape}"
            )


def _replaceable(folder: Path) -> bool:
    """Whether nothing is lost: absent, empty, or holding only files of an earlier `save`."""
    if not folder.exists():
        return True
    if not folder.is_dir():
        return False
    names = {entry.name for entry in folder.iterdir()}
    if not names:
        return True
    if WEIGHTS not in names or not names <= {CONFIG, WEIGHTS, *TOKENIZER_FILES}:
        return False
    with _open(folder / WEIGHTS) as tensors:
        return (tensors.metadata() or {}).get("written_by") == _WRITTEN_BY["written_by"]


def _copy_tokenizer(source: Path, target: Path) -> None:
    present = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    if not set(present) & set(VOCABULARIES):
        raise FileNotFoundError(f"{source} holds no tokenizer; needed is one of {VOCABULARIES}")
    for name in present:
        shutil.copyfile(source / name, target / name)


def _some(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:8]) or "none"
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
