"""Runs a candidate's program against tests in sandboxes, and says what came of each."""

from __future__ import annotations

import json
import os
import pathlib
import signal

from xrpo_jax.verify import code_blocks, code_wire, sandbox
from xrpo_jax.verify.code_blocks import Code
from xrpo_jax.verify.code_cases import Test, wanted
from xrpo_jax.verify.code_compare import same_output, same_value
from xrpo_jax.verify.sandbox import Ended, Limits, Program

HERE = pathlib.Path(__file__).parent
DRIVER = ("code_driver.py", "code_wire.py")
CHECKER = ("code_checker.py", "code_link.py", "code_wire.py")
FILES = {name: (HERE / name).read_bytes() for name in {*DRIVER, *CHECKER}}
# What LeetCode imports for its solutions, whose starter code says List without importing it.
PRELUDE = b"""
import bisect, collections, copy, datetime, functools, heapq, itertools, math, operator, random
import re, string, sys
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
pow = __builtins__["pow"] if isinstance(__builtins__, dict) else __builtins__.pow
"""
PASSED, FAULTS = "passed", ("broken", "late")

Said = tuple[str, str]  # what came of one test: `passed` or the first words of a reason; the rest


def _program(code: Code, *arguments: str, prelude: bytes = b"", **settings) -> Program:
    """The driver with the candidate's parts, in the order in which they are run."""
    parts = {"prelude.py": prelude, "before.py": code.before.encode(errors="replace")}
    parts = {name: text for name, text in parts.items() if text.strip()}
    parts["program.py"] = code.text.encode(errors="replace")
    files = {name: FILES[name] for name in DRIVER} | parts
    return Program(files=files, arguments=(*arguments, *parts), **settings)


def _last_line(errors: bytes) -> str:
    lines = errors.decode("utf-8", "replace").strip().splitlines()
    return lines[-1][:200] if lines else ""


def _fault(error: str) -> str:
    """The first words of a reason for an exception, given as `Name: text`."""
    if error.startswith(("SyntaxError", "IndentationError", "TabError")):
        return "compile error"
    if error.startswith("MemoryError"):
        return "memory limit"
    if "can't start new thread" in error or error.startswith("BlockingIOError: [Errno 11]"):
        return "process limit"
    return "runtime error"


def _failure(ended: Ended, limits: Limits) -> Said | None:
    """Why a program did not end well; None where it ended with status 0."""
    if ended.how == "failed":
        return "broken", f"sandbox: {ended.message}"
    if ended.how == "stopped":
        return "late", "the grading ran past total_s"
    if ended.how in ("time", "output", "processes"):
        words = {"time": "time limit", "output": "output limit", "processes": "process limit"}
        return words[ended.how], ""
    if ended.how == "killed":
        if ended.code in (signal.SIGXCPU, signal.SIGKILL) and ended.cpu_s >= limits.time_s:
            return "time limit", ""
        return "runtime error", f"ended by {signal.Signals(ended.code).name}"
    if ended.code:
        last = _last_line(ended.stderr)
        return _fault(last), last or f"exit status {ended.code}"
    return None


def run_whole(code: Code, case: Test, limits: Limits, until: float) -> Said:
    given = sandbox.readable(case.given.encode(errors="surrogatepass"))
    program = _program(code, "whole", stdin=given)
    (ended,) = sandbox.run([program], limits, until=until)
    failure = _failure(ended, limits)
    if failure:
        return failure
    printed = ended.stdout.decode("utf-8", "surrogateescape")
    if same_output(printed, case.expected):
        return PASSED, ""
    return "wrong answer", f"printed {printed[:60]!r} for {case.expected[:60]!r}"


def run_calls(code, cases, entry, mode, limits, until) -> list[Said]:
    """Calls in one sandbox, each in a process of its own; after a kill the rest gets another."""
    said: list[Said] = []
    while len(said) < len(cases):
        left = cases[len(said) :]
        heard: list[Said] = []
        state = {"loaded": False, "answer": None}

        def on_line(line: bytes, left=left, heard=heard, state=state) -> str:
            try:
                message = code_wire.loads(line)
            except code_wire.Refused:
                heard.append(("runtime error", "wrote what is no answer"))
                return "stop"
            if not state["loaded"]:
                state["loaded"] = "loaded" in message
                if not state["loaded"]:
                    heard.extend([_answered(message, None)] * len(left))
                return "next" if state["loaded"] else "stop"
            if "ended" not in message:
                state["answer"] = message
                return "more"
            answer = state["answer"] or {"ended": message["ended"]}
            heard.append(_answered(answer, left[len(heard)].expected))
            state["answer"] = None
            over = len(heard) == len(left) or (mode == "all" and heard[-1][0] != PASSED)
            return "stop" if over else "next"

        given = sandbox.readable(b"".join(case.given for case in left))
        program = _program(
            code,
            "calls",
            entry,
            prelude=PRELUDE if left[0].functional else b"",
            stdin=given,
        )
        (ended,) = sandbox.run([program], limits, until=until, on_line=on_line)
        if len(heard) < len(left) and (not heard or heard[-1][0] == PASSED or mode != "all"):
            failure = _failure(ended, limits) or ("runtime error", "the program ended early")
            heard += [failure] * (1 if state["loaded"] else len(left))
        said += heard
        if mode == "all" or any(one[0] in FAULTS for one in heard):
            break
    return said


def _answered(message: dict, expected: object) -> Said:
    """What an answer of the driver comes to; it may be forged, and then is as good as a value."""
    if "value" in message:
        if same_value(message["value"], expected):
            return PASSED, ""
        return "wrong answer", f"returned {_short(message['value'])} for {_short(expected)}"
    if "refused" in message:
        return "wrong answer", str(message["refused"])[:200]
    if isinstance(message.get("raised"), dict):
        text = f"{message['raised'].get('name')}: {message['raised'].get('text')}"[:200]
        return _fault(text), text
    return "runtime error", f"the program ended in a call ({message.get('ended')})"


def _short(value: object) -> str:
    try:
        return repr(value)[:60]
    except (RecursionError, ValueError):  # too deep, or an integer of too many digits
        return f"a {type(value).__name__}"


def run_tests(code, cases, entry, mode, prefix, limits, until) -> list[Said]:
    """Test code in its own sandbox, joined by two pipes to the candidate in another."""
    said: list[Said] = []
    names = tuple(sorted(wanted(cases)))
    trusted = code_blocks.helpers(prefix, (entry.partition(".")[0],))
    while len(said) < len(cases):
        left = cases[len(said) :]
        heard: list[dict] = []

        def on_line(line: bytes, left=left, heard=heard) -> str:
            heard.append(code_wire.loads(line))
            failed = heard[-1]["outcome"] != PASSED
            return "stop" if len(heard) == len(left) or (failed and mode == "all") else "next"

        asked, asks = os.pipe()
        answered, answers = os.pipe()
        job = {
            "tests": [case.given for case in left],
            "entry": entry,
            "names": names,
            "prefix": trusted,
            "time_s": limits.time_s,
            "most": limits.output_kb * 1024,
            "requests": asks,
        }
        checker = Program(
            files={name: FILES[name] for name in CHECKER}
            | {"tests.json": json.dumps(job).encode()},
            stdin=answered,
            shared=(asks,),
            tests=2 * len(left),
        )
        candidate = _program(code, "serve", stdin=asked, stdout=answers, tests=len(left))
        ends = sandbox.run(
            [checker, candidate],
            limits,
            until=until,
            time_s=2 * limits.time_s + 1,
            on_line=on_line,
        )
        said += [_said(message, ends[1], limits) for message in heard]
        if heard and not heard[-1]["loaded"]:
            said += [said[-1]] * (len(left) - len(heard))
        stuck = len(heard) < len(left) and (not heard or heard[-1]["outcome"] == PASSED)
        if stuck:
            said.append(_test_failure(ends[0]))
        if mode == "all" or any(one[0] in FAULTS for one in said):
            break
    return said


def _said(message: dict, candidate: Ended, limits: Limits) -> Said:
    if message["outcome"] == "ended":
        if candidate.how in ("exited", "killed"):
            return _failure(candidate, limits) or ("runtime error", "the program ended in a call")
        return "runtime error", "the program ended in a call"
    if message["outcome"] == "forged":
        return "runtime error", "wrote what is no answer"
    if message["outcome"] == "runtime error":
        return _fault(message["reason"]), message["reason"]
    return message["outcome"], message["reason"]


def _test_failure(ended: Ended) -> Said:
    """Why the test process said nothing of a test: never the candidate's fault."""
    if ended.how == "time":
        return "late", "the test code took too long by itself"
    if ended.how == "stopped":
        return "late", "the grading ran past total_s"
    return "broken", f"test process: {ended.message or ended.how} {_last_line(ended.stderr)}"
