"""The parameters of a decoder, declared once: shapes, logical axes and initialisation.

Everything else that must agree with them (sharding, restore targets, the table of Hugging Face
names) derives from `declare`. Weights are stored [in, out] with heads apart, so that an einsum
needs no reshape; the tensors of all layers are stacked along a leading axis under 'layers'.
"""

import dataclasses
import math
import zlib

import jax
import jax.numpy as jnp
from flax import traverse_util

from xrpo_jax.model.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Param:
    """A declared tensor: its shape, a name for each axis, and 'normal', 'ones' or 'zeros'."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: str


def declare(config: ModelConfig) -> dict:
    """Returns the nested dict of `Param` that a model of this architecture has."""
    sizes = {
        "layers": config.num_layers,
        "vocab": config.vocab_size,
        "embed": config.hidden_size,
        "mlp": config.intermediate_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
    }

    def param(init: str, *axes: str) -> Param:
        return Param(tuple(sizes[axis] for axis in axes), axes, init)

    layers = {
        "attention_norm": param("ones", "layers", "embed"),
        "query": param("normal", "layers", "embed", "heads", "head_dim"),
        "key": param("normal", "layers", "embed", "kv_heads", "head_dim"),
        "value": param("normal", "layers", "embed", "kv_heads", "head_dim"),
        "output": param("normal", "layers", "heads", "head_dim", "embed"),
        "mlp_norm": param("ones", "layers", "embed"),
        "gate": param("normal", "layers", "embed", "mlp"),
        "up": param("normal", "layers", "embed", "mlp"),
        "down": param("normal", "layers", "mlp", "embed"),
    }
    if config.attention_bias:
        layers["query_bias"] = param("zeros", "layers", "heads", "head_dim")
        layers["key_bias"] = param("zeros", "layers", "kv_heads", "head_dim")
        layers["value_bias"] = param("zeros", "layers", "kv_heads", "head_dim")
    if config.output_bias:
        layers["output_bias"] = param("zeros", "layers", "embed")
    if config.qk_norm:
        layers["query_norm"] = param("ones", "layers", "head_dim")
        layers["key_norm"] = param("ones", "layers", "head_dim")
    declared = {
        "embed": param("normal", "vocab", "embed"),
        "layers": layers,
        "final_norm": param("ones", "embed"),
    }
    if not config.tie_word_embeddings:
        declared["head"] = param("normal", "embed", "vocab")
    return declared


def init(config: ModelConfig, key: jax.Array) -> dict:
    """Returns fresh float32 parameters, as Hugging Face initialises the three families."""

    def make(path: tuple[str, ...], param: Param) -> jax.Array:
        if param.init == "normal":
            # The key hangs on the name, so that another tensor in the table changes no value.
            own = jax.random.fold_in(key, zlib.crc32("/".join(path).encode()))
            return config.initializer_range * jax.random.normal(own, param.shape, jnp.float32)
        return {"ones": jnp.ones, "zeros": jnp.zeros}[param.init](param.shape, jnp.float32)

    declared = traverse_util.flatten_dict(declare(config))
    return traverse_util.unflatten_dict(
        {path: make(path, param) for path, param in declared.items()}
    )


def count(params: dict) -> int:
    """Returns the number of scalars in a tree of parameters or of declarations."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
