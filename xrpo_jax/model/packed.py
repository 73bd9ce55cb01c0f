"""The decoder on packed rows: completions of several prompts in one flat buffer without padding.

A prompt is there once; its completions attend to it and each to itself, exactly as if each held its
own copy. Projections, MLP and norms work on the flat tokens; for attention, queries, keys and
values are gathered into padded rows, since there is nothing to gain from attending across rows.

Shapes: M slots of the buffer · b prompts of P columns · n rows of T columns, n / b of them for each
prompt, in order · S = b P + n T places · D width · H query heads · K key-value heads · E head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from xrpo_jax.model import transformer
from xrpo_jax.model.attention import attention
from xrpo_jax.model.config import ModelConfig

REMAT = ("none", "layer")  # what is kept for the backward pass: all, or each layer's input


@struct.dataclass
class Packed:
    """One buffer and where its tokens stand; -1 is nowhere. Completions lie before prompts."""

    tokens: jax.Array  # i32[M]
    positions: jax.Array  # i32[M] what RoPE rotates by
    place: jax.Array  # i32[M] of a slot in [b,P] and [n,T], both flat, one after the other
    prompts: jax.Array  # i32[b,P] the slot of each prompt's token
    rows: jax.Array  # i32[n,T] the slot of each completion's token
    before: jax.Array  # i32[M'] the slot that predicts the token in slot m; M' as many as may be


def forward(
    params: dict, config: ModelConfig, packed: Packed, *, dtype, remat: str = "none"
) -> jax.Array:
    """Returns hidden states dtype[M,D] after the final norm; finite, without meaning, on padding.

    Raises ValueError on rows that do not continue the prompts evenly.
    """
    (prompts, columns), (rows, width) = packed.prompts.shape, packed.rows.shape
    if rows % prompts:
        raise ValueError(f"{rows} rows do not continue {prompts} prompts evenly")
    slots = jnp.concatenate([packed.prompts.reshape(-1), packed.rows.reshape(-1)])
    cosine, sine = transformer.rotation_of(config, packed.positions[None])
    known, own = packed.prompts >= 0, packed.rows >= 0
    prompt_mask = _causal(columns)[None] & known[:, None, :]
    before = jnp.repeat(known, rows // prompts, axis=0)[:, None, :]
    row_mask = jnp.concatenate(
        [
            jnp.broadcast_to(before, (rows, width, columns)),
            _causal(width)[None] & own[:, None, :],
        ],
        axis=2,
    )

    ways = (slots, packed.place, prompt_mask, row_mask, (cosine[0], sine[0]))

    def one_layer(x: jax.Array, weights: dict, ways: tuple) -> jax.Array:
        *where, rotation = ways
        attend = functools.partial(_attend_packed, packed.prompts.shape, packed.rows.shape, where)
        return transformer.layer(config, weights, x, rotation, attend)

    lean = kept_as_bits(one_layer, remat)

    def body(x: jax.Array, weights: dict) -> tuple[jax.Array, None]:
        return lean(x, weights, ways), None

    x = transformer.embed(params, packed.tokens, dtype)
    x, _ = lax.scan(body, x, params["layers"])
    return transformer.norm(x, params["final_norm"], config.rms_norm_eps)


def _attend_packed(prompts, rows, where, query, key, value):
    """Attention [M,H,E] of flat query [M,H,E], key and value [M,K,E]; the shapes of both parts."""
    (prompts, columns), (rows, width) = prompts, rows
    slots, place, prompt_mask, row_mask = where

    def apart(flat: jax.Array) -> tuple[jax.Array, jax.Array]:
        spread = moved(flat, slots, place)
        first, rest = spread[: prompts * columns], spread[prompts * columns :]
        shape = flat.shape[1:]
        return first.reshape(prompts, columns, *shape), rest.reshape(rows, width, *shape)

    def behind(first: jax.Array, rest: jax.Array) -> jax.Array:
        return jnp.concatenate([jnp.repeat(first, rows // prompts, axis=0), rest], axis=1)

    (query, row_query), (key, row_key), (value, row_value) = map(apart, (query, key, value))
    out = attention(query, key, value, prompt_mask)
    row_out = attention(row_query, behind(key, row_key), behind(value, row_value), row_mask)
    shape = query.shape[2:]
    out = jnp.concatenate([out.reshape(-1, *shape), row_out.reshape(-1, *shape)])
    return moved(out, place, slots)


def kept_as_bits(layer: Callable, remat: str) -> Callable:
    """`layer(x, weights, ways)` with what its backward pass keeps as bits; for the body of a scan.

    XLA's CPU backend has no bfloat16 update of a slice: it would convert the stack of all layers to
    float32 and back for every layer that is added to it. `ways` are constants of the gradient.
    """

    @jax.custom_vjp
    def lean(x, weights, ways):
        return layer(x, weights, ways)

    def forward(x, weights, ways):
        if remat == "layer":
            return layer(x, weights, ways), (transformer.to_bits(x), weights, ways)
        out, pull = jax.vjp(lambda x, weights: layer(x, weights, ways), x, weights)
        return out, jax.tree.map(transformer.to_bits, pull)

    def backward(kept, cotangent):
        if remat == "layer":
            bits, weights, ways = kept
            pull = jax.vjp(
                lambda x, weights: layer(x, weights, ways), transformer.from_bits(bits), weights
            )[1]
        else:
            pull = jax.tree.map(transformer.from_bits, kept)
        return *pull(cotangent), None

    lean.defvjp(forward, backward)
    return lean


def padded(
    prompt: jax.Array, prompt_length: jax.Array, tokens: jax.Array, length: jax.Array
) -> Packed:
    """A buffer as long as all rows with their padding: prompts i32[b,P] and rows i32[n,T].

    Real up to prompt_length i32[b] and length i32[n].
    """
    (prompts, columns), (rows, width) = prompt.shape, tokens.shape
    if rows % prompts:
        raise ValueError(f"{rows} rows do not continue {prompts} prompts evenly")
    size = rows * width
    share = rows // prompts
    first, step = jnp.arange(columns)[None, :], jnp.arange(width)[None, :]
    here = jnp.arange(size).reshape(rows, width)
    there = size + jnp.arange(prompts * columns).reshape(prompts, columns)
    own = step < length[:, None]
    known = first < prompt_length[:, None]
    last = jnp.maximum(jnp.repeat(there[:, 0] + prompt_length - 1, share), 0)[:, None]
    start = jnp.repeat(prompt_length, share)[:, None]

    def flat(rows: jax.Array, prompts: jax.Array) -> jax.Array:
        return jnp.concatenate([rows.reshape(-1), prompts.reshape(-1)])

    return Packed(
        tokens=flat(tokens, prompt),
        positions=flat(start + step, jnp.broadcast_to(first, prompt.shape)),
        place=flat(
            jnp.where(own, here + prompts * columns, -1), jnp.where(known, there - size, -1)
        ),
        prompts=jnp.where(known, there, -1),
        rows=jnp.where(own, here, -1),
        before=jnp.concatenate([last, here[:, :-1]], axis=1).reshape(-1),
    )


def _causal(size: int) -> np.ndarray:
    return np.tril(np.ones((size, size), bool))


@jax.custom_vjp
def moved(x: jax.Array, come_from: jax.Array, go_to: jax.Array) -> jax.Array:
    """`out[i] = x[come_from[i]]`, 0 where that is -1; `go_to` is the way back.

    Both directions are gathers: XLA's CPU scatters row by row in a slow loop.
    """
    there = jnp.expand_dims(come_from >= 0, tuple(range(1, x.ndim)))
    return jnp.where(there, x[jnp.maximum(come_from, 0)], 0)


def _moved_forward(x, come_from, go_to):
    return moved(x, come_from, go_to), (come_from, go_to)


def _moved_backward(ways, cotangent):
    come_from, go_to = ways
    return moved(cotangent, go_to, come_from), None, None


moved.defvjp(_moved_forward, _moved_backward)
