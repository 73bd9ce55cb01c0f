"""A lane of the sampler: rows that are decoded together, each at its own place in its completion.

Everything here is a pure function of arrays and runs on the device; sampler.py decides on the host
which row goes where. Nothing that decodes crosses rows, so a lane may be split over devices without
communication, and two lanes may run at the same time; `begin` and `fit` may join devices.

Shapes: n rows · G prompts · S steps of a chunk · C slots of the cache · P prompt length.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, PartitionSpec

from xrpo_jax import mesh as meshes
from xrpo_jax import rng
from xrpo_jax.arrays import Params
from xrpo_jax.model import decode
from xrpo_jax.model.config import ModelConfig
from xrpo_jax.sampling import Method, draw_token

ROWS, ALL = PartitionSpec(meshes.AXIS), PartitionSpec()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoding:
    """What decides `advance` beside shapes; static under jit."""

    model: ModelConfig
    method: Method
    dtype: str
    stop_ids: tuple[int, ...]
    chunk: int  # S
    scattered: bool  # see decode.step


@struct.dataclass
class Lane:
    """The state of n rows between two steps; a row with nothing left is idle."""

    cache: decode.Cache
    token: Any  # i32[n] the newest token, whose keys and values are not in the cache yet
    position: Any  # i32[n] its slot
    step: Any  # i32[n] the next token's place in the completion
    left: Any  # i32[n] tokens that may still be drawn
    key: Any  # u32[n,2]


@struct.dataclass
class Start:
    """Rows that begin in a lane, one entry a row of the lane: copied from `place` of a page."""

    begins: Any  # bool[n] the other entries mean nothing where it is false
    place: Any  # i32[n] row of the page
    token: Any  # i32[n]
    position: Any  # i32[n]
    step: Any  # i32[n]
    left: Any  # i32[n]
    prompt: Any  # i32[n] coordinates of the row's key
    index: Any  # i32[n]


def nobody(size: int) -> Start:
    """NumPy columns of a lane of `size` rows in which none begins."""
    names = [field.name for field in dataclasses.fields(Start)]
    start = Start(**{name: np.zeros(size, np.int32) for name in names})
    return start.replace(begins=np.zeros(size, bool))


@struct.dataclass
class Drawn:
    """What a chunk drew: tokens i32[n,S], logp f32[n,S], number i32[n], stopped bool[n]."""

    tokens: Any
    logp: Any
    number: Any
    stopped: Any


@functools.partial(jax.jit, static_argnums=(0, 1))
def weights(model: ModelConfig, dtype: str, params: Params) -> dict:
    """The parameters as decoding reads them."""
    return decode.for_decoding(params, model, jnp.dtype(dtype))


@functools.partial(jax.jit, static_argnums=(0, 1))
def prefill(model: ModelConfig, dtype: str, params: Params, tokens: jax.Array) -> decode.Cache:
    """A page: the cache of prompts i32[G,P]."""
    with jax.named_scope("prefill"):
        return decode.prefill(params, model, tokens, dtype=jnp.dtype(dtype))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def empty(model: ModelConfig, dtype: str, mesh: Mesh, rows: int, length: int) -> Lane:
    """A lane of idle rows."""

    def zeros() -> jax.Array:
        return jnp.zeros(rows, jnp.int32)

    return _split(
        mesh,
        Lane(
            cache=decode.empty(model, rows, length, jnp.dtype(dtype)),
            token=zeros(),
            position=zeros(),
            step=zeros(),
            left=zeros(),
            key=jnp.zeros((rows, 2), jnp.uint32),
        ),
    )


@functools.partial(meshes.program, static_argnums=0, donate_argnums=1)
def begin(mesh: Mesh, lane: Lane, page: decode.Cache, start: Start, step_key: jax.Array) -> Lane:
    """The lane with new rows, whose slots are copied from the page as far as both reach."""
    length = min(page.keys[0].shape[2], lane.cache.keys[0].shape[2])

    def copied(old: jax.Array, pages: jax.Array) -> jax.Array:
        new = pages[:, :, :length][start.place]
        new = jnp.where(start.begins[:, None, None, None], new, old[:, :, :length])
        return jax.lax.dynamic_update_slice(old, new, (0, 0, 0, 0))

    def chosen(old: jax.Array, new: jax.Array) -> jax.Array:
        return jnp.where(start.begins, new, old)

    fresh = rng.rows(step_key, start.prompt, start.index)
    return _split(
        mesh,
        Lane(
            cache=jax.tree.map(copied, lane.cache, page),
            token=chosen(lane.token, start.token),
            position=chosen(lane.position, start.position),
            step=chosen(lane.step, start.step),
            left=chosen(lane.left, start.left),
            key=jnp.where(start.begins[:, None], fresh, lane.key),
        ),
    )


@functools.partial(meshes.program, static_argnums=(0, 3))
def fit(mesh: Mesh, lane: Lane, place: jax.Array, length: int) -> Lane:
    """The rows `place` i32[n'] of a lane in a cache of another length; -1 gives an idle row."""
    chosen = jax.tree.map(lambda leaf: leaf[jnp.maximum(place, 0)], lane)

    def resized(leaf: jax.Array) -> jax.Array:
        more = length - leaf.shape[2]
        if more <= 0:
            return leaf[:, :, :length]
        return jnp.pad(leaf, ((0, 0), (0, 0), (0, more), (0, 0)))

    return _split(
        mesh,
        chosen.replace(
            cache=jax.tree.map(resized, chosen.cache), left=jnp.where(place < 0, 0, chosen.left)
        ),
    )


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def advance(
    decoding: Decoding, mesh: Mesh, weights: dict, lane: Lane, steps: jax.Array
) -> tuple[Lane, Drawn]:
    """Up to `steps` (i32 scalar, at most S) more tokens of every row that has some left.

    Each device steps its own rows and waits for no other: the loops of top-k and top-p go on until
    all rows have settled, and would else ask the rows of every device.
    """
    local = jax.shard_map(
        functools.partial(_advance, decoding),
        mesh=mesh,
        in_specs=(ALL, ROWS, ALL),
        out_specs=ROWS,
    )
    return _split(mesh, local(weights, lane, steps))


def _advance(decoding: Decoding, weights: dict, lane: Lane, steps: jax.Array) -> tuple[Lane, Drawn]:
    rows = lane.token.shape[0]
    stops = jnp.array(decoding.stop_ids, jnp.int32)[None, :]

    def body(i: jax.Array, state: tuple[Lane, Drawn]) -> tuple[Lane, Drawn]:
        lane, drawn = state
        active = lane.left > 0
        hidden, cache = decode.step(
            weights,
            decoding.model,
            lane.token,
            lane.position,
            lane.cache,
            dtype=jnp.dtype(decoding.dtype),
            scattered=decoding.scattered,
        )
        scores = decode.logits(weights, hidden)
        uniform = jax.vmap(jax.random.uniform)(rng.tokens(lane.key, lane.step))
        token, token_logp = draw_token(scores, uniform, decoding.method)
        ends = active & jnp.any(token[:, None] == stops, axis=1)
        more = active.astype(jnp.int32)
        drawn = Drawn(
            tokens=drawn.tokens.at[:, i].set(jnp.where(active, token, 0)),
            logp=drawn.logp.at[:, i].set(jnp.where(active, token_logp, 0.0)),
            number=drawn.number + more,
            stopped=drawn.stopped | ends,
        )
        lane = Lane(
            cache=cache,
            token=jnp.where(active, token, lane.token),
            position=lane.position + more,
            step=lane.step + more,
            left=jnp.where(ends, 0, lane.left - more),
            key=lane.key,
        )
        return lane, drawn

    nothing = Drawn(
        tokens=jnp.zeros((rows, decoding.chunk), jnp.int32),
        logp=jnp.zeros((rows, decoding.chunk), jnp.float32),
        number=jnp.zeros(rows, jnp.int32),
        stopped=jnp.zeros(rows, bool),
    )
    nothing = jax.lax.pcast(nothing, meshes.AXIS, to="varying")  # as what is written into it
    return jax.lax.fori_loop(0, steps, body, (lane, nothing))


def _split(mesh: Mesh, tree: Any) -> Any:
    """Placed by rows as everything of a lane is, so that what reads it is compiled once."""
    return jax.lax.with_sharding_constraint(tree, meshes.rows(mesh))
