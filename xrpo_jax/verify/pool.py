"""A pool of worker processes for graders that hang, crash, print or eat memory.

    caller ── control socket ──▶ zygote: imports the grader once, forks, ends and reaps workers
       └───── a socket each ───▶ worker: one item at a time, a verdict back as JSON

The caller, which may run JAX with many threads, is never forked. A thread of its own speaks with
the processes while there is something to grade, and never waits for one without a time limit. What
is lost with a worker is graded again on a fresh one.
"""

from __future__ import annotations

import collections
import io
import json
import math
import os
import pickle
import selectors
import signal
import threading
import time
import types
import weakref
from collections.abc import Callable, Sequence

from xrpo_jax.types import Verdict
from xrpo_jax.verify.stream import Stream, job_of
from xrpo_jax.verify.worker import ITEM, LONGEST_REPLY, REPLY
from xrpo_jax.verify.zygote import (
    Job,
    Slot,
    ZygoteLost,
    cause,
    drop_worker,
    end_worker,
    fork_worker,
    hear,
    last_words,
    push,
    start_zygote,
    stop_zygote,
)

ATTEMPTS = 3
START_LIMIT = 120.0  # seconds for the imports of the zygote
SILENCE_LIMIT = 5.0  # seconds for an answer of the zygote, which takes milliseconds
ROOM = 32  # MiB of address space that a worker needs beyond the imports
KEPT = ("correct", "wrong", "unparsed")  # statuses that are remembered across calls
MISSHAPEN = "reply of a wrong shape"
Over = Callable[[], bool]
ALLOWED = "a function of an importable module, or a method of a record that pickles"


class Pool:
    """Grades items by `grade(*item)` in killable workers.

    `workers`: processes, 0 for the usable cores, at most 8. `deadline`: seconds of wall clock for
    an item from when it is sent, over all attempts. `memory_mb`: MiB of address space of a worker
    (on Linux), which counts what is reserved as well as what is used; programs that it starts have
    the limit too, and end with it at the latest. `cache`: verdicts remembered across calls, of
    those that are no failures. `modules`: names of modules to import ahead of the first item.
    Raises ValueError where a setting is wrong or `grade` cannot be sent.
    """

    def __init__(
        self,
        grade: Callable[..., Verdict],
        *,
        workers: int = 0,
        deadline: float = 10.0,
        memory_mb: int = 2048,
        cache: int = 10_000,
        modules: tuple[str, ...] = (),
    ):
        _check("workers", workers, isinstance(workers, int) and workers >= 0, "0 (cores) or more")
        _check("deadline", deadline, _number(deadline) and 0 < deadline < math.inf, "above 0")
        fits = isinstance(memory_mb, int) and 0 < memory_mb < 1 << 40
        _check("memory_mb", memory_mb, fits, "a whole number above 0")
        _check("cache", cache, isinstance(cache, int) and cache >= 0, "0 (none) or more")
        named = isinstance(modules, tuple | list) and all(isinstance(name, str) for name in modules)
        _check("modules", modules, named, "names of modules in a tuple")
        _check("grade", grade, callable(grade), "a function that returns a Verdict")
        self._name = _name(grade)
        self._setup = pickle.dumps((tuple(modules), memory_mb, _pickled(grade, self._name)))
        self._workers = workers or min(_cores(), 8)
        self._deadline, self._memory, self._cache_size = deadline, memory_mb, cache
        self._cache: collections.OrderedDict[bytes, Verdict] = collections.OrderedDict()
        self._lock = threading.Lock()  # held by whoever speaks with the processes
        self._remembering = threading.Lock()
        self._owner, self._closed, self._count = os.getpid(), False, 0
        self._begin()  # it imports while the caller goes on

    def map(self, items: Sequence[tuple]) -> list[Verdict]:
        """The verdict on each item, in their order; equal items are graded once.

        An item that is not done at its deadline is timed_out; one whose worker died three times,
        or whose grader raised or returned no Verdict, is crashed. Takes at most
        deadline × ceil(items / workers) + 1 seconds from when the imports are done. Raises
        ValueError where an item does not pickle or the grader does not import, before any grading;
        RuntimeError where no process can be started or the pool is closed.
        """
        jobs = [job_of(place, item) for place, item in enumerate(items)]
        with self.begin() as stream:
            for job in jobs:
                stream.put(job)
            del jobs  # a payload goes when its verdict is there
            return stream.verdicts()

    def begin(self) -> Stream:
        """A stream of items: `add(item)` for each, `verdicts()` in the end, all within a `with`.

        Grading goes on while the caller does other work. All that is said of `map` holds, its bound
        from the last `add` on. Several streams may be open at a time; while one has items
        left to grade, the others wait.
        """
        self._check_open()
        return Stream(self._serve, self._recall)

    def close(self) -> None:
        """End all processes; `map` raises afterwards."""
        self._closed = True  # who is grading stops
        if os.getpid() == self._owner:
            with self._lock:
                self._finalizer()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _begin(self) -> None:
        self._zygote = start_zygote(self._setup, self._workers)
        self._finalizer = weakref.finalize(self, stop_zygote, self._zygote, os.getpid())

    def _check_open(self) -> None:
        if self._closed or os.getpid() != self._owner:
            raise RuntimeError("the pool is closed, or belongs to another process")

    def _recall(self, key: bytes) -> Verdict | None:
        with self._remembering:
            if key in self._cache:
                self._cache.move_to_end(key)
            return self._cache.get(key)

    def _remember(self, verdicts: dict[bytes, Verdict]) -> None:
        with self._remembering:
            for key, verdict in verdicts.items():
                if verdict.status in KEPT:
                    self._cache[key] = verdict
            while len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)

    def _serve(self, waiting: collections.deque[Job], verdicts: dict, over: Over) -> None:
        """Grade until `waiting`, which may grow meanwhile, is empty; raises when `over()`."""
        with self._lock:
            try:
                self._grade_all(waiting, verdicts, over)
            except BaseException:  # where the caller gave up, too: begin anew next time
                self._finalizer()
                raise
            finally:
                self._remember(verdicts)

    def _grade_all(self, waiting: collections.deque[Job], verdicts: dict, over: Over) -> None:
        """Grade until none is left, with another zygote whenever one dies."""
        while waiting:
            self._get_ready(over)
            slots = self._zygote.slots
            try:
                while waiting or any(slot.job for slot in slots):
                    self._check_wanted(over)
                    self._turn(waiting, verdicts)
            except ZygoteLost:
                self._zygote.process.kill()  # where it only fell silent
                self._finalizer()
                for job in [slot.job for slot in slots if slot.job]:
                    job.expires = math.inf  # the wait for the next zygote is not the grader's
                    if not _failed(job, "the process that starts the workers died", verdicts):
                        waiting.appendleft(job)

    def _check_wanted(self, over: Over) -> None:
        self._check_open()
        if over():
            raise RuntimeError("nobody waits for the verdicts any more")

    def _get_ready(self, over: Over) -> None:
        """Wait until the zygote has imported everything; start one where there is none."""
        for _ in range(ATTEMPTS):
            self._check_wanted(over)
            if not self._finalizer.alive:
                self._begin()
            zygote, limit = self._zygote, time.monotonic() + START_LIMIT
            try:
                while not zygote.ready and time.monotonic() < limit:
                    self._check_wanted(over)
                    if zygote.selector.select(0.5):
                        for what, _, value in hear(zygote):
                            self._started(what, value)
            except ZygoteLost:
                said = last_words(zygote)
                self._finalizer()
                continue
            if zygote.ready:
                return
            raise RuntimeError(f"{self._name}: not imported within {START_LIMIT:g} s")
        raise RuntimeError(f"the process for graders ended while it started: {said}")

    def _started(self, what: str, value) -> None:
        if what == "failed" and value[0]:
            raise ValueError(f"modules={value[0]!r}: {value[1]}; allowed: modules that import")
        if what == "failed":
            raise ValueError(
                f"grade={self._name} cannot be loaded in a worker: {value[1]}; allowed: {ALLOWED}"
            )
        if self._memory < value + ROOM:
            raise ValueError(
                f"memory_mb={self._memory}; allowed: at least {value + ROOM}, of which the imports "
                f"take {value}"
            )
        self._zygote.ready = True

    def _turn(self, waiting: collections.deque[Job], verdicts: dict) -> None:
        """Send to whom is free, hear who has something to say, end who is late."""
        zygote = self._zygote
        for slot in zygote.slots:
            if waiting and slot.job is None:
                self._send(slot, waiting.popleft())
        # Taken before listening: a reply that came while the caller was held up still counts.
        now = time.monotonic()
        soonest = min((slot.job.expires for slot in zygote.slots if slot.job), default=now)
        # More may be handed in while a worker is free, and the zygote may have to be woken.
        soon = zygote.asked < math.inf or any(slot.job is None for slot in zygote.slots)
        patience = min(max(0, soonest - now), 0.02 if soon else 0.5)
        for key, mask in zygote.selector.select(patience):
            if key.data is None:
                for what, serial, value in hear(zygote):
                    self._heard(what, serial, value, verdicts)
            elif key.fileobj is key.data.connection:  # else ended by an event before
                if mask & selectors.EVENT_WRITE:
                    push(zygote, key.data)
                if mask & selectors.EVENT_READ:
                    self._read(key.data, verdicts)
        for slot in zygote.slots:
            if slot.job and slot.job.expires <= now:
                reason = f"not done within {self._deadline:g} s"
                verdicts[slot.job.key] = Verdict(status="timed_out", score=0.0, reason=reason)
                slot.job = None
                end_worker(zygote, slot)
        if zygote.asked < now - 0.01:
            zygote.process.send_signal(signal.SIGCONT)
        if zygote.asked < now - SILENCE_LIMIT:
            raise ZygoteLost

    def _send(self, slot: Slot, job: Job) -> None:
        """Send a job to the slot's worker, forked for it where there is none."""
        self._count += 1
        slot.job, slot.number = job, self._count
        job.expires = min(job.expires, time.monotonic() + self._deadline)
        if slot.connection is None:
            fork_worker(self._zygote, slot, self._count)
        slot.outgoing = memoryview(ITEM.pack(slot.number, len(job.payload)) + job.payload)
        push(self._zygote, slot)

    def _heard(self, what: str, serial: int, value, verdicts: dict) -> None:
        """Act on what the zygote says of a worker."""
        for slot in self._zygote.slots:
            if slot.serial != serial:
                continue
            if what == "forked":
                slot.pid = value
                slot.passed.close()
                continue
            if what == "refused" and slot.connection is not None:
                drop_worker(self._zygote, slot)
            if slot.job and what in ("ended", "refused"):
                reason = cause(value) if what == "ended" else f"no worker: {value}"
                if _failed(slot.job, reason, verdicts):
                    slot.job = None
                else:
                    self._send(slot, slot.job)

    def _read(self, slot: Slot, verdicts: dict) -> None:
        """Take what a worker sent; whatever is not the one reply that is due ends the worker."""
        try:
            data = slot.connection.recv(LONGEST_REPLY)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        slot.incoming += data
        if data and slot.job and len(slot.incoming) < REPLY.size:
            return
        if data and slot.job:
            number, size, spent = REPLY.unpack_from(slot.incoming)
            missing = REPLY.size + size - len(slot.incoming)
            if number == slot.number and size <= LONGEST_REPLY and missing >= 0:
                if missing == 0:
                    verdict = verdicts[slot.job.key] = _verdict(slot.incoming[REPLY.size :])
                    slot.job = None
                    slot.incoming.clear()
                    if spent or slot.outgoing or verdict.reason.startswith(MISSHAPEN):
                        end_worker(self._zygote, slot)
                return
        end_worker(self._zygote, slot)  # its job, if any, waits for the cause


def _failed(job: Job, reason: str, verdicts: dict) -> bool:
    """Count an attempt; at the last one the verdict is `crashed`."""
    job.attempts += 1
    if job.attempts == ATTEMPTS:
        reason = f"{reason} ({ATTEMPTS} attempts)"
        verdicts[job.key] = Verdict(status="crashed", score=0.0, reason=reason)
    return job.attempts == ATTEMPTS


def _verdict(body: bytes) -> Verdict:
    try:
        status, score, reason = json.loads(body)
        if not (isinstance(reason, str) and _number(score)):
            raise ValueError("score or reason")
        return Verdict(status=status, score=float(score), reason=reason)
    except (ValueError, TypeError, RecursionError) as error:
        reason = f"{MISSHAPEN}: {error}"[:200]
        return Verdict(status="crashed", score=0.0, reason=reason)


class _Pickler(pickle.Pickler):
    """Refuses what is defined in __main__, which no other process can import."""

    def reducer_override(self, thing):
        if isinstance(thing, type | types.FunctionType) and thing.__module__ == "__main__":
            raise pickle.PicklingError(f"{thing.__qualname__} is defined in __main__")
        return NotImplemented


def _pickled(grade: Callable, name: str) -> bytes:
    target = io.BytesIO()
    try:
        _Pickler(target, protocol=5).dump(grade)
    except Exception as error:
        raise ValueError(
            f"grade={name} cannot be sent to a worker: {error}; allowed: {ALLOWED}"
        ) from error
    return target.getvalue()


def _name(grade: object) -> str:
    name = getattr(grade, "__qualname__", None) or type(grade).__qualname__
    return f"{getattr(grade, '__module__', None) or type(grade).__module__}.{name}"


def _cores() -> int:
    usable = getattr(os, "sched_getaffinity", None)
    return len(usable(0)) if usable else os.cpu_count() or 1


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check(name: str, value: object, fits: bool, allowed: str) -> None:
    if not fits:
        raise ValueError(f"{name}={value!r}; allowed: {allowed}")
