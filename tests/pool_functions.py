"""Graders for the pool's tests: well-behaved ones and ones that do what a grader must not."""

import ctypes
import dataclasses
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time

from xrpo_jax.types import Verdict
from xrpo_jax.verify.worker import REPLY, inside_worker

kept = []


def said(reason: object) -> Verdict:
    return Verdict(status="correct", score=1.0, reason=str(reason))


def echo(value) -> Verdict:
    return said(value)


def slow_echo(value) -> Verdict:
    time.sleep(0.0006)
    return said(value)


def sleep(seconds, value) -> Verdict:
    time.sleep(seconds)
    return said(value)


def noted(path, value, status="correct") -> Verdict:
    """Leaves a line in the file at `path`, so that gradings can be counted."""
    note(path, value)
    if status == "raise":
        raise ValueError(value)
    return Verdict(status=status, score=float(status == "correct"), reason=str(value))


def dies_at_first(path, times, value) -> Verdict:
    note(path, os.getpid())
    with open(path) as file:
        if len(file.readlines()) <= times:
            os._exit(7)
    return said(value)


def note(path, value) -> None:
    with open(path, "a") as file:
        file.write(f"{value}\n")


@dataclasses.dataclass(frozen=True)
class Task:
    """A record whose method grades."""

    answers: tuple[str, ...]

    def rewards(self, i: int, completion: str) -> Verdict:
        right = completion == self.answers[i]
        return Verdict(status="correct" if right else "wrong", score=float(right))


def act(kind, *rest) -> Verdict:
    """Does what the function below of that name does."""
    return globals()[kind](*rest)


# --- what must time out ----------------------------------------------------------------------


def hang():
    while True:
        pass


def hang_in_c():
    return re.match(r"(a+)+$", "a" * 60 + "b")  # holds the GIL for years


def hang_in_power():
    return 7 ** (7**12)


def ignore_signals():
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
    while True:
        time.sleep(1)


def stop_myself():
    os.kill(os.getpid(), signal.SIGSTOP)


def half_a_reply():
    number, connection = mine()
    connection.sendall(REPLY.pack(number, 100, False) + b'["correct", 1')
    time.sleep(60)


def half_a_header():
    mine()[1].sendall(b"\0\0\0")
    time.sleep(60)


def leave_children(path):
    """Two programs, one of them in a session of its own, that go on while the grader hangs."""
    for alone in (False, True):
        child = subprocess.Popen(["sleep", "60"], start_new_session=alone)
        note(path, child.pid)
    note(path, os.getpid())
    time.sleep(60)


def sleep_then_exit(path, seconds):
    note(path, os.getpid())
    time.sleep(seconds)
    os._exit(1)


def stop_the_zygote():
    os.kill(os.getppid(), signal.SIGSTOP)
    time.sleep(60)


# --- what must crash -------------------------------------------------------------------------


def exit_three():
    os._exit(3)


def exit_now(value):
    os._exit(value)


def kill_the_zygote():
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


def segfault():
    ctypes.string_at(8)


def children_then_exit(path):
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    note(path, child.pid)
    os._exit(4)


def raise_long():
    raise ValueError("x" * 5000)


def raise_unsayable():
    class Odd(Exception):
        def __str__(self):
            raise RuntimeError

    raise Odd


def leave_python():
    sys.exit("bye")


def too_much():
    bytearray(10**12)


def bomb():
    held = []
    while True:
        held.append(bytearray(1 << 24))


def return_dict():
    return {"status": "correct"}


def flood():
    while True:
        mine()[1].sendall(b"\xff" * 65536)


def close_everything():
    os.closerange(3, 100)
    time.sleep(60)


def forge(body):
    """A reply in the right frame with `body` in it."""
    number, connection = mine()
    connection.sendall(REPLY.pack(number, len(body), False) + body)
    time.sleep(60)


def long_reply():
    number, connection = mine()
    connection.sendall(REPLY.pack(number, 1 << 30, False) + b"x" * 100_000)
    time.sleep(60)


def other_number():
    number, connection = mine()
    body = json.dumps(["correct", 1.0, "other"]).encode()
    connection.sendall(REPLY.pack(number + 1, len(body), False) + body)
    time.sleep(60)


def garbage_everywhere():
    for descriptor in range(3, 100):
        try:
            os.write(descriptor, b"garbage" * 10)
        except OSError:
            pass
    return said("garbage")


# --- what must be fine -----------------------------------------------------------------------


def garbage_later():
    """A thread that writes to the connection when the worker has no item."""
    connection = mine()[1]
    threading.Timer(0.1, connection.sendall, (b"garbage" * 10,)).start()
    return said("first")


def go_on_in_a_fork():
    """The child comes back first, from a call that was made once."""
    if os.fork() == 0:
        return said("child")
    time.sleep(0.1)
    return said("parent")


def print_much():
    text = "≤" * 1_000_000
    for _ in range(35):
        print(text)
        print(text, file=sys.stderr)
    os.write(1, b"raw")
    return said(repr(sys.stdin.read()))


def reserve(mebibytes):
    held = bytearray(mebibytes << 20)
    return said(len(held) >> 20)


def keep(mebibytes):
    kept.append(bytearray(mebibytes << 20))
    return said("kept")


def long_reason():
    return said("y" * 10**7)


def length(text):
    return said(len(text))


def surroundings():
    """What a worker is: as JSON in the reason."""
    return said(
        json.dumps(
            {
                "jax": "jax" in sys.modules,
                "inside": inside_worker(),
                "group": os.getpgid(0) == os.getpid(),
                "session": os.getsid(0),
                "core": resource.getrlimit(resource.RLIMIT_CORE),
                "outputs": [os.readlink(f"/proc/self/fd/{number}") for number in (0, 1, 2)],
                "descriptors": len(os.listdir("/proc/self/fd")),
                "inheritable": [n for n in descriptors() if n > 2 and os.get_inheritable(n)],
                "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
                "threads": len(os.listdir("/proc/self/task")),
            }
        )
    )


def descriptors() -> list[int]:
    found = []
    for number in range(100):
        try:
            os.fstat(number)
            found.append(number)
        except OSError:
            pass
    return found


def mine():
    """The number of the dispatch and the connection, out of the worker's frames."""
    frame = sys._getframe()
    while frame.f_code.co_name != "_work":
        frame = frame.f_back
    return frame.f_locals["number"], frame.f_locals["connection"]
