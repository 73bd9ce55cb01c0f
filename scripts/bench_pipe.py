"""An engine in a process of its own that runs once when told to, so that engines can alternate.

The driver writes a line with the work, then a line with a command a time, mostly `run`; the engine
answers each with a line of JSON. Only one computes at a time, and nothing is loaded or compiled
twice. Plain Python, since the other engines' environments import it, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable

from bench_machine import ALLOCATOR, peak_gb, watch

SCRIPTS = pathlib.Path(__file__).parent


def serve(prepare: Callable[[dict], dict[str, Callable[[], dict]]]) -> None:
    """Answer the driver; `prepare` loads what the work says and returns its commands by name.

    Each returns facts as a dict; those of `run` have `tokens`, the number of useful ones. `warm`
    compiles and allocates what a run needs, with less work; without it that is a run.
    """
    # Libraries print; the answers have the pipe to themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(facts: dict) -> None:
        answers.write(json.dumps(facts) + "\n")
        answers.flush()

    begun = time.perf_counter()
    commands = prepare(json.loads(sys.stdin.readline()))
    commands.setdefault("warm", commands["run"])
    answer({"load_seconds": time.perf_counter() - begun})
    for command in iter(sys.stdin.readline, ""):
        with watch() as spell:
            facts = commands[command.strip()]()
        answer(dataclasses.asdict(spell) | {"peak_gb": peak_gb()} | facts)
    answers.close()
    # Threads of a trainer that waits for its next step would keep the process.
    sys.stderr.flush()
    os._exit(0)


class Engine:
    """The driver's end: `run` returns one run's facts."""

    def __init__(self, python: pathlib.Path, script: str, work: dict, log: pathlib.Path):
        """Start `scripts/peers/<script>.py` under `python`; RuntimeError if it does not load."""
        environment = os.environ | ALLOCATOR
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # compiling is part of what is measured
        environment |= {
            "PYTHONPATH": f"{SCRIPTS}{os.pathsep}{SCRIPTS.parent}",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        log.parent.mkdir(parents=True, exist_ok=True)
        self.name, self.log = script, log
        with open(log, "w") as errors:
            self._process = subprocess.Popen(
                [str(python), str(SCRIPTS / "peers" / f"{script}.py")],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.loaded = self.ask(json.dumps(work))

    def ask(self, line: str) -> dict:
        """What a command gives; RuntimeError with the engine's last words if it died."""
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            code, said = self._process.wait(), self.log.read_text().strip().splitlines()
            last = said[-1] if said else "nothing was said"
            raise RuntimeError(f"{self.name} ended with {code}: {last} (all of it: {self.log})")
        return json.loads(answer)

    def warm(self) -> dict:
        """The facts of a first run, which may be of less work; later ones compile nothing."""
        return self.ask("warm")

    def run(self) -> dict:
        """The facts of one run of the work."""
        return self.ask("run")

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_) -> None:
        with contextlib.suppress(BrokenPipeError):  # it may have died
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
