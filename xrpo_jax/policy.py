"""Log-probs and entropies of given tokens under the policy, by tiles of the vocabulary.

Shapes: M slots of a packed buffer · n rows · T completion tokens · m predicted tokens · D width ·
V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from xrpo_jax.arrays import Params, TokenStats
from xrpo_jax.model import packed as packing
from xrpo_jax.model import transformer
from xrpo_jax.model.config import ModelConfig
from xrpo_jax.model.packed import Packed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """What a forward pass of the trainer needs beside parameters; static under jit."""

    model: ModelConfig
    temperature: float = 1.0
    dtype: str = "float32"  # of the computation; parameters stay float32
    remat: str = "none"  # see model/packed.py
    tile: int = 4096  # entries of the vocabulary whose logits are in memory at one time


def token_stats(
    policy: Policy,
    params: Params,
    prompt: jax.Array,
    prompt_length: jax.Array,
    tokens: jax.Array,
    length: jax.Array,
) -> TokenStats:
    """`packed_stats` of rows that are padded, not packed.

    Rows continue prompts i32[b,P], n / b of them each, in order; `tokens` i32[n,T] are real up to
    `length` i32[n], prompts up to `prompt_length` i32[b], at least 1.
    """
    return packed_stats(policy, params, packing.padded(prompt, prompt_length, tokens, length))


def packed_stats(policy: Policy, params: Params, packed: Packed) -> TokenStats:
    """Log-prob and entropy f32[n,T] of each completion token given all before it.

    At the policy's temperature; 0 on padding.
    """
    hidden = packing.forward(
        params, policy.model, packed, dtype=jnp.dtype(policy.dtype), remat=policy.remat
    )
    tied = policy.model.tie_word_embeddings
    table = params["embed"] if tied else params["head"].T
    with jax.named_scope("head"):
        count = packed.before.shape[0]
        predicting = hidden[jnp.maximum(packed.before, 0)]
        logp, entropy = given(
            policy.tile, policy.temperature, predicting, table, packed.tokens[:count]
        )

    def in_rows(flat: jax.Array) -> jax.Array:
        return jnp.where(packed.rows >= 0, flat[jnp.clip(packed.rows, 0, count - 1)], 0.0)

    return TokenStats(logp=in_rows(logp), entropy=in_rows(entropy))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def given(
    tile: int, temperature: float, hidden: jax.Array, table: jax.Array, target: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Log-prob of `target` i32[m] and entropy, f32[m], of softmax(hidden table' / temperature).

    hidden [m,D] in its dtype, table f32[V,D]. Only one tile of logits is in memory, f32[m,tile];
    the backward pass makes it again and needs no more than its log of the sum. What the entropy
    asks for costs nothing where no gradient comes through it. Tiles of the vocabulary, not chunks
    of tokens: each adds once to its own rows of the table's gradient.
    """
    return _given(tile, temperature, hidden, table, target)[:2]


def _tiles(tile: int, table: jax.Array, dtype) -> tuple[jax.Array, jax.Array]:
    """The table in `dtype` as [tiles,tile,D], the last filled up, and each tile's first entry."""
    size = len(table)
    # Two at least in bfloat16: XLA's CPU would make a lone tile's products ones of two transposed
    # operands, which it does not have.
    tile = min(tile, size if dtype == jnp.float32 else -(-size // 2))
    tiles = -(-size // tile)
    table = jnp.pad(table.astype(dtype), ((0, tiles * tile - size), (0, 0)))
    return transformer.to_bits(table.reshape(tiles, tile, -1)), tile * jnp.arange(tiles)


def _zeros(target: jax.Array) -> jax.Array:
    """f32[m] that differ over devices, for the types of a shard_map, as what is added to them."""
    return (0 * target).astype(jnp.float32)


FLOOR = jnp.finfo(jnp.float32).min


def _given(tile, temperature, hidden, table, target):
    """logp, entropy and log of the sum of exponentials, all f32[m]."""
    size = len(table)

    def body(carry, part):
        bits, start = part
        low = transformer.from_bits(bits)
        peak, total, weighed, chosen = carry
        scores = jnp.einsum("md,vd->mv", hidden, low, preferred_element_type=jnp.float32)
        scores = scores / temperature
        entry = jnp.arange(len(low))
        if size % len(low):
            scores = jnp.where((start + entry < size)[None], scores, FLOOR)
        top = jnp.maximum(peak, jnp.max(scores, axis=1))
        scores_off = scores - top[:, None]
        before, now = jnp.exp(peak - top), jnp.exp(scores_off)
        # 0 x inf would be NaN: a token may be impossible.
        weighed = before * (weighed + total * jnp.maximum(peak - top, FLOOR))
        weighed += jnp.sum(now * jnp.maximum(scores_off, FLOOR), axis=1)
        total = total * before + jnp.sum(now, axis=1)
        place = jnp.clip(target - start, 0, len(low) - 1)
        found = jnp.take_along_axis(scores, place[:, None], axis=1)[:, 0]
        chosen = jnp.where((target >= start) & (target < start + len(low)), found, chosen)
        return (top, total, weighed, chosen), None

    zero = _zeros(target)
    begin = (zero + FLOOR, zero, zero, zero)
    (peak, total, weighed, chosen), _ = lax.scan(body, begin, _tiles(tile, table, hidden.dtype))
    spread = jnp.log(total)
    return chosen - peak - spread, spread - weighed / total, peak + spread


def _given_forward(tile, temperature, hidden, table, target):
    hidden, table, target = hidden.value, table.value, target.value
    logp, entropy, log_sum = _given(tile, temperature, hidden, table, target)
    return (logp, entropy), (hidden, table, target, entropy, log_sum)


def _given_backward(tile, temperature, kept, cotangents):
    hidden, table, target, entropy, log_sum = kept
    by_logp, by_entropy = cotangents
    flat = hidden.T
    size = len(table)

    def body(by_hidden, part):
        bits, start = part
        low = transformer.from_bits(bits)
        entry = (start + jnp.arange(len(low)))[:, None]
        # The vocabulary leads, so that no product but one has a transposed operand.
        scores = jnp.einsum("vd,dm->vm", low, flat, preferred_element_type=jnp.float32)
        logp = scores / temperature - log_sum[None]
        if size % len(low):
            logp = jnp.where(entry < size, logp, FLOOR)
        chance = jnp.exp(logp)
        pull = jnp.zeros_like(logp)
        if not isinstance(by_logp, SymbolicZero):
            pull += jnp.where(entry == target[None], by_logp[None], 0.0) - chance * by_logp[None]
        if not isinstance(by_entropy, SymbolicZero):
            slope = jnp.maximum(logp, FLOOR) + entropy[None]
            pull -= jnp.where(chance > 0, chance * slope, 0.0) * by_entropy[None]
        pull = (pull / temperature).astype(hidden.dtype)
        by_low = jnp.einsum("vm,md->vd", pull, hidden, preferred_element_type=jnp.float32)
        more = jnp.einsum("dv,vm->dm", low.T, pull, preferred_element_type=jnp.float32)
        return by_hidden + more, by_low

    begin = jnp.broadcast_to(_zeros(target), flat.shape)
    by_hidden, by_table = lax.scan(body, begin, _tiles(tile, table, hidden.dtype))
    by_table = by_table.reshape(-1, table.shape[1])[: len(table)].astype(table.dtype)
    return by_hidden.T.astype(hidden.dtype), by_table, None


given.defvjp(_given_forward, _given_backward, symbolic_zeros=True)
