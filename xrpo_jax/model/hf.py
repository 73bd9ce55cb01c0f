"""Hugging Face checkpoints to parameters, through one table of names checked from both sides."""

import dataclasses
import math
import os
from pathlib import Path

import jax
import numpy as np
from flax import traverse_util

from xrpo_jax.model import files, gguf
from xrpo_jax.model.config import ModelConfig
from xrpo_jax.model.files import CONFIG, Stored
from xrpo_jax.model.params import declare
from xrpo_jax.model.source import Source

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"

# Our name -> (Hugging Face's name, how many leading axes are inputs). Torch stores a linear map
# as [out, in], so those are transposed; 0 marks a vector and None a tensor that is kept as it is.
_TOP = {
    "embed": (EMBED, None),
    "final_norm": ("model.norm.weight", 0),
    "head": (HEAD, 1),
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


def config_of(source: Source | str | os.PathLike) -> ModelConfig:
    """Reads the architecture of a model without its weights; the errors are those of `load`."""
    source = _source(source)
    raw = files.read_json(source.folder / CONFIG)
    try:
        return ModelConfig.from_hf(raw)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source.gguf or source.folder / CONFIG}: {error}") from error


def load(
    source: Source | str | os.PathLike, sharding: jax.sharding.Sharding | None = None
) -> tuple[ModelConfig, dict]:
    """Reads a model (a directory, or what `source.find` returned) into float32 parameters.

    Every parameter is placed with `sharding` (None: the default device) before the next is read.
    Raises FileNotFoundError naming a missing file, ValueError naming a damaged one or the tensors
    that are unknown, missing, stored twice, of a wrong shape or of a dtype that is not read; all
    of it before any weight is read.
    """
    source = _source(source)
    config = config_of(source)
    stored = gguf.tensors(source.gguf) if source.gguf else files.safetensors(source.folder)
    # Derived from the config; old exports still carry it.
    stored = {k: v for k, v in stored.items() if not k.endswith("rotary_emb.inv_freq")}
    places = table(config)
    spare_head = stored.pop(HEAD, None) if config.tie_word_embeddings else None
    _check(source, config, stored, places)

    declared = traverse_util.flatten_dict(declare(config))
    flat = {}
    # The largest first: while one is read, its temporary copies come on top of those before it.
    for path in sorted(declared, key=lambda path: -math.prod(declared[path].shape)):
        value = _stack(declared[path].shape, path, stored, places)
        if spare_head is not None and path == ("embed",):
            _check_spare_head(source, value, spare_head)
        flat[path] = jax.block_until_ready(jax.device_put(value, sharding))
        del value  # else it would still be there while the next one is allocated
    return config, traverse_util.unflatten_dict({path: flat[path] for path in declared})


def _source(source: Source | str | os.PathLike) -> Source:
    return source if isinstance(source, Source) else Source(folder=Path(source), gguf=None)


def _check(
    source: Source, config: ModelConfig, stored: dict[str, Stored], places: dict[str, Place]
) -> None:
    unknown = [name for name in stored if name not in places]
    missing = [name for name in places if name not in stored]
    if unknown or missing:
        raise ValueError(
            f"{source.gguf or source.folder} does not hold a {config.family} of its own {CONFIG}: "
            f"unknown tensors {_some(unknown)}, missing tensors {_some(missing)}; download it "
            "again, or correct the file that is wrong"
        )
    for name, tensor in stored.items():
        if tensor.shape != places[name].hf_shape:
            raise ValueError(
                f"{name} has shape {tensor.shape} in {tensor.file}; the config asks for "
                f"{places[name].hf_shape}: weights and {CONFIG} must be of one model"
            )
        if tensor.dtype not in files.READ_DTYPES:
            raise ValueError(
                f"{name} has dtype {tensor.dtype} in {tensor.file}; allowed: {files.READ_DTYPES} "
                "(use the model as it was before it was quantized)"
            )


def _stack(
    shape: tuple[int, ...],
    path: tuple[str, ...],
    stored: dict[str, Stored],
    places: dict[str, Place],
) -> np.ndarray:
    """Returns one parameter, all layers of it, float32 in our layout."""
    value = np.empty(shape, np.float32)
    for name, place in places.items():
        if place.path == path:
            tensor = stored[name].read()
            tensor = (tensor.T if place.inputs else tensor).reshape(place.shape)
            value[... if place.layer is None else place.layer] = tensor
    return value


def _check_spare_head(source: Source, embed: np.ndarray, head: Stored) -> None:
    if not np.array_equal(head.read(), embed):
        raise ValueError(
            f"{HEAD} differs from {EMBED} although {source.folder / CONFIG} has "
            "tie_word_embeddings = true; set it to false to use both"
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:8]) or "none"
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
