"""Attention: what training, prefill and decoding share.

Shapes: N rows · T tokens of a row that ask · C that are attended over · H query heads · K key-value
heads · R = H / K · E head size.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp


def attention(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns attention [N,T,H,E] of query [N,T,H,E] over key and value [N,C,K,E], mask [N,T,C].

    The query heads of one key-value head are rows of one product, which is half as long again as
    one product for each.
    """
    rows, steps, heads, size = query.shape
    kv_heads = key.shape[2]
    together = query.reshape(rows, steps, kv_heads, -1, size).transpose(0, 2, 3, 1, 4)
    together = together.reshape(rows, kv_heads, -1, size)
    out = grouped(together, key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3), mask)
    out = out.reshape(rows, kv_heads, heads // kv_heads, steps, size).transpose(0, 3, 1, 2, 4)
    return out.reshape(query.shape)


def _dot(spec: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(spec, left, right, preferred_element_type=jnp.float32)


@jax.custom_vjp
def grouped(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns attention [N,K,Q,E] of query [N,K,Q,E], Q = R T, over key and value [N,K,C,E].

    mask is bool[N,T,C]. The backward pass keeps the weights, in the dtype of value.
    """
    return _grouped_forward(query, key, value, mask)[0]


def _grouped_forward(query, key, value, mask):
    scores = _dot("nkqe,nkce->nkqc", query, key) * query.shape[-1] ** -0.5
    by_head = scores.reshape(*scores.shape[:2], -1, *mask.shape[1:])
    # A finite floor, not -inf: a slot that may attend to nothing then averages, without NaN.
    by_head = jnp.where(mask[:, None, None], by_head, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(by_head.reshape(scores.shape), axis=-1).astype(value.dtype)
    out = _dot("nkqc,nkce->nkqe", weights, value).astype(value.dtype)
    return out, (query, key, value, weights, out)


def _grouped_backward(kept, cotangent):
    query, key, value, weights, out = kept
    dtype, wide = value.dtype, functools.partial(jnp.asarray, dtype=jnp.float32)
    by_value = _dot("nkqc,nkqe->nkce", weights, cotangent).astype(dtype)
    by_weights = _dot("nkqe,nkce->nkqc", cotangent, value)
    # sum over c of weights x by_weights, over fewer elements
    centre = jnp.sum(wide(cotangent) * wide(out), axis=-1, keepdims=True)
    by_scores = wide(weights) * (by_weights - centre) * query.shape[-1] ** -0.5
    by_scores = by_scores.astype(dtype)
    by_query = _dot("nkqc,nkce->nkqe", by_scores, key).astype(dtype)
    by_key = _dot("nkqc,nkqe->nkce", by_scores, query).astype(dtype)
    return by_query, by_key, by_value, None


grouped.defvjp(_grouped_forward, _grouped_backward)
