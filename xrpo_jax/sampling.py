"""Drawing a token: temperature, top-k and top-p, and one uniform number a row.

A row's token depends on its own logits and number alone, to the bit, whatever rows are beside it.
Nothing of the vocabulary's size is sorted or normalised, since on a CPU a sort of 49,152 logits
takes many times as long as the model's step that makes them.

Shapes: N rows · V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp

BLOCK = 128  # tokens whose probabilities are summed first when one is drawn
PARTS = 16  # a row is added up in so many parts side by side, which the compiler vectorises
NOTHING = 104  # exp of less than minus this is 0 in float32
DENORMAL = 0x007FFFFF  # the bits of the largest denormal float32
COLDEST, HOTTEST = 1e-9, 1e9  # what logits may be divided by: far within float32 on either side
RANGE = "1e-9 to 1e9"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """How a token is drawn: temperature (0 = greedy), then top-k (0 = off), top-p (1 = off)."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        for name, value, good, allowed in (
            (
                "temperature",
                self.temperature,
                self.temperature == 0 or COLDEST <= self.temperature <= HOTTEST,
                f"0 (greedy) or {RANGE}",
            ),
            ("top_k", self.top_k, self.top_k >= 0, "0 (off) or more"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0, at most 1 (off)"),
        ):
            if not good:
                raise ValueError(f"{name}={value}; allowed: {allowed}")


@jax.named_scope("draw_token")
def draw_token(
    logits: jax.Array, uniform: jax.Array, method: Method
) -> tuple[jax.Array, jax.Array]:
    """Tokens i32[N] drawn at `uniform` f32[N], and their log-probs f32[N] under `method`.

    `logits` [N,V] of any float dtype are read as float32. The sum of the probabilities is inverted:
    one random number a row instead of one a token, and sums over blocks first. The log-prob is that
    of the distribution drawn from, with temperature and all that was left out. Rounding never draws
    a token of probability 0. Greedy takes the first of the likeliest, with log-prob 0.
    """
    size = logits.shape[1]
    # What the last block lacks is impossible: nothing below draws it.
    logits = jnp.pad(
        logits.astype(jnp.float32), ((0, 0), (0, -size % BLOCK)), constant_values=-jnp.inf
    )
    most = jnp.max(logits, axis=1)
    if method.temperature == 0:
        zero = jnp.zeros_like(uniform)
        return _invert(logits, lambda x: (x == _beside(most, x)).astype(x.dtype), zero)[0], zero
    chance = _chance(most, floor(logits, method), method)
    token, total = _invert(logits, chance, uniform)
    chosen = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
    return token, (chosen - most) / method.temperature - jnp.log(total)


def floor(logits: jax.Array, method: Method) -> jax.Array | None:
    """What a logit f32[N,V] must be above to be drawn, f32[N]; None where `method` filters nothing.

    Top-k keeps what fewer than k others are above, top-p what others of less than p are above in
    the distribution that is left by then (Holtzman et al., 2020; the order of Hugging Face's
    warpers): what a sort would keep, with all that ties with the last, in top-p by its probability
    in float32. V is a multiple of 16. Not for the greedy method.
    """
    size, least = logits.shape[1], None
    most = jnp.max(logits, axis=1)
    if 0 < method.top_k < size:
        # Below that a probability is 0. The likeliest is above it at any temperature.
        bottom = jnp.minimum(_rank(most - NOTHING * method.temperature), _rank(most) - 1)
        left_out = jnp.full(len(most), size - method.top_k)
        least = _bisected(logits, False, left_out, _value(bottom), most)
    if method.top_p < 1:
        chance = _chance(most, least, method)(logits)
        left_out = (1 - method.top_p) * _sum(lambda part: part, chance)
        # All that are not above that together are not too much to be left out.
        rare = _bisected(chance, True, left_out, left_out / (2 * size), jnp.ones_like(most))
        # The logit, as what is computed of it elsewhere may be another in the last bit.
        last = jnp.min(jnp.where(chance > rare[:, None], logits, jnp.inf), axis=1)
        least = _value(_rank(last) - 1)
    return least


def _chance(most: jax.Array, least: jax.Array | None, method: Method) -> Callable:
    """A function from logits f32[N,...] to probabilities in units of the likeliest token's.

    What reads it computes it: that is faster than to write and read an array of [N,V] in between.
    """

    def chance(logits):
        scaled = jnp.exp((logits - _beside(most, logits)) / method.temperature)
        return scaled if least is None else jnp.where(logits > _beside(least, logits), scaled, 0.0)

    return chance


def _beside(value: jax.Array, array: jax.Array) -> jax.Array:
    """`value` [N] with the axes of `array` [N,...]."""
    return value.reshape(-1, *[1] * (array.ndim - 1))


def _bisected(
    values: jax.Array, weighed: bool, left_out: jax.Array, least: jax.Array, most: jax.Array
) -> jax.Array:
    """A number f32[N], from `least` to below `most`, above which `values` f32[N,V] are kept.

    A value is kept if it and all that are not above it make more than `left_out` [N]: in number, or
    `weighed` in sum. Float32 numbers are in one order with their bits, so that halving an interval
    of bits ends at the value itself, ties and all, after 32 passes at most; mostly sooner, with one
    value left in every row's interval.
    """

    def upto(bound):
        def number(values):
            return (values <= bound[:, None]).astype(jnp.int32)

        def weight(values):
            return jnp.where(values <= bound[:, None], values, 0.0)

        count = _sum(number, values)
        return count, _sum(weight, values) if weighed else count

    def unsettled(state):
        low, high, below_low, below_high = state
        return jnp.any((below_high - below_low > 1) & (high > low + 1))

    def halve(state):
        low, high, below_low, below_high = state
        middle = (low >> 1) + (high >> 1) + (low & high & 1)  # their sum may not fit
        count, held = upto(_value(middle))
        kept = held > left_out
        return (
            jnp.where(kept, low, middle),
            jnp.where(kept, middle, high),
            jnp.where(kept, below_low, count),
            jnp.where(kept, count, below_high),
        )

    # Made of the rows, so that it differs over devices, for the types of a shard_map, as they do.
    everything = 0 * _rank(most) + values.shape[1]
    state = _rank(least), _rank(most), upto(least)[0], everything
    return _value(jax.lax.while_loop(unsettled, halve, state)[0])


def _rank(value: jax.Array) -> jax.Array:
    """Integers i32 in the order of the float32 numbers that they stand for.

    0, -0 and the denormal numbers between them, which CPUs and TPUs take for 0, are one number.
    """
    bits = jax.lax.bitcast_convert_type(jnp.abs(value), jnp.int32)
    return jnp.where(value < 0, -1, 1) * jnp.maximum(bits - DENORMAL, 0)


def _value(rank: jax.Array) -> jax.Array:
    """The inverse of `_rank`."""
    bits = jnp.where(rank == 0, 0, jnp.abs(rank) + DENORMAL)
    size = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(rank < 0, -size, size)


def _sum(of: Callable, *arrays: jax.Array) -> jax.Array:
    """The sum [N] of what `of` makes of arrays [N,V]; 4 times as fast as a plain one on a CPU."""
    parts = zip(*(jnp.split(array, PARTS, axis=1) for array in arrays), strict=True)
    return jnp.sum(functools.reduce(operator.add, [of(*part) for part in parts]), axis=1)


def _invert(logits: jax.Array, chance: Callable, uniform: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Tokens i32[N] at `uniform` f32[N] of the sums of chance(logits), and the whole sum f32[N]."""
    blocks = logits.reshape(logits.shape[0], -1, BLOCK)
    sums = jnp.sum(chance(blocks), axis=2)
    upto = jnp.cumsum(sums, axis=1)
    target = uniform * upto[:, -1]
    block = _first_above(upto, sums, target)
    rest = target - jnp.take_along_axis(upto - sums, block[:, None], axis=1)[:, 0]
    inside = chance(jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0])
    place = _first_above(jnp.cumsum(inside, axis=1), inside, rest)
    return block * BLOCK + place, upto[:, -1]


def _first_above(upto: jax.Array, part: jax.Array, target: jax.Array) -> jax.Array:
    """First column of `upto` [N,C], sums of `part`, above target [N]; never one whose part is 0."""
    columns = jnp.arange(part.shape[1])[None, :]
    positive = part > 0
    found = jnp.min(jnp.where(positive & (upto > target[:, None]), columns, part.shape[1]), axis=1)
    last = jnp.max(jnp.where(positive, columns, 0), axis=1)
    return jnp.minimum(found, last).astype(jnp.int32)
