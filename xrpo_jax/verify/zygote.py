"""The process that imports a grader once and forks its workers, as the pool sees it.

Every function here returns at once or within its stated limit, whatever the processes do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time

from xrpo_jax.verify.worker import END, FORK, REQUEST

# `-c`, since the modules may lie where only the caller's sys.path leads.
START = (
    "import json, sys; sys.path[:] = json.loads(sys.stdin.buffer.readline()); "
    "from xrpo_jax.verify.worker import serve; serve(int(sys.argv[1]))"
)
ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@dataclasses.dataclass
class Job:
    """An item to grade, `expires` at a reading of time.monotonic() once it was sent."""

    key: bytes
    payload: bytes
    expires: float = math.inf
    attempts: int = 0


@dataclasses.dataclass
class Slot:
    """A place for a worker: `connection` to it if it has one, and the job it is at."""

    connection: socket.socket | None = None
    passed: socket.socket | None = None  # the worker's end, until it has been forked
    serial: int = 0
    pid: int = 0
    job: Job | None = None
    number: int = 0  # of the dispatch
    outgoing: memoryview = memoryview(b"")
    incoming: bytearray = dataclasses.field(default_factory=bytearray)


@dataclasses.dataclass
class Zygote:
    """The process that forks, what is known of its workers, and the sockets."""

    process: subprocess.Popen
    control: socket.socket
    log: io.BufferedRandom  # its standard error until it is ready
    selector: selectors.BaseSelector
    slots: tuple[Slot, ...]
    incoming: bytearray = dataclasses.field(default_factory=bytearray)
    ready: bool = False
    asked: float = math.inf  # when the oldest request without an answer was sent


class ZygoteLost(Exception):
    """The zygote is gone, or silent."""


def start_zygote(setup: bytes, workers: int) -> Zygote:
    """Start one that reads `setup`, what pool.py pickled, with places for workers."""
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
    slots = tuple(Slot() for _ in range(workers))
    return Zygote(process, ours, log, selector, slots)


def stop_zygote(zygote: Zygote, owner: int) -> None:
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


def ask(zygote: Zygote, request: bytes, descriptors: list[int]) -> None:
    """Send a request; raises ZygoteLost where it is not taken at once."""
    zygote.process.send_signal(signal.SIGCONT)  # a grader may have stopped it
    try:
        socket.send_fds(zygote.control, [request], descriptors)
    except OSError:  # gone, or its buffer is full, which it never is while it works
        raise ZygoteLost from None
    zygote.asked = min(zygote.asked, time.monotonic())


def hear(zygote: Zygote) -> list[list]:
    """What the zygote said since, as [what, serial number, value]."""
    try:
        data = zygote.control.recv(1 << 16)
    except BlockingIOError:
        return []
    except OSError:
        data = b""
    if not data:
        raise ZygoteLost
    zygote.asked = math.inf
    *lines, rest = (zygote.incoming + data).split(b"\n")
    zygote.incoming = rest
    return [json.loads(line) for line in lines]


def fork_worker(zygote: Zygote, slot: Slot, serial: int) -> None:
    """Ask for a worker in the slot, numbered `serial`."""
    slot.connection, slot.passed = socket.socketpair()
    slot.connection.setblocking(False)
    slot.serial, slot.pid = serial, 0
    slot.incoming.clear()
    zygote.selector.register(slot.connection, selectors.EVENT_READ, slot)
    # `passed` stays open until the answer: macOS loses one that its sender closed in between.
    ask(zygote, REQUEST.pack(FORK, serial), [slot.passed.fileno()])


def drop_worker(zygote: Zygote, slot: Slot) -> None:
    """Forget the slot's worker."""
    zygote.selector.unregister(slot.connection)
    slot.connection.close()
    slot.passed.close()
    slot.connection, slot.pid = None, 0


def end_worker(zygote: Zygote, slot: Slot) -> None:
    """Leave the slot's worker to the zygote, which kills it with all of its group."""
    if slot.connection is not None:  # else it has been told already
        drop_worker(zygote, slot)
        ask(zygote, REQUEST.pack(END, slot.serial), [])


def push(zygote: Zygote, slot: Slot) -> None:
    """Send as much of the item as the worker takes without waiting."""
    with contextlib.suppress(OSError):  # dead or busy; its death shows when reading
        while slot.outgoing:
            slot.outgoing = slot.outgoing[slot.connection.send(slot.outgoing) :]
    write = selectors.EVENT_WRITE if slot.outgoing else 0
    zygote.selector.modify(slot.connection, selectors.EVENT_READ | write, slot)


def cause(code: int) -> str:
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


def last_words(zygote: Zygote) -> str:
    """The last line of what it said before it ended, and its exit code."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        zygote.process.wait(1)
    zygote.log.seek(0)
    lines = zygote.log.read().decode(errors="replace").strip().splitlines()
    return f"{lines[-1] if lines else 'no message'} (exit code {zygote.process.returncode})"
