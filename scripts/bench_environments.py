"""Virtual environments of the engines that we are compared with, one each, at pinned versions."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

# torch from an index without CUDA where the default one brings that; see `make`.
PACKAGES = {
    "trl": ("torch==2.13.0", "transformers==5.24.0", "trl==1.16.*", "safetensors"),
    "tunix": ("google-tunix==0.1.7", "jax==0.10.2", "safetensors"),
}


def python_of(name: str, envs: pathlib.Path) -> pathlib.Path:
    """The interpreter of the environment `name` (or our own for `ours`)."""
    return pathlib.Path(sys.executable) if name == "ours" else envs / name / "bin" / "python"


def make(name: str, envs: pathlib.Path) -> None:
    """Make the environment `name` in `envs` unless it is there.

    PIP_INDEX_URL and the like are heard, since pip is what installs. RuntimeError if it fails.
    """
    if name == "ours" or (envs / name / ".complete").exists():
        return
    folder = envs / name
    python = python_of(name, envs)
    if python.exists() and _holds(python, name):  # made by hand
        return
    print(f"making {folder}: {' '.join(PACKAGES[name])}", flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    commands = (
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [str(python), "-m", "pip", "install", "--quiet", *PACKAGES[name]],
    )
    for command in commands:
        done = subprocess.run(command, env=os.environ | {"PYTHONPATH": ""}, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}")
    (folder / ".complete").touch()


def versions(name: str, envs: pathlib.Path) -> dict[str, str]:
    """The installed versions of an environment's packages that decide the speed."""
    wanted = ("torch", "transformers", "trl", "google-tunix", "jax", "jaxlib", "flax")
    script = (
        "import importlib.metadata as m, json\n"
        f"print(json.dumps({{d.metadata['Name'].lower(): d.version for d in m.distributions() "
        f"if d.metadata['Name'].lower() in {wanted!r}}}))"
    )
    found = subprocess.run(
        [str(python_of(name, envs)), "-c", script], capture_output=True, text=True, check=True
    )
    import json

    return json.loads(found.stdout)


def _holds(python: pathlib.Path, name: str) -> bool:
    """Whether the environment has the pinned versions already."""
    script = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
    for package in PACKAGES[name]:
        package, _, version = package.partition("==")
        found = subprocess.run(
            [str(python), "-c", script, package], capture_output=True, text=True, check=False
        )
        same = found.stdout.strip().partition("+")[0]
        if found.returncode or not same.startswith(version.removesuffix(".*")):
            return False
    return True
