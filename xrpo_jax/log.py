"""What a run leaves for people: phase times, metrics.jsonl, rollouts.jsonl.gz, the progress bar."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import os
import pathlib
import threading
import time
import zlib
from collections.abc import Iterator

import jax
import numpy as np

TIMED = ("seconds/", "tokens_per_second", "compiles")  # prefixes that differ from run to run


class Clock:
    """Seconds by phase: `with clock("sample"): ...`; phases nest without counting twice.

    A trace that is being recorded shows each phase under its name.
    """

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._since = time.perf_counter()

    def _credit(self) -> None:
        now = time.perf_counter()
        if self._open:
            phase = self._open[-1]
            self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = now

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._credit()
        self._open.append(phase)
        try:
            with jax.profiler.TraceAnnotation(phase):
                yield
        finally:
            self._credit()
            self._open.pop()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """What XLA compiled in some stretch of time: names in order, those from the cache, seconds."""

    names: tuple[str, ...] = ()
    cached: int = 0
    seconds: float = 0.0  # of all, also of those that several threads compiled side by side

    def metrics(self) -> dict:
        """As they are logged; names only where something was compiled."""
        found = {
            "compiles": len(self.names),
            "compiles_cached": self.cached,
            "seconds/compile": self.seconds,
        }
        return found | ({"compiles_of": list(self.names)} if self.names else {})


class Compiles:
    """Counts what XLA compiles (also what comes out of the persistent cache) in this process."""

    EVENT = "/jax/core/compile/backend_compile_duration"
    HIT = "/jax/compilation_cache/cache_hits"

    def __init__(self):
        self._all, self._since, self._listening = Compiled(), Compiled(), True
        self._lock, self._hit = threading.Lock(), threading.local()
        jax.monitoring.register_event_listener(self._found)
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    @property
    def count(self) -> int:
        """Functions compiled up to now."""
        return len(self._all.names)

    def _found(self, event: str, **_) -> None:
        if event == self.HIT:  # the compilation that this thread is in ends with it
            self._hit.now = True

    def _heard(self, event: str, duration: float, **more) -> None:
        if event != self.EVENT:
            return
        hit, self._hit.now = getattr(self._hit, "now", False), False
        if self._listening:
            with self._lock:
                self._all = Compiled(
                    names=(*self._all.names, str(more.get("fun_name", "a function"))),
                    cached=self._all.cached + hit,
                    seconds=self._all.seconds + duration,
                )

    def take(self) -> Compiled:
        """What was compiled since the last call."""
        with self._lock:
            before, self._since = self._since, self._all
            return Compiled(
                names=self._since.names[len(before.names) :],
                cached=self._since.cached - before.cached,
                seconds=self._since.seconds - before.seconds,
            )

    def close(self) -> None:
        """Stop counting; JAX has no way to unregister in all the versions that are allowed."""
        self._listening = False


def read_metrics(path: str | os.PathLike) -> list[dict]:
    """The records of a metrics.jsonl; a last line cut off by a kill is left out."""
    records = []
    try:
        lines = pathlib.Path(path).read_text().splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def ended(records: list[dict]) -> bool:
    """Whether a run is complete: its last record is the evaluation after the last step.

    Evaluations on the way stand in the record of a step, which has a reward.
    """
    return bool(records) and "eval/pass@1" in records[-1] and "reward" not in records[-1]


def read_rollouts(path: str | os.PathLike) -> Iterator[dict]:
    """The records of a rollouts.jsonl.gz, up to where a kill cut it off."""
    if not os.path.exists(path):
        return
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)
    except (EOFError, json.JSONDecodeError, UnicodeDecodeError, gzip.BadGzipFile, zlib.error):
        return


def write_whole(path: pathlib.Path, data: bytes) -> None:
    """Write `data` so that a kill leaves the old file or the new one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(data)
    os.replace(partial, path)


class Log:
    """The two files of a working directory, cut back to the step that a run resumes from."""

    def __init__(self, workdir: str | os.PathLike, from_step: int, keep_rollouts: bool):
        self.metrics_path = pathlib.Path(workdir) / "metrics.jsonl"
        self.rollouts_path = pathlib.Path(workdir) / "rollouts.jsonl.gz"
        self.keep_rollouts = keep_rollouts
        kept = [r for r in read_metrics(self.metrics_path) if r["step"] < from_step]
        write_whole(self.metrics_path, "".join(json.dumps(r) + "\n" for r in kept).encode())
        if keep_rollouts:
            partial = self.rollouts_path.with_name(self.rollouts_path.name + ".partial")
            with gzip.open(partial, "wt", encoding="utf-8") as file:
                for record in read_rollouts(self.rollouts_path):
                    if record["step"] < from_step:
                        file.write(json.dumps(record) + "\n")
            os.replace(partial, self.rollouts_path)

    def metrics(self, step: int, values: dict) -> None:
        """Append one record; numbers are Python's, and a full disk raises here, before the next."""
        record = {"step": step} | {name: _plain(value) for name, value in values.items()}
        with open(self.metrics_path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def rollouts(self, step: int, records: list[dict]) -> None:
        """Append one gzip member with the step's rollouts."""
        if self.keep_rollouts:
            with gzip.open(self.rollouts_path, "at", encoding="utf-8") as file:
                for record in records:
                    file.write(json.dumps({"step": step} | record) + "\n")


def _plain(value):
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value.item() if isinstance(value, np.generic) else value


def comparable(record: dict) -> dict:
    """A metrics record without what depends on the machine's speed."""
    return {name: value for name, value in record.items() if not name.startswith(TIMED)}
