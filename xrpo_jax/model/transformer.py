"""The decoder of Llama, Qwen2 and Qwen3 as pure functions of (params, config, arrays).

Shapes: N rows · S tokens of a row · C slots attended over · D width · H query heads · K key-value
heads · R = H / K query heads of one key-value head · E head size · F inner width · L layers ·
V vocabulary. T is S in `forward` and 1 in decode.py.

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

from xrpo_jax.model.config import LinearScaling, Llama3Scaling, ModelConfig


def forward(
    params: dict,
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    valid: jax.Array,
    *,
    dtype,
    remat: bool = False,
) -> jax.Array:
    """Returns hidden states dtype[N,S,D] after the final norm; tokens, positions, valid are [N,S].

    A slot attends to the valid slots up to its own. `remat` recomputes each layer in the backward
    pass. A layer is one step of a scan, so compile time does not grow with depth.
    """
    return trunk(params, config, tokens, positions, valid, dtype, remat=remat, keep=False)[0]


def continued(
    params: dict,
    config: ModelConfig,
    prompt: jax.Array,
    prompt_length: jax.Array,
    tokens: jax.Array,
    length: jax.Array,
    *,
    dtype,
    remat: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns `forward`'s hidden states of prompts [b,P,D] and of rows [N,T,D] that continue them.

    Row n continues prompt n // (N / b): a prompt is computed once, its rows attend to it and not to
    each other, exactly as if each row held its own copy. prompt is i32[b,P] and tokens i32[N,T],
    real up to prompt_length i32[b] and length i32[N].
    """
    share = _share(prompt, tokens)
    columns = jnp.arange(prompt.shape[1])
    valid = columns[None, :] < prompt_length[:, None]
    mask = (columns[:, None] >= columns[None, :])[None] & valid[:, None, :]
    rotation = rotation_of(config, jnp.broadcast_to(columns[None, :], prompt.shape))

    steps = jnp.arange(tokens.shape[1])
    start = jnp.repeat(prompt_length, share)
    own = (steps[:, None] >= steps[None, :])[None] & (steps[None, :] < length[:, None])[:, None, :]
    before = jnp.repeat(valid, share, axis=0)[:, None, :]
    row_mask = jnp.concatenate(
        [jnp.broadcast_to(before, (*own.shape[:2], before.shape[2])), own], axis=2
    )
    row_rotation = rotation_of(config, start[:, None] + steps[None, :])

    def body(carry, weights):
        x, rows = carry
        x, (keys, values) = one_layer(
            config, weights, x, rotation, mask, lambda key, value: (key, value)
        )

        def after(key, value):
            return (
                jnp.concatenate([jnp.repeat(keys, share, axis=0), key], axis=1),
                jnp.concatenate([jnp.repeat(values, share, axis=0), value], axis=1),
            )

        rows, _ = one_layer(config, weights, rows, row_rotation, row_mask, after)
        return (x, rows), None

    if remat:
        body = jax.checkpoint(body, prevent_cse=False)
    embedded = (embed(params, prompt, dtype), embed(params, tokens, dtype))
    (x, rows), _ = lax.scan(body, embedded, params["layers"])
    scale, epsilon = params["final_norm"], config.rms_norm_eps
    return norm(x, scale, epsilon), norm(rows, scale, epsilon)


def logits(params: dict, config: ModelConfig, hidden: jax.Array) -> jax.Array:
    """Returns logits f32[...,V] of hidden states [...,D], multiplied in the dtype of `hidden`."""
    lead = "nt"[: hidden.ndim - 1]
    if config.tie_word_embeddings:
        head, spec = params["embed"], f"{lead}d,vd->{lead}v"
    else:
        head, spec = params["head"], f"{lead}d,dv->{lead}v"
    return product(spec, jnp.float32, hidden, head)


def trunk(params, config, tokens, positions, valid, dtype, *, remat, keep):
    """Returns hidden [N,S,D] and, if `keep`, keys and values [L,N,S,K,E] of whole rows."""
    check_shapes(tokens, positions, 2)
    check_shapes(tokens, valid, 2)
    slot = jnp.arange(tokens.shape[1])
    causal = slot[None, :, None] >= slot[None, None, :]
    mask = causal & valid[:, None, :]
    rotation = rotation_of(config, positions)

    def body(x, weights):
        x, stored = one_layer(config, weights, x, rotation, mask, lambda key, value: (key, value))
        return x, (stored if keep else None)

    if remat:
        body = jax.checkpoint(body, prevent_cse=False)  # a scan already keeps the passes apart
    x, stored = lax.scan(body, embed(params, tokens, dtype), params["layers"])
    return norm(x, params["final_norm"], config.rms_norm_eps), stored


def one_layer(
    config: ModelConfig,
    weights: dict,
    x: jax.Array,
    rotation: tuple[jax.Array, jax.Array],
    mask: jax.Array,
    store: Callable,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """One decoder layer on x [N,T,D]: what all entry points share, decode.py's too.

    `store` takes the new keys and values [N,T,K,E] to those attended over [N,C,K,E]; mask is
    bool[N,T,C]. Returns x and what `store` gave.
    """
    dtype = x.dtype

    def dot(spec: str, left: jax.Array, name: str) -> jax.Array:
        return product(spec, dtype, left, weights[name])

    def heads(name: str) -> jax.Array:
        out = dot("ntd,dhe->nthe", normed, name)
        if f"{name}_bias" in weights:
            out = out + weights[f"{name}_bias"].astype(dtype)[None, None]
        if f"{name}_norm" in weights:
            out = norm(out, weights[f"{name}_norm"], config.rms_norm_eps)
        return out

    normed = norm(x, weights["attention_norm"], config.rms_norm_eps)
    query = rotate(heads("query"), rotation)
    keys, values = store(rotate(heads("key"), rotation), heads("value"))
    attended = _attend(query, keys, values, mask)
    out = dot("nthe,hed->ntd", attended, "output")
    if "output_bias" in weights:
        out = out + weights["output_bias"].astype(dtype)[None, None]
    x = x + out

    normed = norm(x, weights["mlp_norm"], config.rms_norm_eps)
    gate, up = dot("ntd,df->ntf", normed, "gate"), dot("ntd,df->ntf", normed, "up")
    x = x + dot("ntf,fd->ntd", jax.nn.silu(gate) * up, "down")
    return x, (keys, values)


def _attend(query: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns attention [N,T,H,E] of query [N,T,H,E] over keys and values [N,C,K,E]."""
    rows, steps, heads, size = query.shape
    grouped = query.reshape(rows, steps, keys.shape[2], heads // keys.shape[2], size)
    scores = product("ntkre,ncke->nkrtc", jnp.float32, grouped, keys)
    # A finite floor, not -inf: a slot that may attend to nothing then averages, without NaN.
    floor = jnp.finfo(jnp.float32).min
    scores = jnp.where(mask[:, None, None], scores * size**-0.5, floor)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    out = product("nkrtc,ncke->ntkre", values.dtype, weights, values)
    return out.reshape(query.shape)


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

    return (
        pulled(f"{out},{other}->{one}", cotangent, right.astype(left.dtype), left.dtype),
        pulled(f"{one},{out}->{other}", left, cotangent, right.dtype),
    )


product.defvjp(_product_forward, _product_backward)


def embed(params: dict, tokens: jax.Array, dtype) -> jax.Array:
    return params["embed"][tokens].astype(dtype)


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


def _share(prompt: jax.Array, tokens: jax.Array) -> int:
    """How many rows continue each prompt."""
    if prompt.ndim != 2 or tokens.ndim != 2 or tokens.shape[0] % prompt.shape[0]:
        raise ValueError(f"rows {tokens.shape} do not continue prompts {prompt.shape} evenly")
    return tokens.shape[0] // prompt.shape[0]


def check_shapes(tokens: jax.Array, other: jax.Array, rank: int) -> None:
    if tokens.ndim != rank or other.shape != tokens.shape:
        raise ValueError(f"expected equal shapes of rank {rank}, not {tokens.shape}, {other.shape}")
