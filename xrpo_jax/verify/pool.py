"""A pool of worker processes for graders that hang, crash, print or eat memory.

    caller ── control socket ──▶ zygote: imports the grader once, forks, ends and reaps workers
       └───── a socket each ───▶ worker: one item at a time, a verdict back as JSON

The caller, which may run JAX with many threads, is never forked and never waits for a process
without a time limit. What is lost with a worker is graded again on a fresh one.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import io
import json
import math
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import weakref
from collections.abc import Callable, Sequence

from xrpo_jax.types import Verdict
from xrpo_jax.verify.worker import END, FORK, ITEM, LONGEST_REPLY, REPLY, REQUEST

ATTEMPTS = 3
START_LIMIT = 120.0  # seconds for the imports of the zygote
SILENCE_LIMIT = 5.0  # seconds for an answer of the zygote, which takes milliseconds
ROOM = 32  # MiB of address space that a worker needs beyond the imports
KEPT = ("correct", "wrong", "unparsed")  # statuses that are remembered across calls
MISSHAPEN = "reply of a wrong shape"
ALLOWED = "a function of an importable module, or a method of a record that pickles"
# `-c`, since the modules may lie where only the caller's sys.path leads.
START = (
    "import json, sys; sys.path[:] = json.loads(sys.stdin.buffer.readline()); "
    "from xrpo_jax.verify.worker import serve; serve(int(sys.argv[1]))"
)
ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@dataclasses.dataclass
class _Job:
    """An item to grade, `expires` at a reading of time.monotonic() once it was sent."""

    key: bytes
    payload: bytes
    expires: float = math.inf
    attempts: int = 0


@dataclasses.dataclass
class _Slot:
    """A place for a worker: `connection` to it if it has one, and the job it is at."""

    connection: socket.socket | None = None
    passed: socket.socket | None = None  # the worker's end, until it has been forked
    serial: int = 0
    pid: int = 0
    job: _Job | None = None
    number: int = 0  # of the dispatch
    outgoing: memoryview = memoryview(b"")
    incoming: bytearray = dataclasses.field(default_factory=bytearray)


@dataclasses.dataclass
class _Zygote:
    """The process that forks, what is known of its workers, and the sockets."""

    process: subprocess.Popen
    control: socket.socket
    log: io.BufferedRandom  # its standard error until it is ready
    selector: selectors.BaseSelector
    slots: tuple[_Slot, ...]
    incoming: bytearray = dataclasses.field(default_factory=bytearray)
    ready: bool = False
    asked: float = math.inf  # when the oldest request without an answer was sent


class _ZygoteLost(Exception):
    pass


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
        self._lock = threading.Lock()
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
        with self._lock:
            if self._closed or os.getpid() != self._owner:
                raise RuntimeError("the pool is closed, or belongs to another process")
            jobs = [_job(place, item) for place, item in enumerate(items)]
            keys, verdicts = [job.key for job in jobs], {}
            for key in keys:
                if key in self._cache:
                    self._cache.move_to_end(key)
                    verdicts[key] = self._cache[key]
            fresh = {job.key: job for job in jobs if job.key not in verdicts}
            waiting = collections.deque(fresh.values())
            del jobs, fresh  # a payload goes when its verdict is there
            try:
                self._grade_all(waiting, verdicts)
            except BaseException:  # an interrupt too, at any line: begin anew next time
                self._finalizer()
                raise
            finally:
                self._remember(verdicts)
            return [verdicts[key] for key in keys]

    def close(self) -> None:
        """End all processes; `map` raises afterwards."""
        with self._lock:
            self._closed = True
            self._finalizer()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _begin(self) -> None:
        self._zygote = _start(self._setup, self._workers)
        self._finalizer = weakref.finalize(self, _stop, self._zygote, os.getpid())

    def _remember(self, verdicts: dict[bytes, Verdict]) -> None:
        for key, verdict in verdicts.items():
            if verdict.status in KEPT:
                self._cache[key] = verdict
        while len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)

    def _grade_all(self, waiting: collections.deque[_Job], verdicts: dict) -> None:
        """Grade until none is left, with another zygote whenever one dies."""
        while waiting:
            self._get_ready()
            slots = self._zygote.slots
            try:
                while waiting or any(slot.job for slot in slots):
                    self._turn(waiting, verdicts)
            except _ZygoteLost:
                self._zygote.process.kill()  # where it only fell silent
                self._finalizer()
                for job in [slot.job for slot in slots if slot.job]:
                    job.expires = math.inf  # the wait for the next zygote is not the grader's
                    if not _failed(job, "the process that starts the workers died", verdicts):
                        waiting.appendleft(job)

    def _get_ready(self) -> None:
        """Wait until the zygote has imported everything; start one where there is none."""
        for _ in range(ATTEMPTS):
            if not self._finalizer.alive:
                self._begin()
            zygote, limit = self._zygote, time.monotonic() + START_LIMIT
            try:
                while not zygote.ready and time.monotonic() < limit:
                    if zygote.selector.select(0.5):
                        for what, _, value in _hear(zygote):
                            self._started(what, value)
            except _ZygoteLost:
                said = _last_words(zygote)
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

    def _turn(self, waiting: collections.deque[_Job], verdicts: dict) -> None:
        """Send to whom is free, hear who has something to say, end who is late."""
        zygote = self._zygote
        for slot in zygote.slots:
            if waiting and slot.job is None:
                self._send(slot, waiting.popleft())
        # Taken before listening: a reply that came while the caller was held up still counts.
        now = time.monotonic()
        soonest = min((slot.job.expires for slot in zygote.slots if slot.job), default=now)
        patience = min(max(0, soonest - now), 0.5 if zygote.asked == math.inf else 0.02)
        for key, mask in zygote.selector.select(patience):
            if key.data is None:
                for what, serial, value in _hear(zygote):
                    self._heard(what, serial, value, verdicts)
            elif key.fileobj is key.data.connection:  # else ended by an event before
                if mask & selectors.EVENT_WRITE:
                    _push(zygote, key.data)
                if mask & selectors.EVENT_READ:
                    self._read(key.data, verdicts)
        for slot in zygote.slots:
            if slot.job and slot.job.expires <= now:
                reason = f"not done within {self._deadline:g} s"
                verdicts[slot.job.key] = Verdict(status="timed_out", score=0.0, reason=reason)
                slot.job = None
                _end(zygote, slot)
        if zygote.asked < now - 0.01:
            zygote.process.send_signal(signal.SIGCONT)
        if zygote.asked < now - SILENCE_LIMIT:
            raise _ZygoteLost

    def _send(self, slot: _Slot, job: _Job) -> None:
        """Send a job to the slot's worker, forked for it where there is none."""
        self._count += 1
        slot.job, slot.number = job, self._count
        job.expires = min(job.expires, time.monotonic() + self._deadline)
        if slot.connection is None:
            _fork(self._zygote, slot, self._count)
        slot.outgoing = memoryview(ITEM.pack(slot.number, len(job.payload)) + job.payload)
        _push(self._zygote, slot)

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
                _drop(self._zygote, slot)
            if slot.job and what in ("ended", "refused"):
                reason = _cause(value) if what == "ended" else f"no worker: {value}"
                if _failed(slot.job, reason, verdicts):
                    slot.job = None
                else:
                    self._send(slot, slot.job)

    def _read(self, slot: _Slot, verdicts: dict) -> None:
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
                        _end(self._zygote, slot)
                return
        _end(self._zygote, slot)  # its job, if any, waits for the cause


def _start(setup: bytes, workers: int) -> _Zygote:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    selector = selectors.DefaultSelector()
    selector.register(ours, selectors.EVENT_READ)
    path = [os.path.abspath(place) for place in sys.path if isinstance(place, str)]
    log = tempfile.TemporaryFile()
    with theirs, tempfile.TemporaryFile() as given:
        given.write(json.dumps(path).encode() + b"\n" + setup)
        given.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", START, str(theirs.fileno())],
            stdin=given,
            stdout=subprocess.DEVNULL,
            stderr=log,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,  # out of reach of the terminal's Ctrl-C
            env={"PYTHONHASHSEED": "0"} | dict(os.environ) | dict.fromkeys(ONE_THREAD, "1"),
        )
    slots = tuple(_Slot() for _ in range(workers))
    return _Zygote(process, ours, log, selector, slots)


def _stop(zygote: _Zygote, owner: int) -> None:
    """End the zygote and all workers: they go when it does, or when its control socket closes."""
    if os.getpid() != owner:  # a fork of the caller: the processes are not its own
        return
    for open_ in (zygote.control, zygote.selector, zygote.log):
        open_.close()
    for slot in zygote.slots:
        for end in filter(None, (slot.connection, slot.passed)):
            end.close()
    if not zygote.ready:
        zygote.process.kill()
    zygote.process.send_signal(signal.SIGCONT)
    try:
        zygote.process.wait(2)
    except subprocess.TimeoutExpired:
        zygote.process.kill()
        zygote.process.wait()
    if zygote.process.returncode != 0:  # it did not end its workers itself
        for pid in filter(None, (slot.pid for slot in zygote.slots)):
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)


def _ask(zygote: _Zygote, request: bytes, descriptors: list[int]) -> None:
    zygote.process.send_signal(signal.SIGCONT)  # a grader may have stopped it
    try:
        socket.send_fds(zygote.control, [request], descriptors)
    except OSError:  # gone, or its buffer is full, which it never is while it works
        raise _ZygoteLost from None
    zygote.asked = min(zygote.asked, time.monotonic())


def _hear(zygote: _Zygote) -> list[list]:
    """What the zygote said since, as [what, serial number, value]."""
    try:
        data = zygote.control.recv(1 << 16)
    except BlockingIOError:
        return []
    except OSError:
        data = b""
    if not data:
        raise _ZygoteLost
    zygote.asked = math.inf
    *lines, rest = (zygote.incoming + data).split(b"\n")
    zygote.incoming = rest
    return [json.loads(line) for line in lines]


def _fork(zygote: _Zygote, slot: _Slot, serial: int) -> None:
    slot.connection, slot.passed = socket.socketpair()
    slot.connection.setblocking(False)
    slot.serial, slot.pid = serial, 0
    slot.incoming.clear()
    zygote.selector.register(slot.connection, selectors.EVENT_READ, slot)
    # `passed` stays open until the answer: macOS loses one that its sender closed in between.
    _ask(zygote, REQUEST.pack(FORK, serial), [slot.passed.fileno()])


def _drop(zygote: _Zygote, slot: _Slot) -> None:
    zygote.selector.unregister(slot.connection)
    slot.connection.close()
    slot.passed.close()
    slot.connection, slot.pid = None, 0


def _end(zygote: _Zygote, slot: _Slot) -> None:
    """Leave the slot's worker to the zygote, which kills it with all of its group."""
    if slot.connection is not None:  # else it has been told already
        _drop(zygote, slot)
        _ask(zygote, REQUEST.pack(END, slot.serial), [])


def _push(zygote: _Zygote, slot: _Slot) -> None:
    """Send as much of the item as the worker takes without waiting."""
    with contextlib.suppress(OSError):  # dead or busy; its death shows when reading
        while slot.outgoing:
            slot.outgoing = slot.outgoing[slot.connection.send(slot.outgoing) :]
    write = selectors.EVENT_WRITE if slot.outgoing else 0
    zygote.selector.modify(slot.connection, selectors.EVENT_READ | write, slot)


def _failed(job: _Job, reason: str, verdicts: dict) -> bool:
    """Count an attempt; at the last one the verdict is `crashed`."""
    job.attempts += 1
    if job.attempts == ATTEMPTS:
        reason = f"{reason} ({ATTEMPTS} attempts)"
        verdicts[job.key] = Verdict(status="crashed", score=0.0, reason=reason)
    return job.attempts == ATTEMPTS


def _cause(code: int) -> str:
    """The end of a process in words, from its exit code as subprocess has it."""
    if code >= 0:
        return f"the worker ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    if name == "SIGKILL":  # by the zygote as well
        name += " (from outside, for memory, or for a broken reply)"
    return f"the worker was killed by {name}"


def _last_words(zygote: _Zygote) -> str:
    with contextlib.suppress(subprocess.TimeoutExpired):
        zygote.process.wait(1)
    zygote.log.seek(0)
    lines = zygote.log.read().decode(errors="replace").strip().splitlines()
    return f"{lines[-1] if lines else 'no message'} (exit code {zygote.process.returncode})"


def _verdict(body: bytes) -> Verdict:
    try:
        status, score, reason = json.loads(body)
        if not (isinstance(reason, str) and _number(score)):
            raise ValueError("score or reason")
        return Verdict(status=status, score=float(score), reason=reason)
    except (ValueError, TypeError, RecursionError) as error:
        reason = f"{MISSHAPEN}: {error}"[:200]
        return Verdict(status="crashed", score=0.0, reason=reason)


def _job(place: int, item: tuple) -> _Job:
    try:
        if not isinstance(item, tuple):
            raise TypeError(f"a {type(item).__name__}")
        payload = pickle.dumps(item, protocol=5)
    except Exception as error:
        raise ValueError(
            f"item {place} cannot be sent to a worker: {type(error).__name__}: {error}; allowed: "
            "tuples of what pickles"
        ) from error
    return _Job(hashlib.blake2b(payload, digest_size=16).digest(), payload)


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
