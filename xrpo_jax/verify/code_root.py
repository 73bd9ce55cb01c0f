"""What of the machine a program in the sandbox sees: its paths, its environment and its user."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig

SHOWN = (
    "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/usr/bin", "/usr/sbin", "/usr/lib", "/usr/lib32",
    "/usr/lib64", "/usr/libexec", "/usr/local/bin", "/usr/local/lib", "/usr/share/zoneinfo",
    "/etc/ld.so.cache", "/etc/alternatives",
)  # fmt: skip
PARTS = ("bin", "lib", "lib64", "pyvenv.cfg")  # of a Python installation
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "{work}",
    "TMPDIR": "{work}",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONINTMAXSTRDIGITS": "0",
    "PYTHONUTF8": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


@functools.cache
def shown() -> tuple[str, ...]:
    """The paths of the machine that programs see: those of Python and of the system's libraries."""
    paths = [path for path in SHOWN if os.path.exists(path)]
    installed = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}
    installed.add(os.path.dirname(os.path.dirname(os.path.realpath(sys.executable))))
    for prefix in sorted(installed | {os.path.realpath(one) for one in installed}):
        for part in PARTS:
            path = os.path.join(prefix, part)
            inside = any(path == one or path.startswith(one + "/") for one in paths)
            if os.path.exists(path) and not inside:
                paths.append(path)
    return tuple(paths)


@functools.cache
def packages() -> tuple[str, ...]:
    """Where installed packages lie; the .pth files there, which may run anything, are not read."""
    paths = sysconfig.get_paths()
    return tuple(dict.fromkeys((paths["purelib"], paths["platlib"])))


def loading() -> dict[str, str]:
    """Where this Python finds its own shared libraries, if the caller's environment says so."""
    name = "LD_LIBRARY_PATH"
    return {name: os.environ[name]} if os.environ.get(name) else {}


def environment() -> dict[str, str]:
    """All the environment that a program has; {work} stands for its working folder."""
    return ENVIRONMENT | loading() | {"PYTHONPATH": os.pathsep.join(packages())}


def mount_point() -> str:
    """A folder of the machine that holds nothing to be shown: the new root is made over it."""
    for folder in ("/mnt", "/media", "/srv", "/tmp", "/opt", "/home"):
        if os.path.isdir(folder) and not any(one.startswith(folder + "/") for one in shown()):
            return folder
    return "/mnt"


def user(mode: str) -> int:
    """A user that nobody is, for one program: the count of processes is kept by user.

    0 where the caller cannot become another; it gets a namespace of users then.
    """
    if mode == "limits" or os.geteuid():
        return 0
    try:
        with open("/proc/self/uid_map") as lines:
            inner, _, count = map(int, next(lines).split())
    except (OSError, ValueError, StopIteration):
        return 0
    first, last = inner + min(2**30, count // 2), min(inner + count, 2**31) - 1
    return first + int.from_bytes(os.urandom(4), "little") % (last - first + 1) if count > 1 else 0
