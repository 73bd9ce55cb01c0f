"""Runs of `python -m xrpo_jax.main` in processes of their own, compared with one another."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
from safetensors.numpy import load_file
from tiny import policy

from xrpo_jax import checkpoint
from xrpo_jax.log import comparable, read_metrics, read_rollouts

ROOT = pathlib.Path(__file__).parents[2]
STEPS = 10


class Runs:
    """A folder of runs, and the server that makes them."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        model = dataclasses.replace(policy.MODEL, num_layers=1)  # it compiles in half the time
        self.policy = policy.save(folder / "policy", model)
        self.server = self.start()

    def start(self) -> subprocess.Popen:
        """A fresh interpreter."""
        return subprocess.Popen(
            [sys.executable, "tests/tiny/run.py"],
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": "",
                "JAX_COMPILATION_CACHE_DIR": str(self.folder / "cache"),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, name: str, settings: dict, *, at=None, delay=0.0, by="SIGKILL", fresh=False):
        """Start or resume the run `name`; how it ended: an exit code, or minus the signal."""
        where = self.folder / name
        arguments = {"init_from": self.policy, **settings}
        request = {
            "argv": [
                "--config=tests/tiny/config.py",
                f"--workdir={where}",
                *(f"--config.{key}={value}" for key, value in arguments.items()),
            ],
            "output": f"{where}.out",
            "trace": f"{where}.trace",
            "folder": f"{where}/",
            "kill": None if at is None else {"at": at, "delay": delay, "signal": by},
        }
        server = self.start() if fresh else self.server
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        status = os.waitstatus_to_exitcode(int(server.stdout.readline()))
        if fresh:
            server.communicate()
        return status

    def finish(self, name: str, settings: dict, **more) -> None:
        status = self.run(name, settings, **more)
        assert status == 0, self.output(name)

    def output(self, name: str) -> str:
        return (self.folder / f"{name}.out").read_text()

    def trace(self, name: str) -> list[str]:
        return (self.folder / f"{name}.trace").read_text().splitlines()

    def metrics(self, name: str) -> list[dict]:
        return read_metrics(self.folder / name / "metrics.jsonl")

    def rollouts(self, name: str) -> list[dict]:
        return list(read_rollouts(self.folder / name / "rollouts.jsonl.gz"))

    def latest(self, name: str) -> int:
        """The newest whole checkpoint, by the names there are."""
        steps = [path.name for path in (self.folder / name / "checkpoints").glob("*")]
        return max([int(step) for step in steps if step.isdigit()], default=0)

    def tree(self, name: str) -> dict:
        """All that the last checkpoint holds, as it was stored."""
        manager = checkpoint.open_manager(self.folder / name, 2)
        assert manager.latest_step() == STEPS
        found = manager.restore(STEPS, args=ocp.args.StandardRestore())
        manager.close()
        return jax.tree.map(np.asarray, found)

    def assert_same(self, name: str, straight: str) -> None:
        """Parameters, optimizer, ledger, metrics, rollouts and exported policy: to the bit."""
        one, other = (
            jax.tree_util.tree_leaves_with_path(self.tree(each)) for each in (name, straight)
        )
        assert [path for path, _ in one] == [path for path, _ in other]
        for (path, found), (_, expected) in zip(one, other, strict=True):
            assert found.dtype == expected.dtype, path
            assert found.tobytes() == expected.tobytes(), path
        found, expected = self.metrics(name), self.metrics(straight)
        assert [comparable(record) for record in found] == [comparable(r) for r in expected]
        assert self.rollouts(name) == self.rollouts(straight)
        # The file's header lists its metadata in any order, so not its bytes are compared.
        one, other = (
            load_file(self.folder / each / "policy" / "model.safetensors")
            for each in (name, straight)
        )
        assert one.keys() == other.keys()
        assert all(one[key].tobytes() == other[key].tobytes() for key in one)


def compiled(metrics: list[dict]) -> list[int]:
    """What each step compiled."""
    return [record["compiles"] for record in metrics if "compiles" in record]
