"""What XLA compiles is kept on disk, so that the next run of the same shapes starts sooner."""

from __future__ import annotations

import os
import pathlib
import sys
import tempfile

import jax
from jax.experimental.compilation_cache import compilation_cache

OFF = ("", "no")
# Environment variables of JAX: the folder counts where compile.cache_dir is "auto", the others
# always.
FOLDER = "JAX_COMPILATION_CACHE_DIR"
LEAST = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": 0.0,
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": -1,
}


def folder_of(setting: str) -> pathlib.Path | None:
    """The folder that `compile.cache_dir` means; None: nothing is kept.

    "auto" is what JAX_COMPILATION_CACHE_DIR says, or else a folder of the user's. RuntimeError
    where that user has no home.
    """
    if setting == "auto":
        user = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        setting = os.environ.get(FOLDER, f"{user}/xrpo_jax/jax")
    return None if setting in OFF else pathlib.Path(setting).expanduser().absolute()


def keep(setting: str) -> pathlib.Path | None:
    """Keep everything that is compiled from now on in the folder of a setting, and look there.

    JAX's own limits keep only what took a second to compile: on a CPU nearly nothing. Its keys hold
    the CPU's instruction set, so that machines of several kinds may share a folder. Where it cannot
    be written, this warns and the run goes on without: returns the folder, or None.
    """
    folder = None
    try:
        folder = _writable(folder_of(setting))
    except (OSError, RuntimeError) as error:
        print(
            f"WARNING: compile.cache_dir={setting!r}: {error}. What is compiled is not kept",
            file=sys.stderr,
        )
    for name, value in LEAST.items():
        if name not in os.environ:
            jax.config.update(name.lower(), value)
    jax.config.update(FOLDER.lower(), None if folder is None else str(folder))
    compilation_cache.reset_cache()  # it takes a folder only before it is first used
    return folder


def _writable(folder: pathlib.Path | None) -> pathlib.Path | None:
    """The folder, made where it is not there; OSError where it cannot be written."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    return folder
