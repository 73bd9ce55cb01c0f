"""The device mesh, the two placements that the library uses, and in which order programs run."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "data"
_order, _threads = threading.Lock(), 1


def make(devices: int = 0, cpu_devices: int = 0) -> Mesh:
    """A mesh with one `data` axis over the first `devices` devices (0 = all).

    `cpu_devices` splits the host's CPU into as many (0 = as it is), which works only before JAX has
    started. Raises ValueError when there are fewer.
    """
    if cpu_devices:
        try:
            jax.config.update("jax_num_cpu_devices", cpu_devices)
        except RuntimeError as error:
            raise ValueError(f"mesh.cpu_devices={cpu_devices}: {error}") from error
    found = jax.devices()
    if devices > len(found) or devices < 0:
        raise ValueError(f"mesh.devices={devices}; allowed: 0 (all) to {len(found)} on this host")
    return Mesh(np.array(found[: devices or len(found)]), (AXIS,))


def rows(mesh: Mesh) -> NamedSharding:
    """Leading axis split over the devices."""
    return NamedSharding(mesh, PartitionSpec(AXIS))


def everywhere(mesh: Mesh) -> NamedSharding:
    """A copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def program(function: Callable, **options) -> Callable:
    """`jax.jit` of what several threads may call, for programs that join several devices.

    Its `lower` is that of `jax.jit`: what is only compiled needs no order.
    """
    jitted = jax.jit(function, **options)
    call = functools.wraps(function)(in_order(jitted))
    call.lower = jitted.lower
    return call


def in_order(compiled: Callable) -> Callable:
    """A compiled program that joins several devices and that several threads may call.

    All devices must get such programs in one order, or each waits for another for ever. Within
    `several_threads` they are therefore handed over one at a time, which does not wait until they
    have run.
    """

    def call(*arguments):
        with _order if _threads > 1 else contextlib.nullcontext():
            return compiled(*arguments)

    return call


@contextlib.contextmanager
def several_threads() -> Iterator[None]:
    """Within this, more than one thread calls programs."""
    global _threads
    _threads += 1
    try:
        yield
    finally:
        _threads -= 1
