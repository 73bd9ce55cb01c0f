"""The files of a Hugging Face model directory: their names, and the tensors stored in them.

A tensor is described before it is read, so that everything that can be wrong is found first. A
file is opened anew for every tensor: the pages of a mapped file count as memory of this process,
and a mapping that is kept would add the whole file to the model's own size.
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

CONFIG, GENERATION = "config.json", "generation_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = "model-{:05d}-of-{:05d}.safetensors"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
LICENSES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "USE_POLICY.md")
READ_DTYPES = ("F32", "F16", "BF16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
    """A tensor in a file, in Hugging Face's layout; `read` returns it as some float dtype."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


def existing(file: Path) -> Path:
    """Returns `file`; FileNotFoundError, saying what a model directory needs, when it is absent."""
    if file.is_file():
        return file
    cure = f"a model directory needs {CONFIG} and either {WEIGHTS} or {INDEX} with its shards"
    if file.name == WEIGHTS and sorted(file.parent.glob("pytorch_model*.bin")):
        cure = "only PyTorch's .bin files are there; save the model again as safetensors"
    if files := sorted(file.parent.glob("*.gguf")):
        cure = f"to load a GGUF file give the file itself, {files[0]}"
    raise FileNotFoundError(f"{file} is missing; {cure}")


def read_json(file: Path) -> dict:
    """Returns the dict in a json file; ValueError names a damaged one and the cure."""
    try:
        raw = json.loads(existing(file).read_bytes())
    except ValueError as error:  # neither json nor UTF-8
        raise ValueError(f"{file} is damaged ({error}); copy or download it again") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{file} holds a {type(raw).__name__}, not an object; download it again")
    return raw


def open_safetensors(file: Path):
    """Opens one file of tensors; ValueError names a damaged or truncated one and the cure."""
    try:
        return safe_open(file, framework="np")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is damaged ({error}); copy or download it again") from error


def safetensors(folder: Path) -> dict[str, Stored]:
    """Describes every tensor of a directory by name, from one file or the shards of an index.

    Raises FileNotFoundError naming a missing file, ValueError naming a damaged file or a tensor
    that is stored twice.
    """
    found: dict[str, Stored] = {}
    for file in _weight_files(folder):
        with open_safetensors(file) as tensors:
            for name in tensors.keys():  # not a dict: it has no __iter__
                if name in found:
                    raise ValueError(
                        f"{name} is stored twice, in {found[name].file.name} and {file.name} of "
                        f"{folder}; remove the file that does not belong there"
                    )
                part = tensors.get_slice(name)
                found[name] = Stored(
                    file=file,
                    dtype=part.get_dtype(),
                    shape=tuple(part.get_shape()),
                    read=functools.partial(_read, file, name),
                )
    return found


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file() or not (folder / INDEX).is_file():
        return [existing(folder / WEIGHTS)]
    places = read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError(f"{folder / INDEX} has no weight_map; copy or download it again")
    return [existing(folder / shard) for shard in sorted(set(places.values()))]


def _read(file: Path, name: str) -> np.ndarray:
    with open_safetensors(file) as tensors:
        return tensors.get_tensor(name)
