"""The device mesh and the two placements that the library uses."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "data"


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
