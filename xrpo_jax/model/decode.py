"""Prompts into a cache, and one token more a row: the transformer as the sampler runs it.

A token's slot in the cache is its position, so a row may begin, end and be replaced at any time,
whatever the others do.

Shapes: N rows · S tokens of a prompt · C slots of the cache · D width · H query heads · K key-value
heads · R = H / K · E head size · L layers · V vocabulary.
"""

import jax
import jax.numpy as jnp
from flax import struct

from xrpo_jax.model import transformer
from xrpo_jax.model.attention import grouped
from xrpo_jax.model.config import ModelConfig


@struct.dataclass
class Cache:
    """The keys (already rotated) and values of one batch: for each layer an array [N,K,C,E]."""

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]


def empty(config: ModelConfig, rows: int, length: int, dtype) -> Cache:
    """A cache of `rows` x `length` slots that nobody has written."""

    def zeros() -> tuple[jax.Array, ...]:
        shape = (rows, config.num_kv_heads, length, config.head_dim)
        return tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))

    return Cache(keys=zeros(), values=zeros())


def prefill(params: dict, config: ModelConfig, tokens: jax.Array, *, dtype) -> Cache:
    """The cache of prompts i32[N,S], each from slot 0 on.

    What stands behind a prompt's end is written too, and attended to by nobody before it is
    written over.
    """
    columns = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None, :], tokens.shape)
    valid = jnp.ones(tokens.shape, bool)
    _, (keys, values) = transformer.trunk(params, config, tokens, columns, valid, dtype, keep=True)

    def unstacked(stacked: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jnp.swapaxes(stacked[layer], 1, 2) for layer in range(config.num_layers))

    return Cache(keys=unstacked(keys), values=unstacked(values))


def for_decoding(params: dict, config: ModelConfig, dtype) -> dict:
    """The parameters as `step` and `logits` read them.

    A tuple of layers, all that is multiplied in `dtype` and as matrices [out, in], which is 1.1 to
    1.4 times as fast for few rows on a CPU. Made once before many steps, which would else slice,
    cast and turn every weight for every token. Scales of norms stay float32.
    """

    def matrix(name: str, leaf: jax.Array) -> jax.Array:
        if name.endswith(("norm", "bias")):
            return leaf if name.endswith("norm") else leaf.astype(dtype).reshape(-1)
        inner = 2 if name == "output" else 1  # heads and head size are what is multiplied there
        rows = 1
        for size in leaf.shape[:inner]:
            rows *= size
        return leaf.astype(dtype).reshape(rows, -1).T

    layers = tuple(
        {name: matrix(name, stacked[layer]) for name, stacked in params["layers"].items()}
        for layer in range(config.num_layers)
    )
    embed = params["embed"].astype(dtype)
    head = embed if config.tie_word_embeddings else params["head"].astype(dtype).T
    return {"embed": embed, "head": head, "final_norm": params["final_norm"], "layers": layers}


def step(
    weights: dict,
    config: ModelConfig,
    token: jax.Array,
    position: jax.Array,
    cache: Cache,
    *,
    dtype,
    scattered: bool = False,
) -> tuple[jax.Array, Cache]:
    """Hidden states dtype[N,D] of one more token a row, and the cache with it.

    token i32[N] goes to slot position i32[N] of its row and attends to all slots up to its own; one
    at or beyond C is written nowhere. `weights` are those of `for_decoding`. The cache is written
    as a whole or, `scattered`, slot by slot, which changes no bit of it.
    """
    if token.ndim != 1 or position.shape != token.shape:
        raise ValueError(f"expected equal shapes of rank 1, not {token.shape}, {position.shape}")
    if cache.keys[0].shape[0] != token.shape[0]:
        raise ValueError(f"{token.shape[0]} tokens do not fit a cache {cache.keys[0].shape}")
    x = weights["embed"][token].astype(dtype)
    rotation = transformer.rotation_of(config, position[:, None])
    seen = jnp.arange(cache.keys[0].shape[2])[None, :] <= position[:, None]
    written = _scattered if scattered else _written
    keys, values = [], []
    # Unrolled on purpose: a scan copies the cache of every layer for every token.
    for layer, own in enumerate(weights["layers"]):
        with jax.named_scope("attention"):
            query, key, value = _heads(own, config, x, rotation)
            keys.append(written(cache.keys[layer], key, position))
            values.append(written(cache.values[layer], value, position))
            query = query.reshape(*key.shape[:2], -1, config.head_dim)  # [N,K,R,E]
            attended = grouped(query, keys[-1], values[-1], seen[:, None])
            x = x + _times(own, "output", attended.reshape(len(x), -1))
        with jax.named_scope("mlp"):
            normed = transformer.norm(x, own["mlp_norm"], config.rms_norm_eps)
            gated = transformer.gated(_times(own, "gate", normed), _times(own, "up", normed))
            x = x + _times(own, "down", gated)
    hidden = transformer.norm(x, weights["final_norm"], config.rms_norm_eps)
    return hidden, Cache(keys=tuple(keys), values=tuple(values))


def logits(weights: dict, hidden: jax.Array) -> jax.Array:
    """Logits f32[N,V] of hidden states [N,D]."""
    with jax.named_scope("head"):
        return jnp.einsum("nd,vd->nv", hidden, weights["head"], preferred_element_type=jnp.float32)


def _times(weights: dict, name: str, x: jax.Array) -> jax.Array:
    """x [N,in] times a matrix [out,in], summed in float32, in the dtype of x, plus its bias."""
    out = jnp.einsum("ni,oi->no", x, weights[name], preferred_element_type=jnp.float32)
    out = out.astype(x.dtype)
    return out + weights[f"{name}_bias"][None] if f"{name}_bias" in weights else out


def _heads(
    weights: dict, config: ModelConfig, x: jax.Array, rotation: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Query [N,H,E], key and value [N,K,E] of x [N,D]."""
    normed = transformer.norm(x, weights["attention_norm"], config.rms_norm_eps)

    def heads(name: str) -> jax.Array:
        out = _times(weights, name, normed).reshape(len(x), 1, -1, config.head_dim)
        if f"{name}_norm" in weights:
            out = transformer.norm(out, weights[f"{name}_norm"], config.rms_norm_eps)
        return out

    query, key = (transformer.rotate(heads(name), rotation) for name in ("query", "key"))
    return query[:, 0], key[:, 0], heads("value")[:, 0]


def _written(cache: jax.Array, new: jax.Array, position: jax.Array) -> jax.Array:
    """The cache [N,K,C,E] with new [N,K,E] in slot `position` [N] of each row."""
    here = jnp.arange(cache.shape[2])[None, :] == position[:, None]
    return jnp.where(here[:, None, :, None], new[:, :, None], cache)


def _scattered(cache: jax.Array, new: jax.Array, position: jax.Array) -> jax.Array:
    """The same, where only what is new is written."""
    rows = jnp.arange(len(position))
    return cache.at[rows, :, position].set(new, mode="drop", unique_indices=True)
