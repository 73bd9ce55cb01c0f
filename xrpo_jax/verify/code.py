"""Grades a completion that should hold a Python program, by running it against tests.

A program that prints is compared with the expected output out here; a function is called in the
sandbox and its value compared out here; test code (asserts, check(candidate), unittest) runs in a
second sandbox and calls the candidate's in the first. The right answers are never where the
candidate runs. `wrong` is what the candidate did wrong, its own time limit included; `timed_out`
and `crashed` say nothing about it: the grading itself took too long, or could not be done.
"""

from __future__ import annotations

import dataclasses
import time

from xrpo_jax.types import Verdict
from xrpo_jax.verify import code_blocks, sandbox
from xrpo_jax.verify.code_cases import guess_entry, read_tests, wanted
from xrpo_jax.verify.code_run import FAULTS, PASSED, Said, run_calls, run_tests, run_whole
from xrpo_jax.verify.sandbox import Limits

MODES = ("all", "fraction")


def grade_code(
    completion: str,
    tests: list[dict] | list[str] | str,
    *,
    entry_point: str = "",
    mode: str = "all",
    prefix: str = "",
    total_s: float = 120.0,
    **limits: float,
) -> Verdict:
    """Whether the completion's program passes the tests.

    `tests` are code, or dicts of stdin and stdout, of args, kwargs and expected, or LiveCodeBench's
    of input, output and testtype. `entry_point` names the function, or Class.method. `prefix` is
    what the program continues, or whose imports and helpers it may use. With mode `fraction` the
    score is the share of passed tests, else 1 or 0. `total_s` seconds are for all tests together;
    the limits `time_s`, `memory_mb`, `processes`, `output_kb` and `file_kb` (sandbox.Limits) for
    each. Raises ValueError naming the setting or test that is wrong, before anything runs.
    """
    if mode not in MODES:
        raise ValueError(f"mode={mode!r}; allowed: {', '.join(MODES)}")
    for name, value in (("entry_point", entry_point), ("prefix", prefix)):
        if not isinstance(value, str):
            raise ValueError(f"{name}={value!r}; allowed: text")
    known = [field.name for field in dataclasses.fields(Limits)]
    for name in limits:
        if name not in known:
            raise ValueError(f"{name} is no limit; allowed: {', '.join(known)}")
    sandbox.check_seconds("total_s", total_s)
    bounds = Limits(**limits)
    cases = read_tests(tests, entry_point)
    if prefix and code_blocks.helpers(prefix, ()) == "" and code_blocks.parsed(prefix) is None:
        raise ValueError(f"prefix={prefix[:40]!r}; allowed: Python")
    until = time.monotonic() + total_s
    try:
        return _graded(completion, cases, entry_point, mode, prefix, bounds, until)
    except OSError as error:
        return Verdict(status="crashed", score=0.0, reason=f"sandbox: {error}")


def _graded(completion, cases, entry_point, mode, prefix, limits, until) -> Verdict:
    said: list[Said] = []
    while len(said) < len(cases):
        place = len(said)
        kind = cases[place].kind
        entry = entry_point
        if kind == "whole":
            code = code_blocks.find_program(completion)
            group = [cases[place]]
        else:
            group = cases[place:]
            stop = next((i for i, case in enumerate(group) if case.kind != kind), len(group))
            group = group[:stop]
            names = tuple(sorted(wanted(group))) if kind == "code" else ()
            if cases[place].functional and not entry:
                names, entry = guess_entry(completion, cases[place].width)
            names = (entry.partition(".")[0],) if entry else names
            code = code_blocks.find_function(completion, names, prefix)
        if code is None:
            return Verdict(status="unparsed", score=0.0, reason="no code")
        if code.problem:
            said += [("compile error", code.problem)] * len(group)
        elif kind == "whole":
            said.append(run_whole(code, group[0], limits, until))
        elif kind == "call":
            said += run_calls(code, group, entry, mode, limits, until)
        else:
            said += run_tests(code, group, entry, mode, prefix, limits, until)
        if any(one[0] in FAULTS or (mode == "all" and one[0] != PASSED) for one in said):
            break
    return _verdict(said, len(cases), mode)


def _verdict(said: list[Said], count: int, mode: str) -> Verdict:
    slow = any(first == "time limit" for first, _ in said)
    for first, rest in said:
        # A program that used up its time in some tests is to blame for the time of all.
        if first in FAULTS and not (first == "late" and slow):
            status = "timed_out" if first == "late" else "crashed"
            return Verdict(status=status, score=0.0, reason=rest)
    passed = sum(first == PASSED for first, _ in said)
    if passed == count:
        return Verdict(status="correct", score=1.0)
    place = next(i for i, one in enumerate(said) if one[0] != PASSED)
    first, rest = said[place]
    reason = f"{first} in test {place + 1} of {count}" + (f": {rest}" if rest else "")
    score = passed / count if mode == "fraction" else 0.0
    return Verdict(status="wrong", score=score, reason=reason[:400])
