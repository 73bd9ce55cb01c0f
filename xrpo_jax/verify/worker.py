"""The far side of a `Pool`: the zygote, which imports the grader once, and the workers it forks.

The zygote is one fresh process with one thread, so that a fork of it is safe and takes
milliseconds. It alone ends workers, and it reaps a worker only when told to: until then the
process id cannot mean another process. Workers answer in JSON; nothing they send is unpickled.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import time
import traceback

from xrpo_jax.types import Verdict

REQUEST = struct.Struct("!cQ")  # FORK or END, and the worker's serial number
FORK, END = b"F", b"E"
ITEM = struct.Struct("!QQ")  # number of the dispatch, bytes of pickle that follow
REPLY = struct.Struct("!QI?")  # the same number, bytes of JSON that follow, the worker ends now
LONGEST_REPLY = 1 << 16  # bytes
LONGEST_REASON = 1000  # characters of a grader's own reason; of an exception 200
CHECKED = 64  # a worker looks at its address space after so many items
SET_DEATH_SIGNAL, SET_SUBREAPER = 1, 36  # of Linux's prctl

_inside = False


def inside_worker() -> bool:
    """Whether this process is a pool's worker, where a deadline and a memory limit already hold."""
    return _inside


def serve(descriptor: int) -> None:
    """Run the zygote on the socket `descriptor`, set up from standard input, until it closes."""
    control = socket.socket(fileno=descriptor)
    modules, memory, grade = pickle.load(sys.stdin.buffer)
    _quiet(0)
    for stream in (sys.stdout, sys.stderr):  # no print may fail for its characters
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the caller's thread may have blocked some
    name = ""
    try:
        for name in modules:
            importlib.import_module(name)
        name = ""
        grade = pickle.loads(grade)
    except BaseException as error:
        said = traceback.format_exception_only(error)[-1].strip()
        _tell(control, "failed", 0, [name, said])
        return
    _quiet(1, 2)
    gc.collect()
    gc.freeze()  # a collection in a worker would otherwise copy every page of the imports
    _prctl(SET_SUBREAPER, 1)  # what outlives a worker comes to us, to be ended
    _tell(control, "ready", 0, _address_space())
    workers = {}
    try:
        _obey(control, workers, grade, memory)
    finally:
        _end_all(workers)
        os._exit(0)  # what modules do at exit was not asked for


def _obey(control: socket.socket, workers: dict[int, int], grade, memory: int) -> None:
    """Fork, end and reap workers (process id by serial number) until the caller is gone."""
    caller, ending = os.getppid(), set()
    while os.getppid() == caller:
        if select.select([control], [], [], 0.002 if ending else 0.5)[0]:
            request, passed, _, _ = socket.recv_fds(control, REQUEST.size, 1)
            if not request:
                return
            kind, serial = REQUEST.unpack(request)
            if kind == FORK:
                os.set_inheritable(passed[0], False)  # a grader's programs must not hold it
                _fork(control, socket.socket(fileno=passed[0]), serial, workers, grade, memory)
            elif serial in workers:
                _kill(workers[serial])
                ending.add(serial)
                _tell(control, "ending", serial, 0)  # its memory may take a while to go
            else:  # it could not be forked
                _tell(control, "ended", serial, 1)
        for serial in tuple(ending):
            pid, status = os.waitpid(workers[serial], os.WNOHANG)
            if pid:
                ending.remove(serial)
                del workers[serial]
                _tell(control, "ended", serial, os.waitstatus_to_exitcode(status))
        _sweep(workers)


def _fork(control, connection, serial: int, workers: dict[int, int], grade, memory: int) -> None:
    zygote = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:  # no process or memory left: it may pass
        time.sleep(0.05)
        _tell(control, "refused", serial, str(error))
        return
    finally:
        if os.getpid() == zygote:
            connection.close()
    if pid == 0:
        try:
            control.close()
            _work(connection, grade, memory, zygote)
        finally:
            os._exit(1)
    with contextlib.suppress(OSError):  # both sides do it: whoever comes first
        os.setpgid(pid, pid)
    workers[serial] = pid
    _tell(control, "forked", serial, pid)


def _work(connection: socket.socket, grade, memory: int, zygote: int) -> None:
    """Grade what comes until the connection closes; `memory` in MiB of address space."""
    global _inside
    _inside = True
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != zygote:
        return
    with contextlib.suppress(OSError, ValueError):  # macOS refuses some limits
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (memory << 20, memory << 20))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")  # where memory runs out, a worker goes before the trainer
    me, reader, graded = os.getpid(), connection.makefile("rb"), 0
    while len(header := reader.read(ITEM.size)) == ITEM.size:
        number, size = ITEM.unpack(header)
        reply, spent = _answer(grade, reader, size)
        if os.getpid() != me:
            return  # a fork that the grader made and let run on
        graded += 1
        # Caches of graders grow: better a fresh worker than a MemoryError on somebody's answer.
        spent = spent or graded % CHECKED == 0 and _address_space() > memory * 3 // 4
        connection.sendall(REPLY.pack(number, len(reply), spent) + reply)
        if spent:
            return


def _answer(grade, reader, size: int) -> tuple[bytes, bool]:
    """The verdict on the next item as JSON, and whether the worker should be replaced."""
    spent = False
    try:
        verdict = grade(*pickle.loads(reader.read(size)))
        if not isinstance(verdict, Verdict):
            raise TypeError(f"the grader returned a {type(verdict).__name__}; allowed: Verdict")
        row = [verdict.status, float(verdict.score), str(verdict.reason)[:LONGEST_REASON]]
    except BaseException as error:
        spent = isinstance(error, MemoryError)
        row = ["crashed", 0.0, _said(error)]
    return json.dumps(row).encode(), spent


def _said(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:200].rstrip(": ")
    except Exception:  # a __str__ that fails
        return type(error).__name__[:200]


def _kill(pid: int) -> None:
    for end in (os.killpg, os.kill):  # the second: a worker may have left its group
        with contextlib.suppress(OSError):
            end(pid, signal.SIGKILL)


def _sweep(workers: dict[int, int]) -> None:
    """End and reap the children that are no workers: left behind, and in no worker's group."""
    me, known = os.getpid(), set(workers.values())
    try:
        with open(f"/proc/self/task/{me}/children") as file:
            found = {int(pid) for pid in file.read().split()} - known
    except OSError:  # not Linux: orphans are not ours
        return
    for pid in found:
        with contextlib.suppress(OSError):
            if os.getpgid(pid) not in known:
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, os.WNOHANG)


def _end_all(workers: dict[int, int]) -> None:
    for pid in workers.values():
        _kill(pid)
    limit = time.monotonic() + 1
    while time.monotonic() < limit:
        _sweep({})
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.001)
        except ChildProcessError:  # none is left
            return


def _tell(control: socket.socket, what: str, serial: int, value) -> None:
    with contextlib.suppress(OSError):  # the caller is gone, which the next read shows
        control.sendall(json.dumps([what, serial, value]).encode() + b"\n")


def _quiet(*descriptors: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(null, descriptor)
    os.close(null)


def _address_space() -> int:
    """MiB of this process; 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize() >> 20
    except OSError:
        return 0


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0)))
