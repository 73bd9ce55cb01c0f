"""A run that was killed anywhere goes on to the bit, and no step after the second compiles.

The runs are processes of their own (tiny/run.py) on a random policy and a task that it solves now
and then. A persistent compilation cache saves most of their time; what comes out of it counts as
compiled in `compiles` (test_log.py).
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import random
import signal
import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file
from tiny import policy

from xrpo_jax import checkpoint
from xrpo_jax.log import comparable, read_metrics, read_rollouts

ROOT = pathlib.Path(__file__).parents[1]
STEPS = 10
XRPO = {"algorithm.name": "xrpo", "algorithm.min_similarity": 0.0, "algorithm.capacity": 8}


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


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    made = Runs(tmp_path_factory.mktemp("runs"))
    yield made
    made.server.communicate()


@pytest.fixture(scope="module")
def straight(runs):
    """XRPO's ten steps in one go."""
    runs.finish("straight", XRPO)
    return "straight"


def test_the_straight_run_is_worth_comparing(runs, straight):
    metrics = runs.metrics(straight)
    assert [record["step"] for record in metrics] == list(range(STEPS + 1))
    assert [record["step"] for record in metrics if "eval/pass@1" in record] == [0, 4, 8, 10]
    assert metrics[-2]["corpus"] >= 2 and max(r.get("seeded", 0) for r in metrics) > 0
    assert sum(record.get("gradient_norm", 0) > 0 for record in metrics) >= 5
    kinds = {record["kind"] for record in runs.rollouts(straight)}
    assert kinds == {"plain", "seeded"} and len(runs.rollouts(straight)) == 16 * STEPS
    tree = runs.tree(straight)
    assert (tree["ledger"]["seeder"]["prompt"] >= 0).sum() >= 2
    assert sorted(path.name for path in (runs.folder / straight / "checkpoints").iterdir()) == [
        "10",
        "9",
    ]


def test_three_steps_and_a_kill_and_seven_in_fresh_processes(runs, straight):
    # The fourth step's metrics are being written: they must not be there twice.
    at = 1 + [i for i, line in enumerate(runs.trace(straight)) if line == "open metrics.jsonl"][3]
    assert runs.run("seven", XRPO, at=at) == -signal.SIGKILL
    assert runs.latest("seven") == 3 and len(runs.metrics("seven")) == 3
    runs.finish("seven", XRPO, fresh=True)
    runs.assert_same("seven", straight)
    # No step after the second of the resumed run compiles: the fifth and sixth of all.
    assert not any(compiled(runs.metrics("seven"))[5:])


# Where in the writing of a checkpoint a kill falls: with all files there, before the rename that
# makes it whole, and (that is what the delay is for) among the writes of Orbax's own threads.
PARTIAL = "checkpoints/3.orbax-checkpoint-tmp"
WRITES = (
    (f"os.rename {PARTIAL}/default.orbax-checkpoint-tmp", 0.0),
    (f"os.rename {PARTIAL}", 0.0),
    (f"os.mkdir {PARTIAL}/default.orbax-checkpoint-tmp/array_metadatas", 0.004),
)


def test_kills_while_a_checkpoint_is_written(runs, straight):
    """One after the other in one run: each leaves its debris for the next."""
    for at, delay in WRITES:
        ended = -signal.SIGALRM if delay else -signal.SIGKILL
        assert runs.run("writes", XRPO, at=at, delay=delay) == ended
        # Within the delay the checkpoint may have become whole.
        assert runs.latest("writes") in ((0, 3) if delay else (0,))
    # While an old one is deleted for the new: half of it is left.
    assert runs.run("writes", XRPO, at="os.remove manifest.ocdbt") == -signal.SIGKILL
    runs.finish("writes", XRPO)
    runs.assert_same("writes", straight)
    left = {path.name for path in (runs.folder / "writes" / "checkpoints").iterdir()}
    assert left == {"9", "10"}


def test_kills_at_random_moments(runs, straight):
    draw = random.Random(0)
    length = len(runs.trace(straight))
    statuses = []
    for _ in range(5):
        at, delay = draw.randint(1, length // 2), draw.choice([0.0, 0.0, 0.01, 0.05])
        statuses.append(runs.run("random", XRPO, at=at, delay=delay))
        if statuses[-1] == 0:
            break
    assert sum(status < 0 for status in statuses) >= 3
    runs.finish("random", XRPO)
    runs.assert_same("random", straight)


def test_asked_to_stop_it_finishes_the_step_and_a_run_may_be_prolonged(runs, straight):
    short = XRPO | {"train.steps": 6}
    at = 1 + [i for i, line in enumerate(runs.trace(straight)) if line == "open metrics.jsonl"][4]
    assert runs.run("longer", short, at=at, by="SIGTERM") == 0
    assert runs.latest("longer") == 5  # no multiple of checkpoint.every
    assert "stopped after 5 of 6 steps; the same command goes on" in runs.output("longer")
    runs.finish("longer", short)
    assert [record["step"] for record in runs.metrics("longer")] == list(range(7))
    runs.finish("longer", XRPO)  # its evaluation after the sixth step was not to be one of ten
    runs.assert_same("longer", straight)


def test_a_finished_run_started_again_changes_nothing(runs, straight):
    def contents():
        return {
            path: path.read_bytes()
            for path in (runs.folder / straight).rglob("*")
            # The policy's file header lists its metadata in any order.
            if path.is_file() and path.name not in ("curve.png", "model.safetensors")
        }

    before = contents()
    runs.finish(straight, XRPO)
    assert contents() == before


@pytest.mark.parametrize("name", ["xrpo", "grpo", "dapo"])
def test_no_step_after_the_second_compiles(runs, straight, name):
    if name == "xrpo":
        metrics = runs.metrics(straight)
        assert max(record["seeded"] for record in metrics[:-1]) > 0  # both lengths were used
    else:
        runs.finish(name, {"algorithm.name": name})
        metrics = runs.metrics(name)
    assert len(compiled(metrics)) == STEPS
    assert not any(compiled(metrics)[2:])
