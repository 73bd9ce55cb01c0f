"""What a timing depends on beside the code: the machine, its other work, memory, allocator.

Plain Python, since the other engines' environments import it, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import time
from collections.abc import Iterator

# Given to every engine alike. Large results come from huge pages: without them a new one of 512 MiB
# costs more in page faults than in computing.
ALLOCATOR = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


@dataclasses.dataclass(kw_only=True)
class Spell:
    """One timed run: its seconds, and shares of the machine's CPU time in it."""

    seconds: float = 0.0
    own: float = 0.0  # this process and its children
    others: float = 0.0  # all other processes
    stolen: float = 0.0  # what the host took from this virtual machine


def _ticks() -> tuple[float, float, float]:
    """CPU seconds of the machine since it started: busy, all, stolen."""
    with open("/proc/stat") as file:
        fields = [int(value) / os.sysconf("SC_CLK_TCK") for value in file.readline().split()[1:9]]
    user, nice, system, idle, waiting, interrupt, soft, stolen = fields
    busy = user + nice + system + interrupt + soft
    return busy, busy + idle + waiting + stolen, stolen


def _own() -> float:
    whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    used = [resource.getrusage(who) for who in whose]
    return sum(each.ru_utime + each.ru_stime for each in used)


@contextlib.contextmanager
def watch() -> Iterator[Spell]:
    """Fills the Spell that it gives with what the body took."""
    spell = Spell()
    busy, total, stolen = _ticks()
    own, begun = _own(), time.perf_counter()
    yield spell
    spell.seconds = time.perf_counter() - begun
    mine = _own() - own
    after = _ticks()
    # The machine's clock ticks in hundredths: over a short run shares of it mean little.
    whole = max(after[1] - total, 1e-9)
    spell.own = min(mine / whole, 1.0)
    spell.others = min(max(after[0] - busy - mine, 0.0) / whole, 1.0)
    spell.stolen = (after[2] - stolen) / whole


def peak_gb() -> float:
    """The most memory that this process has held, in GB (VmHWM)."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e9
    raise OSError("/proc/self/status has no VmHWM")


def describe() -> dict[str, object]:
    """The machine in a few words, and how many processes wanted to run in the last minute."""
    name = "unknown"
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    # AMX decides what bfloat16 costs.
    with open("/proc/cpuinfo") as file:
        flags = file.read()
    units = [unit for unit in ("avx512_bf16", "amx_bf16") if unit in flags]
    return {
        "processor": " ".join([name, *units]),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
    }
