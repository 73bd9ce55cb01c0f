"""All programs that the lanes of a sampler can need, compiled before there is anything to run."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from xrpo_jax import lane as lanes
from xrpo_jax import mesh as meshes
from xrpo_jax import rng
from xrpo_jax.arrays import Params
from xrpo_jax.lane import Decoding, Lane


def jobs(
    decoding: Decoding,
    mesh: Mesh,
    params: Params,
    pages: list[tuple[int, int]],
    sizes: tuple[int, ...],
    lengths: tuple[int, ...],
    pauses: bool,
) -> list[Callable[[], None]]:
    """Jobs that compile what rows can need that begin from `pages` of G x P tokens.

    Lanes have one of `sizes` in rows, only fall to the first, and one of `lengths` in slots, which
    change by one at a time. With `pauses` rows also begin in the cache of a whole lane. The jobs
    run nothing: that takes no memory, and programs that join devices need no order.
    """
    model = decoding.model, decoding.dtype

    def everywhere(tree):
        return _placed(tree, meshes.everywhere(mesh))

    def rows(tree):
        return _placed(tree, meshes.rows(mesh))

    def lane_of(size: int, length: int) -> Lane:
        return rows(lanes.empty.eval_shape(*model, mesh, size, length))

    params = everywhere(params)
    weights = everywhere(lanes.weights.eval_shape(*model, params))
    steps, step_key = everywhere((np.int32(0), rng.key(0, 0, "rollout")))
    prompts = [everywhere(np.zeros(shape, np.int32)) for shape in pages]
    caches = [everywhere(lanes.prefill.eval_shape(*model, params, each)) for each in prompts]
    if pauses:  # a path may go on in any lane
        caches.append(lane_of(sizes[-1], lengths[-1]).cache)
    longest, others = [], [(lanes.weights, *model, params)]
    others += [(lanes.prefill, *model, params, each) for each in prompts]
    for size, (place, length) in itertools.product(sizes, enumerate(lengths)):
        lane, start = lane_of(size, length), rows(lanes.nobody(size))
        longest.append((lanes.advance, decoding, mesh, weights, lane, steps))
        others.append((lanes.empty, *model, mesh, size, length))
        others += [(lanes.begin, mesh, lane, cache, start, step_key) for cache in caches]
        near = [(size, other) for other in lengths[max(place - 1, 0) : place + 2]]
        fits = [fit for fit in near if fit != (size, length)]
        fits += [(sizes[0], length)] * (size > sizes[0])
        for number, other in fits:
            others.append((lanes.fit, mesh, lane, rows(np.zeros(number, np.int32)), other))
    return [functools.partial(_compile, *program) for program in (*longest, *others)]


def _placed(tree, where: NamedSharding):
    """The shapes of arrays that lie there."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), tree
    )


def _compile(function: Callable, *arguments) -> None:
    """What is called with arguments such as these then finds the program."""
    function.lower(*arguments).compile()
