"""What is chosen by the kind of machine, where no setting says otherwise."""

from __future__ import annotations

import ctypes
import os

import jax


def cores() -> int:
    """The cores that this process may use."""
    usable = getattr(os, "sched_getaffinity", None)
    return len(usable(0)) if usable else os.cpu_count() or 1


def lanes(devices: int) -> int:
    """How many lanes of the sampler to run side by side over `devices` devices.

    On a CPU small products use one core each: with a lane for each of two cores rollouts were 1.5
    times as fast. An accelerator runs one program at a time.
    """
    return max(min(cores() // devices, 4), 1) if _on_cpu() else 1


def scatters() -> bool:
    """Whether a token's keys and values go into the cache by a scatter.

    On a CPU that is a slow loop over rows, and a pass over the whole cache is faster.
    """
    return not _on_cpu()


def give_memory_back() -> None:
    """Return to the system what was freed, where the C library can.

    After compiling SmolLM2's sampler and update glibc holds .9 GB that nobody uses, on top of which
    the step's arrays would come.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _on_cpu() -> bool:
    return jax.default_backend() == "cpu"
