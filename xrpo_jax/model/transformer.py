"""The decoder of Llama, Qwen2 and Qwen3 as pure functions of (params, config, arrays).

Shapes: N rows · S or T tokens of a row · D width · H query heads · K key-value heads · E head
size · F inner width · L layers · V vocabulary. packed.py has one flat axis of tokens in the place
of N and T; decode.py, with one token a row and matrices made for that, has a layer of its own.

A token has a slot (its column, which orders causality) and a position (what RoPE rotates by); they
are separate so that a row may be padded on either side. Parameters are float32 and are cast to
`dtype` where they are used; sums within a product, norms, RoPE, softmax and logits are float32
whatever `dtype` is, and so is the gradient of every parameter.
Hidden states of invalid slots are finite and without meaning.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xrpo_jax.model.attention import attention
from xrpo_jax.model.config import LinearScaling, Llama3Scaling, ModelConfig


def forward(
    params: dict,
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    valid: jax.Array,
    *,
    dtype,
) -> jax.Array:
    """Returns hidden states dtype[N,S,D] after the final norm; tokens, positions, valid are [N,S].

    A slot attends to the valid slots up to its own. A layer is one step of a scan, so compile time
    does not grow with depth.
    """
    return trunk(params, config, tokens, positions, valid, dtype, keep=False)[0]


def logits(params: dict, config: ModelConfig, hidden: jax.Array) -> jax.Array:
    """Returns logits f32[...,V] of hidden states [...,D], multiplied in the dtype of `hidden`."""
    lead = "nt"[: hidden.ndim - 1]
    if config.tie_word_embeddings:
        head, spec = params["embed"], f"{lead}d,vd->{lead}v"
    else:
        head, spec = params["head"], f"{lead}d,dv->{lead}v"
    return product(spec, jnp.float32, hidden, head)


def trunk(params, config, tokens, positions, valid, dtype, *, keep):
    """Returns hidden [N,S,D] and, if `keep`, keys and values [L,N,S,K,E] of whole rows."""
    check_shapes(tokens, positions, 2)
    check_shapes(tokens, valid, 2)
    slot = jnp.arange(tokens.shape[1])
    causal = slot[None, :, None] >= slot[None, None, :]
    mask = causal & valid[:, None, :]
    rotation = rotation_of(config, positions)

    def body(x, weights):
        stored = None

        def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            nonlocal stored
            stored = key, value
            return attention(query, key, value, mask)

        x = layer(config, weights, x, rotation, attend)
        # As bits: XLA's CPU backend would convert the whole stack of bfloat16 once a layer.
        return x, (jax.tree.map(to_bits, stored) if keep else None)

    x, stored = lax.scan(body, embed(params, tokens, dtype), params["layers"])
    stored = jax.tree.map(from_bits, stored)
    return norm(x, params["final_norm"], config.rms_norm_eps), stored


def to_bits(x: jax.Array) -> jax.Array:
    """bfloat16 as uint16; all else as it is."""
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def from_bits(x: jax.Array) -> jax.Array:
    """What `to_bits` was given."""
    return lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x


def layer(
    config: ModelConfig,
    weights: dict,
    x: jax.Array,
    rotation: tuple[jax.Array, jax.Array],
    attend: Callable,
) -> jax.Array:
    """One decoder layer on x [...,D], of tokens [N,T] or in one flat axis.

    `attend` takes query [...,H,E], key and value [...,K,E], both rotated, to [...,H,E].
    """
    dtype = x.dtype
    lead = "nt"[3 - x.ndim :]

    def dot(spec: str, left: jax.Array, name: str) -> jax.Array:
        return product(spec.replace("nt", lead), dtype, left, weights[name])

    def plus(x: jax.Array, name: str) -> jax.Array:
        if name not in weights:
            return x
        bias = weights[name].astype(dtype)
        return x + jnp.expand_dims(bias, tuple(range(x.ndim - bias.ndim)))

    def heads(name: str) -> jax.Array:
        out = plus(dot("ntd,dhe->nthe", normed, name), f"{name}_bias")
        if f"{name}_norm" in weights:
            out = norm(out, weights[f"{name}_norm"], config.rms_norm_eps)
        return out

    with jax.named_scope("attention"):
        normed = norm(x, weights["attention_norm"], config.rms_norm_eps)
        query, key = rotate(heads("query"), rotation), rotate(heads("key"), rotation)
        attended = attend(query, key, heads("value"))
        x = x + plus(dot("nthe,hed->ntd", attended, "output"), "output_bias")
    with jax.named_scope("mlp"):
        normed = norm(x, weights["mlp_norm"], config.rms_norm_eps)
        gate, up = dot("ntd,df->ntf", normed, "gate"), dot("ntd,df->ntf", normed, "up")
        return x + dot("ntf,fd->ntd", gated(gate, up), "down")


@functools.partial(jax.checkpoint, prevent_cse=False)  # or it would keep four arrays, not two
def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """`silu(gate) up`, computed in float32: half the time of bfloat16 on a CPU."""
    wide = jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)
    return wide.astype(gate.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def product(spec: str, dtype, left: jax.Array, right: jax.Array) -> jax.Array:
    """einsum of left and right in the dtype of left, summed in float32, returned in `dtype`.

    A rule of its own for the gradient: JAX's would multiply float32 cotangents with low-precision
    operands, which no machine has a fast path for, and would round a parameter's gradient to the
    dtype that it was cast to. Every letter of `spec` stands in two of its three parts. Within a
    shard_map both must vary over the same axes (`lax.pcast` the parameters, once, at its head).
    """
    right = right.astype(left.dtype)
    return jnp.einsum(spec, left, right, preferred_element_type=jnp.float32).astype(dtype)


def _product_forward(spec, dtype, left, right):
    return product(spec, dtype, left, right), (left, right)


def _product_backward(spec, dtype, operands, cotangent):
    left, right = operands
    one, other, out = spec.replace("->", ",").split(",")
    cotangent = cotangent.astype(left.dtype)

    def pulled(spec: str, first: jax.Array, second: jax.Array, dtype) -> jax.Array:
        return jnp.einsum(spec, first, second, preferred_element_type=jnp.float32).astype(dtype)

    by_left = pulled(f"{out},{other}->{one}", cotangent, right.astype(left.dtype), left.dtype)
    summed = set(one) & set(out)
    if summed == {one[0]} == {out[0]} and left.shape[0] % 2 == 0:
        # XLA's CPU multiplies a transposed operand two to four times faster when two axes are
        # summed over than when one is.
        left, cotangent = (x.reshape(2, -1, *x.shape[1:]) for x in (left, cotangent))
        one, out = f"z{one}", f"z{out}"
    return by_left, pulled(f"{one},{out}->{other}", left, cotangent, right.dtype)


product.defvjp(_product_forward, _product_backward)


def embed(params: dict, tokens: jax.Array, dtype) -> jax.Array:
    return params["embed"][tokens].astype(dtype)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """RMSNorm over the last axis, computed in float32 and returned in the dtype of x."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    scale = jnp.expand_dims(scale.astype(jnp.float32), tuple(range(x.ndim - 1)))
    return (wide * scale).astype(x.dtype)


def frequencies(config: ModelConfig) -> np.ndarray:
    """Returns the RoPE angle of each pair of dimensions per position, f32[E/2]."""
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequency = np.float32(1) / np.float32(config.rope_theta) ** exponent
    scaling = config.rope_scaling
    if isinstance(scaling, LinearScaling):
        frequency = frequency / np.float32(scaling.factor)
    elif isinstance(scaling, Llama3Scaling):
        # How often each pair turns within the context of pretraining decides: pairs that turn often
        # stay, those that turn seldom slow down by `factor`, and between the two it is a blend.
        turns = scaling.original_max_position_embeddings * frequency / np.float32(2 * np.pi)
        width = scaling.high_freq_factor - scaling.low_freq_factor
        keep = np.clip((turns - scaling.low_freq_factor) / width, 0, 1)
        frequency = keep * frequency + (1 - keep) * frequency / scaling.factor
    return frequency.astype(np.float32)


def rotation_of(config: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the cosine and sine f32[N,T,1,E/2] of every position's angles."""
    angles = positions.astype(jnp.float32)[:, :, None, None] * frequencies(config)[None, None, None]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates x [N,T,H,E] in float32; a pair is (i, i + E/2), as in Hugging Face's weights."""
    cosine, sine = rotation
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate(
        [first * cosine - second * sine, second * cosine + first * sine], axis=-1
    )
    return rotated.astype(x.dtype)


def check_shapes(tokens: jax.Array, other: jax.Array, rank: int) -> None:
    if tokens.ndim != rank or other.shape != tokens.shape:
        raise ValueError(f"expected equal shapes of rank {rank}, not {tokens.shape}, {other.shape}")
