"""Prompts into a cache, and one token more a row: the transformer as the sampler runs it.

Shapes: N rows · S tokens of a prompt · C slots of the cache · D width · K key-value heads · E head
size · L layers.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from xrpo_jax.model import transformer
from xrpo_jax.model.config import ModelConfig


@struct.dataclass
class Cache:
    """The keys (already rotated) and values of one batch: for each layer an array [N,C,K,E]."""

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]


def prefill(
    params: dict,
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    valid: jax.Array,
    *,
    length: int,
    dtype,
) -> tuple[jax.Array, Cache]:
    """Returns `forward`'s hidden states [N,S,D] and a cache of `length` slots, zero from slot S on.

    Raises ValueError when the prompt has more than `length` slots.
    """
    slots = tokens.shape[1]
    if slots > length:
        raise ValueError(f"a prompt of {slots} slots does not fit a cache of length {length}")
    hidden, (keys, values) = transformer.trunk(
        params, config, tokens, positions, valid, dtype, remat=False, keep=True
    )

    def unstack(stacked: jax.Array) -> tuple[jax.Array, ...]:
        widths = ((0, 0), (0, length - slots), (0, 0), (0, 0))
        return tuple(jnp.pad(stacked[layer], widths) for layer in range(config.num_layers))

    return hidden, Cache(keys=unstack(keys), values=unstack(values))


def for_decoding(params: dict, config: ModelConfig, dtype) -> dict:
    """Returns params with a tuple of layers, all that is multiplied in `dtype`.

    Made once before many calls of `decode`, which would else slice and cast every weight for every
    token. Scales of norms stay float32.
    """

    def cast(path, leaf: jax.Array) -> jax.Array:
        return leaf if path[-1].key.endswith("norm") else leaf.astype(dtype)

    params = jax.tree_util.tree_map_with_path(cast, params)
    layers = tuple(
        jax.tree.map(lambda stacked, layer=layer: stacked[layer], params["layers"])
        for layer in range(config.num_layers)
    )
    return params | {"layers": layers}


def decode(
    params: dict,
    config: ModelConfig,
    token: jax.Array,
    position: jax.Array,
    cache: Cache,
    slot: jax.Array,
    valid: jax.Array,
    *,
    dtype,
) -> tuple[jax.Array, Cache]:
    """Returns hidden states dtype[N,D] of one more token a row, and the cache with it at `slot`.

    `params` are those of `for_decoding`. token and position are i32[N], slot an i32 scalar shared
    by all rows, valid bool[N,C] with `slot` itself marked by the caller.
    """
    transformer.check_shapes(token, position, 1)
    if valid.shape != cache.keys[0].shape[:2]:
        raise ValueError(f"valid {valid.shape} does not match the cache {cache.keys[0].shape[:2]}")
    x = transformer.embed(params, token[:, None], dtype)
    rotation = transformer.rotation_of(config, position[:, None])
    keys, values = [], []
    # Unrolled on purpose: a scan copies the cache of every layer for every token.
    for layer in range(config.num_layers):

        def store(key, value, layer=layer):
            return (
                lax.dynamic_update_slice_in_dim(cache.keys[layer], key, slot, axis=1),
                lax.dynamic_update_slice_in_dim(cache.values[layer], value, slot, axis=1),
            )

        weights = params["layers"][layer]
        x, (key, value) = transformer.one_layer(
            config, weights, x, rotation, valid[:, None, :], store
        )
        keys.append(key)
        values.append(value)
    hidden = transformer.norm(x, params["final_norm"], config.rms_norm_eps)
    return hidden[:, 0], Cache(keys=tuple(keys), values=tuple(values))
