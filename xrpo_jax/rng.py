"""Random keys are coordinates: (seed, step, stream) -> row (prompt, index) -> token position.

No key is carried or saved, so a rollout does not depend on batch size, slot, round or device,
and a resumed run draws what the uninterrupted one would have drawn.
"""

from __future__ import annotations

import zlib
from typing import Any

import jax
import numpy as np
from flax import struct

STREAMS = ("data", "rollout", "minibatch", "evaluate", "plan", "offline")


def _stream(stream: str) -> int:
    if stream not in STREAMS:
        raise ValueError(f"stream={stream!r}; allowed: {', '.join(STREAMS)}")
    return zlib.crc32(stream.encode())


def host(seed: int, step: int, stream: str, *more: int) -> np.random.Generator:
    """A NumPy generator for the coordinates (seed, step, stream) and `more` of them."""
    return np.random.default_rng([seed, step, _stream(stream), *more])


def key(seed: int, step: int, stream: str) -> jax.Array:
    """A JAX key (u32[2]) for the coordinates (seed, step, stream)."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.PRNGKey(seed), _stream(stream)), step)


@struct.dataclass
class Rows:
    """Coordinates of row keys: the step's key u32[2], prompt i[N] and rollout index i[N]."""

    step_key: Any
    prompt: Any
    index: Any


def rows(step_key: jax.Array, prompt: jax.Array, index: jax.Array) -> jax.Array:
    """Row keys u32[N,2] of those coordinates."""

    def one(prompt, index):
        return jax.random.fold_in(jax.random.fold_in(step_key, prompt), index)

    return jax.vmap(one)(prompt, index)


def tokens(row_keys: jax.Array, position: jax.Array) -> jax.Array:
    """Token keys u32[N,2] from row keys u32[N,2] and positions i32[N]."""
    return jax.vmap(jax.random.fold_in)(row_keys, position)
