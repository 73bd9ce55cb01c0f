"""Virtual environments of the engines that we are compared with, one each, at pinned versions."""

from __future__ import annotations

import fnmatch
import json
import os
import pathlib
import subprocess
import sys

# On Linux the default index's torch brings CUDA: PIP_EXTRA_INDEX_URL may name one without.
PACKAGES = {
    "trl": ("torch==2.13.0", "transformers==5.24.0", "trl==1.16.*", "safetensors"),
    "tunix": ("google-tunix==0.1.7", "jax==0.10.2", "safetensors"),
}
SHOWN = ("torch", "transformers", "trl", "google-tunix", "jax", "jaxlib", "flax")


def python_of(name: str, envs: pathlib.Path) -> pathlib.Path:
    """The interpreter of the environment `name` (or our own for `ours`)."""
    return pathlib.Path(sys.executable) if name == "ours" else envs / name / "bin" / "python"


def make(name: str, envs: pathlib.Path) -> None:
    """Make the environment `name` in `envs` with pip, which hears PIP_INDEX_URL and the like.

    One that is there is taken as it is if it has the pinned versions. RuntimeError if it has
    others, or if pip fails.
    """
    if name == "ours":
        return
    folder, python, wanted = envs / name, python_of(name, envs), " ".join(PACKAGES[name])
    if folder.exists():
        if not _pinned(versions(name, envs), name):
            raise RuntimeError(
                f"{folder} has not the versions {wanted}; remove it, or choose another --envs"
            )
        return
    print(f"making {folder}: {wanted}", flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [str(python), "-m", "pip", "install", "--quiet", *PACKAGES[name]],
    ):
        # Our own path would hide what is installed there.
        done = subprocess.run(command, env=os.environ | {"PYTHONPATH": ""}, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}")


def versions(name: str, envs: pathlib.Path) -> dict[str, str]:
    """The installed versions of all packages of an environment; empty if it has no interpreter."""
    script = (
        "import importlib.metadata as m, json; "
        "print(json.dumps({d.metadata['Name'].lower(): d.version for d in m.distributions()}))"
    )
    command = [str(python_of(name, envs)), "-c", script]
    try:
        found = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": ""}, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return {}
    return json.loads(found.stdout)


def shown(installed: dict[str, str]) -> dict[str, str]:
    """The versions that decide the speed."""
    return {name: installed[name] for name in SHOWN if name in installed}


def _pinned(installed: dict[str, str], name: str) -> bool:
    for package in PACKAGES[name]:
        package, _, version = package.partition("==")
        found = installed.get(package, "").partition("+")[0]  # torch says +cpu
        if not found or not fnmatch.fnmatch(found, version or "*"):
            return False
    return True
