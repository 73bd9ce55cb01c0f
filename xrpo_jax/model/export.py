"""Parameters to a Hugging Face directory, and the proof that it holds the same model.

Weights are written tensor by tensor into a folder beside the target, which is then renamed: a
target is whole or not there, and no second copy of the model is held in memory.
"""

import dataclasses
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from flax import traverse_util

from xrpo_jax.model import files, hf
from xrpo_jax.model.config import ModelConfig
from xrpo_jax.model.files import CONFIG, GENERATION, INDEX, LICENSES, TOKENIZER_FILES, WEIGHTS
from xrpo_jax.model.hf import Place
from xrpo_jax.model.params import declare
from xrpo_jax.tokenizer import VOCABULARIES

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
SHARD_BYTES = 5_000_000_000
_STORED_AS = {"float32": "F32", "bfloat16": "BF16"}
_WRITTEN_BY = {"format": "pt", "written_by": "xrpo_jax"}  # marks a folder as ours to replace
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item:
    """A tensor to be written: its place in our tree and its range of bytes in a file's data."""

    place: Place
    begin: int
    end: int


def require(
    path: str | os.PathLike,
    *,
    dtype: str = "float32",
    tokenizer_dir: str | os.PathLike | None = None,
) -> None:
    """Raises what `save` would raise for these arguments, before there are any parameters.

    FileExistsError when `path` holds anything that an earlier `save` did not write,
    FileNotFoundError without a tokenizer in `tokenizer_dir`, ValueError on an unknown dtype.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype = {dtype!r} is not supported; allowed: {tuple(DTYPES)}")
    folder = Path(path).absolute()
    if not _replaceable(folder):
        raise FileExistsError(
            f"{folder} is not empty and was not written by this function; remove it or choose "
            "another path"
        )
    if tokenizer_dir is None:
        return
    if not any((Path(tokenizer_dir) / name).is_file() for name in VOCABULARIES):
        raise FileNotFoundError(
            f"{tokenizer_dir} holds no tokenizer; needed is one of {VOCABULARIES}: copy it there "
            "from the model that it is for"
        )


def save(
    path: str | os.PathLike,
    config: ModelConfig,
    params: dict,
    *,
    dtype: str = "float32",
    tokenizer_dir: str | os.PathLike | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a directory that transformers loads: configs, weights and, if given, the tokenizer.

    Weights go into one file, or into several of at most `shard_bytes` each with an index. Raises
    the errors of `require`, and ValueError on parameters that do not fit the config.
    """
    require(path, dtype=dtype, tokenizer_dir=tokenizer_dir)
    if shard_bytes <= 0:
        raise ValueError(f"shard_bytes = {shard_bytes}; allowed: a positive number of bytes")
    folder = Path(path).absolute()
    flat = traverse_util.flatten_dict(params)
    _check_params(config, flat)
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        fresh.chmod(0o755)  # mkdtemp makes it private, which an export is not meant to be
        _write_json(fresh / CONFIG, {**config.to_hf(), "torch_dtype": dtype})
        _write_json(fresh / GENERATION, _generation(config))
        if tokenizer_dir is not None:
            for name in (GENERATION, *TOKENIZER_FILES, *LICENSES):
                if (Path(tokenizer_dir) / name).is_file():
                    shutil.copyfile(Path(tokenizer_dir) / name, fresh / name)
        _write_weights(fresh, config, flat, dtype, shard_bytes)
        if folder.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
            folder.rename(old / folder.name)  # kept until the new one is in its place
            fresh.rename(folder)
            shutil.rmtree(old)
        else:
            fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _write_json(file: Path, raw: dict) -> None:
    file.write_text(json.dumps(raw, indent=2) + "\n")


def _generation(config: ModelConfig) -> dict:
    raw = config.to_hf()
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: raw[name] for name in names if raw[name] is not None}


def _write_weights(
    folder: Path, config: ModelConfig, flat: dict, dtype: str, shard_bytes: int
) -> None:
    shards: list[dict[str, Item]] = [{}]
    end = 0
    # In the order of our parameters, so that each is brought to the host once.
    for name, place in hf.table(config).items():
        size = int(np.prod(place.hf_shape)) * DTYPES[dtype].itemsize
        if shards[-1] and end + size > shard_bytes:
            shards.append({})
            end = 0
        shards[-1][name] = Item(place=place, begin=end, end=end + size)
        end += size
    names = [files.SHARD.format(n + 1, len(shards)) for n in range(len(shards))]
    if len(shards) == 1:
        names = [WEIGHTS]
    tensors = _tensors([item.place for shard in shards for item in shard.values()], flat, dtype)
    for name, shard in zip(names, shards, strict=True):
        _write_shard(folder / name, shard, tensors, dtype)
    if len(shards) > 1:
        total = sum(item.end - item.begin for shard in shards for item in shard.values())
        places = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": places})


def _tensors(places: list[Place], flat: dict, dtype: str) -> Iterable[np.ndarray]:
    """Yields the tensors of `places` as they lie in a file, one parameter on the host at a time."""
    path, whole = None, None
    for place in places:
        if place.path != path:
            tensor = whole = None  # before the next one takes memory
            path, whole = place.path, _host(flat[place.path])
        tensor = whole if place.layer is None else whole[place.layer]
        if place.inputs:
            tensor = tensor.reshape(place.hf_shape[::-1]).T
        yield np.ascontiguousarray(tensor.reshape(place.hf_shape).astype(DTYPES[dtype], copy=False))


def _host(leaf) -> np.ndarray:
    # A device array keeps what it once gave to the host as long as it lives; a copy of it does not.
    return np.asarray(leaf.copy() if isinstance(leaf, jax.Array) else leaf)


def _write_shard(
    file: Path, shard: dict[str, Item], tensors: Iterable[np.ndarray], dtype: str
) -> None:
    """Writes one safetensors file: the length of its header, the header, then the tensors."""
    header: dict = {"__metadata__": _WRITTEN_BY}
    for name, item in shard.items():
        header[name] = {
            "dtype": _STORED_AS[dtype],
            "shape": item.place.hf_shape,
            "data_offsets": [item.begin, item.end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    with open(file, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for _ in shard:
            stream.write(next(tensors).reshape(-1).view(np.uint8))


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
    weights = {name for name in names if name == WEIGHTS or _SHARD.fullmatch(name)}
    known = {CONFIG, GENERATION, INDEX, *TOKENIZER_FILES, *LICENSES}
    return bool(weights) and names - weights <= known and all(_ours(folder / w) for w in weights)


def _ours(file: Path) -> bool:
    with files.open_safetensors(file) as tensors:
        return (tensors.metadata() or {}).get("written_by") == _WRITTEN_BY["written_by"]
