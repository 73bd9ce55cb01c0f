"""The tests of a code problem in one form, from the forms in which data sets have them."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import json

from xrpo_jax.verify import code_blocks, code_wire

FORMS = (
    "code as text; or dicts with stdin and stdout, with args and expected (and kwargs), or with "
    "input, output and testtype stdin or functional"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Test:
    """One test: `kind` is whole (given stdin, expected text), call (args, value) or code (text)."""

    kind: str
    given: str | bytes
    expected: object = None
    width: int = 0  # number of arguments of a call
    functional: bool = False  # a call whose function's name is not told


def read_tests(tests: object, entry_point: str) -> list[Test]:
    """The tests in one form; raises ValueError naming `tests` and what is wrong in it."""
    if isinstance(tests, str):
        tests = [tests]
    if not isinstance(tests, list | tuple) or not tests:
        shown = "empty" if isinstance(tests, list | tuple) else repr(tests)[:80]
        raise ValueError(f"tests are {shown}; allowed: at least one test ({FORMS})")
    return [_read_test(f"tests[{i}]", test, entry_point) for i, test in enumerate(tests)]


def _read_test(name: str, test: object, entry_point: str) -> Test:
    if isinstance(test, str):
        problem = code_blocks.problem_of(test) if len(test) <= code_blocks.LONGEST else ""
        if problem or not test.strip():
            raise ValueError(f"{name} is {problem or 'empty'}; allowed: Python code")
        return Test(kind="code", given=test)
    if not isinstance(test, dict):
        raise ValueError(f"{name} is a {type(test).__name__}; allowed: {FORMS}")
    keys = set(test)
    if keys == {"stdin", "stdout"}:
        return _whole(name, test, "stdin", "stdout")
    if {"input", "output"} <= keys:
        kind = test.get("testtype", "stdin")
        if kind == "stdin":
            return _whole(name, test, "input", "output")
        if kind != "functional":
            raise ValueError(f"{name}.testtype={kind!r}; allowed: stdin, functional")
        return _functional(name, test)
    if {"args", "expected"} <= keys <= {"args", "kwargs", "expected"}:
        args, kwargs = test["args"], test.get("kwargs") or {}
        if not isinstance(args, list | tuple) or not isinstance(kwargs, dict):
            raise ValueError(f"{name}.args={args!r}, kwargs={kwargs!r}; allowed: a list, a dict")
        if not entry_point:
            raise ValueError("entry_point=''; allowed: the name of the function that tests call")
        return _call(name, list(args), kwargs, test["expected"])
    raise ValueError(f"{name} has keys {', '.join(map(str, test))}; allowed: {FORMS}")


def _whole(name: str, test: dict, given: str, expected: str) -> Test:
    for key in (given, expected):
        if not isinstance(test[key], str):
            raise ValueError(f"{name}.{key} is a {type(test[key]).__name__}; allowed: text")
    return Test(kind="whole", given=test[given], expected=test[expected])


def _functional(name: str, test: dict) -> Test:
    values = []
    for key, text in [("input", one) for one in str(test["input"]).splitlines() if one.strip()] + [
        ("output", str(test["output"]))
    ]:
        try:
            values.append(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name}.{key} holds {text[:40]!r}; allowed: JSON") from error
    case = _call(name, values[:-1], {}, values[-1])
    return dataclasses.replace(case, functional=True)


def _call(name: str, args: list, kwargs: dict, expected: object) -> Test:
    def refuse(value):
        raise ValueError(f"{name} holds a {type(value).__name__}; allowed: plain data")

    try:
        code_wire.encode(expected, refuse)
        parts = {"args": args, "kwargs": kwargs}.items()
        given = code_wire.dumps({key: code_wire.encode(part, refuse) for key, part in parts})
    except RecursionError as error:
        raise ValueError(f"{name} is nested too deep; allowed: plain data") from error
    return Test(kind="call", given=given, expected=expected, width=len(args))


def wanted(cases: list[Test]) -> set[str]:
    """The names that test code uses and neither defines nor finds built in."""
    used: set[str] = set()
    bound: set[str] = set()
    for case in cases:
        tree = ast.parse(case.given)
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
            elif isinstance(node, ast.ImportFrom) and node.module == "solution":
                used |= {one.name for one in node.names}
        bound |= set(code_blocks.defined(tree)) - {
            one.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == "solution"
            for one in node.names
        }
    return used - bound - set(dir(builtins)) - {"candidate"}


def guess_entry(completion: str, width: int) -> tuple[tuple[str, ...], str]:
    """The function that a test without a name means: of class Solution, or the program's last.

    Of several methods it is the first one that takes as many arguments as the test gives.
    """
    code = code_blocks.find_function(completion, ("Solution",))
    tree = code_blocks.parsed(code.text) if code else None
    names = code_blocks.defined(tree) if tree else {}
    whole, own = names.get("Solution"), 1
    if not isinstance(whole, ast.ClassDef):
        whole, own = tree, 0
    functions = [node for node in getattr(whole, "body", []) if isinstance(node, ast.FunctionDef)]
    functions = [node for node in functions if not node.name.startswith("_")]
    fitting = [node for node in functions if len(node.args.args) == width + own] or functions
    if not fitting:
        return ("Solution",), "Solution"
    name = fitting[0].name if own else fitting[-1].name
    return (), f"Solution.{name}" if own else name
