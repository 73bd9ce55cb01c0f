"""Runs Python programs that nobody trusts, with limits, out of reach of the machine and its files.

On Linux each program has its own namespaces (processes, mounts, network, IPC), a read-only root of
just what Python needs, a small writable /tmp, another user without rights, and a filter of system
calls. Where the kernel grants no namespaces only limits and a sweep are left: describe() says so.
The calling process is never forked: it may hold threads and devices. It starts a small script
(code_launcher.py), which ends everything when it is told to, or when the calling process dies.
"""

from __future__ import annotations

import dataclasses
import functools
import marshal
import math
import os
import pathlib
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping

from xrpo_jax.verify import code_filter, code_root

LAUNCHER = str(pathlib.Path(__file__).with_name("code_launcher.py"))
START_S = 60  # for the interpreter of a sandbox to start, on a machine however busy
KEPT_ERRORS = 8192  # bytes of the end of what a program wrote to its standard error
MODES = ("namespaces", "other user", "limits")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What one program may use.

    `time_s` seconds, of the clock and of the CPU; `memory_mb` MiB of address space a process;
    `processes` at once, threads included; `output_kb` KiB of standard output; `file_kb` KiB of all
    its files. Raises ValueError naming the limit, its value and what is allowed.
    """

    time_s: float = 6.0
    memory_mb: int = 1024
    processes: int = 32
    output_kb: int = 1024
    file_kb: int = 4096

    def __post_init__(self):
        check_seconds("time_s", self.time_s)
        for name, least in (("memory_mb", 32), ("processes", 2), ("output_kb", 1), ("file_kb", 1)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= 2**22:
                raise ValueError(f"{name}={value!r}; allowed: whole numbers {least} to {2**22}")


def check_seconds(name: str, value: object):
    """Raises ValueError where a setting is no number of seconds that can pass."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not (0 < value <= 86400 and math.isfinite(value)):
        raise ValueError(f"{name}={value!r}; allowed: above 0, at most 86400")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A Python script with its files: name -> text; the first one is run.

    `stdin` and `stdout` are descriptors, closed when it has started; an `stdout` of None is read
    by run(). `shared` are descriptors that the program keeps under the same numbers.
    """

    files: Mapping[str, bytes]
    stdin: int
    stdout: int | None = None
    shared: tuple[int, ...] = ()
    arguments: tuple[str, ...] = ()
    tests: int = 1  # that it serves: the limit of its CPU time is for each


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended:
    """How a program ended: `how` is one of exited, killed, time, output, processes, stopped, failed

    `code` is the exit status, or the signal that killed it; `stderr` holds the end of its errors;
    `message` says why the sandbox failed.
    """

    how: str
    code: int = 0
    stdout: bytes = b""
    stderr: bytes = b""
    message: str = ""
    cpu_s: float = 0.0


def readable(data: bytes) -> int:
    """A descriptor from which the data can be read, and which no other process can find."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("data", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


@dataclasses.dataclass
class _Box:
    """A program that runs: its launcher, and what has been heard of it."""

    launcher: subprocess.Popen
    status: int
    messages: bytes = b""
    errors: bytes = b""


def _start(program: Program, limits: Limits, mode: str) -> _Box:
    status, told = os.pipe()
    job = {
        "parent": os.getpid(),
        "status": told,
        "namespaces": mode == "namespaces",
        "uid": code_root.user(mode),
        "count_processes": mode != "limits",
        "shown": list(code_root.shown()),
        "mount_point": code_root.mount_point(),
        "folder": os.path.join(tempfile.gettempdir(), f"xrpo_jax_{os.urandom(8).hex()}"),
        "files": {name: bytes(content) for name, content in program.files.items()},
        "argv": [sys.executable, "-s", "-S", "-P", f"{{code}}/{next(iter(program.files))}"]
        + list(program.arguments),
        "env": code_root.environment(),
        "filter": code_filter.program() if sys.platform == "linux" else b"",
        "cpu_s": math.ceil(limits.time_s * program.tests) + 1,
        "memory_mb": limits.memory_mb,
        "processes": limits.processes,
        "file_kb": limits.file_kb,
    }
    given = readable(marshal.dumps(job))
    try:
        launcher = subprocess.Popen(
            [sys.executable, "-I", "-S", LAUNCHER, str(given)],
            stdin=program.stdin,
            stdout=subprocess.PIPE if program.stdout is None else program.stdout,
            stderr=subprocess.PIPE,
            pass_fds=(given, told, *program.shared),
            start_new_session=True,
            cwd="/",
            env=code_root.loading(),
        )
    except BaseException:
        os.close(status)
        raise
    finally:
        os.close(given)
        os.close(told)
    return _Box(launcher=launcher, status=status)


def run(
    programs: list[Program],
    limits: Limits,
    *,
    until: float = math.inf,
    time_s: float | None = None,
    on_line: Callable[[bytes], str] | None = None,
    mode: str | None = None,
) -> list[Ended]:
    """Runs programs side by side until the first one ends, then ends the others.

    The first one's standard output is read: whole, or line by line with `on_line`, which answers
    more, next or stop. The time (`time_s` seconds, the limits' where None) counts from the start,
    and anew after each line that is answered with next. `until` is a time.monotonic() at which all
    is stopped. Every process that a program started is gone when this returns.
    """
    boxes: list[_Box] = []
    try:
        mode = available() if mode is None else mode
        for program in programs:
            boxes.append(_start(program, limits, mode))
    except OSError as error:
        for box in boxes:
            _stop(box)
            _ended(box, "", b"")
        failed = Ended(how="failed", message=f"{type(error).__name__}: {error}")
        return [failed for _ in programs]
    finally:
        for program in programs:
            for descriptor in {program.stdin, program.stdout, *program.shared} - {None}:
                os.close(descriptor)
    try:
        time_s = limits.time_s if time_s is None else time_s
        how, output = _watch(boxes, limits.output_kb * 1024, time_s, until, on_line)
    finally:
        for box in boxes:
            _stop(box)
    ends = [_ended(boxes[0], how, output), *(_ended(box, "", b"") for box in boxes[1:])]
    if how == "failed":
        told = [end.message for end in ends if end.message]
        ends[0] = dataclasses.replace(ends[0], message=(told or [f"no start in {START_S} s"])[0])
    return ends


def _watch(boxes, most, time_s, until, on_line) -> tuple[str, bytes]:
    """Reads all that comes until the first program ends or must: why it must, and its output."""
    main, output = boxes[0], bytearray()
    begun, over, why = False, False, ""
    deadline = time.monotonic() + START_S

    def take(data: bytes) -> str:
        """Takes some of the output in; answers why to stop, or next, or nothing."""
        nonlocal output
        output += data
        answers = ""
        if on_line is not None and b"\n" in data:
            *lines, output = output.split(b"\n")
            for line in lines:
                answer = on_line(bytes(line))
                if answer == "stop":
                    return "stopped"
                answers = "next" if answer == "next" else answers
        return "output" if len(output) > most else answers

    with selectors.DefaultSelector() as selector:
        streams = [(main.launcher.stdout.fileno(), "output", main)]
        streams += [(box.launcher.stderr.fileno(), "errors", box) for box in boxes]
        streams += [(box.status, "messages", box) for box in boxes]
        for descriptor, kind, box in streams:
            os.set_blocking(descriptor, False)
            selector.register(descriptor, selectors.EVENT_READ, (kind, box))
        while not over and not why:
            left = min(deadline, until) - time.monotonic()
            if left <= 0:
                why = "stopped" if until < deadline else "time" if begun else "failed"
                break
            for key, _ in selector.select(left):
                kind, box = key.data
                data = os.read(key.fd, 65536)
                if not data:
                    selector.unregister(key.fd)
                    over = over or (box is main and kind == "messages")
                elif kind == "errors":
                    box.errors = (box.errors + data)[-KEPT_ERRORS:]
                elif kind == "output" and not why:
                    why = take(data)
                    if why == "next":
                        why, deadline = "", time.monotonic() + time_s
                elif kind == "messages":
                    box.messages += data
                    if not begun and all(one.messages.startswith(b"s") for one in boxes):
                        begun, deadline = True, time.monotonic() + time_s
                    if b"\np" in box.messages:
                        why = "processes"
                    if box.messages.startswith(b"e") or b"\ne" in box.messages:
                        why = "failed"
    while not why:  # nothing of it is left: the rest of what it wrote is in the pipe
        data = _read(main.launcher.stdout.fileno())
        if not data:
            break
        why = take(data).removeprefix("next")
    return why, bytes(output)


def _read(descriptor: int) -> bytes:
    """What is there to be read now."""
    try:
        return os.read(descriptor, 65536)
    except BlockingIOError:
        return b""


def _stop(box: _Box):
    """Ends a program with all that it started; it is gone when this returns."""
    if box.launcher.poll() is None:
        box.launcher.terminate()
    try:
        box.launcher.wait(20)
    except subprocess.TimeoutExpired:
        box.launcher.kill()
        box.launcher.wait()


def _ended(box: _Box, why: str, output: bytes) -> Ended:
    """How a program that was stopped had ended, by its last words; closes what is open of it."""
    for descriptor, name in ((box.status, "messages"), (box.launcher.stderr.fileno(), "errors")):
        os.set_blocking(descriptor, False)
        while data := _read(descriptor):
            setattr(box, name, (getattr(box, name) + data)[-KEPT_ERRORS:])
    os.close(box.status)
    box.launcher.stderr.close()
    if box.launcher.stdout is not None:
        box.launcher.stdout.close()
    how, code, cpu, message = why, 0, 0.0, ""
    for line in box.messages.decode("utf-8", "replace").splitlines():
        if line[:1] == "e":
            how, message = "failed", line[1:]
        elif line[:1] == "d":
            status, seconds, _ = line[1:].split()
            cpu, ended = float(seconds), os.waitstatus_to_exitcode(int(status))
            how = why or ("killed" if ended < 0 else "exited")
            code = abs(ended)
    if not how:
        how, message = "failed", f"the launcher ended with {box.launcher.returncode}"
    return Ended(how=how, code=code, stdout=output, stderr=box.errors, message=message, cpu_s=cpu)


@functools.cache
def available() -> str:
    """The strongest of namespaces, other user and limits in which a program runs here; tried once.

    Raises OSError where a program runs in none of them.
    """
    tried = []
    for mode in MODES:
        if mode != "limits" and sys.platform != "linux":
            continue
        if mode == "other user" and not code_root.user(mode):
            continue
        for _ in range(2):  # a passing fault must not end in a weaker mode
            nothing = os.open(os.devnull, os.O_RDONLY)
            program = Program(files={"main.py": b"print(7)"}, stdin=nothing)
            (ended,) = run([program], Limits(time_s=20), mode=mode)
            if ended.how == "exited" and ended.stdout == b"7\n":
                return mode
        tried.append(f"{mode}: {ended.message or ended.stderr[-200:].decode('utf-8', 'replace')}")
    raise OSError("no program runs in a sandbox here; " + "; ".join(tried))


def describe() -> str:
    """What holds here and what does not, in one sentence for the log."""
    try:
        mode = available()
    except OSError as error:
        return f"code is not graded: {error}"
    common = "limits of time, memory, files and output hold"
    if mode == "namespaces":
        calls = "" if code_filter.program() else ", and no filter of system calls on this machine"
        return (
            f"code runs in its own namespaces: {common}, of processes too; no network, and nothing "
            f"of the machine but Python and system libraries, read-only{calls}"
        )
    user = "as another user, "
    if mode == "limits":
        user = "as this user, so that it may read the tests and end the user's processes, "
    return (
        f"code runs {user}without namespaces, which this machine does not grant: {common}, and "
        "what it starts is ended with it; the network and the files of the machine are NOT shut "
        "off, and processes are counted only a few times a second. Grade only code you trust"
    )
