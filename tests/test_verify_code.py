"""Programs against tests: the public cases, HumanEval right and broken, and our own exploits."""

import ast
import concurrent.futures
import glob
import gzip
import json
import os
import pathlib
import re
import tempfile
import textwrap
import time

import pytest

from xrpo_jax.verify import code_blocks, code_root, sandbox
from xrpo_jax.verify.code import grade_code
from xrpo_jax.verify.code_compare import same_output, same_value

SHARED = pathlib.Path(__file__).parents[2] / "shared"
CASES = SHARED / "cases" / "code_reward.jsonl"
HUMAN_EVAL = SHARED / "data" / "HumanEval.jsonl.gz"
USER = 2**30 + os.getpid()
CANARY = pathlib.Path("/var/tmp/xrpo_jax_canary")
# The cases' words for what the first words of our reasons say.
WORDS = {
    "wrong answer": {"wrong_answer"},
    "runtime error": {"runtime_error"},
    "process limit": {"runtime_error"},
    "compile error": {"compile_error"},
    "memory limit": {"memory"},
    "output limit": {"output_limit"},
    "time limit": {"timeout"},
}
FIRST = re.compile("|".join(WORDS))


def cases():
    if not CASES.exists():
        return []
    with open(CASES) as lines:
        return [json.loads(line) for line in lines]


def words(verdict):
    """A verdict in the cases' words."""
    if verdict.status in ("correct", "unparsed"):
        return {"passed"} if verdict.correct else {"no_code"}
    assert verdict.status == "wrong", verdict
    return WORDS[FIRST.match(verdict.reason)[0]] | (
        {"crashed"} if "ended by SIG" in verdict.reason else set()
    )


def alive():
    """The processes of the user that all of this file's programs run as."""
    found = []
    for status in glob.glob("/proc/[0-9]*/status"):
        try:
            text = pathlib.Path(status).read_text()
        except OSError:
            continue
        if f"\nUid:\t{USER}\t" in text:
            found.append(text.split("\n")[0])
    return found


@pytest.fixture
def one_user(monkeypatch, tmp_path):
    """All programs run as one user, whose processes can be told from those of other tests."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if sandbox.available() == "namespaces" and os.geteuid() == 0:
        monkeypatch.setattr(code_root, "user", lambda mode: USER)


@pytest.mark.skipif(not CASES.exists(), reason="../shared/cases is not there")
@pytest.mark.parametrize("case", cases(), ids=lambda case: f"{case['fault']}-{case['id']}")
def test_a_published_case(case, one_user, tmp_path):
    given, expected = case["input"], case["expected"]
    limits = {name: value for name, value in given["limits"].items() if name != "network"}
    settings = {"entry_point": given.get("entry_point", ""), "mode": given.get("mode", "all")}
    if "setup" in given:
        CANARY.mkdir(exist_ok=True)
        (CANARY / "file").write_text("here")
    begun = time.monotonic()
    if expected["status_in"] == ["error"]:
        with pytest.raises(ValueError, match=expected["error_names"][0]):
            grade_code(given["completion"], given["tests"], **settings, **limits)
        return
    verdict = grade_code(given["completion"], given["tests"], **settings, **limits)
    assert time.monotonic() - begun <= expected["max_seconds"]
    assert words(verdict) & set(expected["status_in"]), verdict
    assert verdict.score in expected.get("reward_in", [expected.get("reward")])
    assert not alive()
    assert not list(tmp_path.iterdir())
    if "setup" in given:
        assert (CANARY / "file").read_text() == "here"
        (CANARY / "file").unlink()
        CANARY.rmdir()
    if "then" in given:
        assert not pathlib.Path("/tmp/rlvr_state_marker").exists()
        after = grade_code(given["then"]["completion"], given["tests"], **settings, **limits)
        assert after.score == given["then"]["expected_reward"]


@pytest.mark.skipif(not CASES.exists(), reason="../shared/cases is not there")
def test_every_case_is_one_of_code():
    assert len(cases()) == 74
    assert {case["kind"] for case in cases()} == {"code_reward"}


# --- HumanEval -------------------------------------------------------------------------------


def problems():
    with gzip.open(HUMAN_EVAL, "rt") as lines:
        return [json.loads(line) for line in lines]


def broken(problem):
    """The right solution with its results changed, each to another of its type."""
    name = problem["entry_point"]
    tree = ast.parse(problem["prompt"] + problem["canonical_solution"])
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            node.name = "inner"
        elif isinstance(node, ast.Name) and node.id == name:
            node.id = "inner"
    return f"""```python
{ast.unparse(tree)}

def changed(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 3
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, (list, tuple)):
        return type(value)([*value, 7])
    if isinstance(value, dict):
        return value | {{"x": 7}}
    return 7

def {name}(*args, **named):
    return changed(inner(*args, **named))
```"""


def graded(problem, completion):
    return grade_code(
        completion,
        problem["test"],
        entry_point=problem["entry_point"],
        prefix=problem["prompt"],
        time_s=20,
    )


@pytest.mark.skipif(not HUMAN_EVAL.exists(), reason="../shared/data is not there")
def test_every_right_solution_passes():
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        rows = problems()
        verdicts = pool.map(graded, rows, [row["canonical_solution"] for row in rows])
        failed = [
            (row["task_id"], verdict)
            for row, verdict in zip(rows, verdicts, strict=True)
            if not verdict.correct
        ]
    assert len(rows) == 164
    assert not failed


@pytest.mark.skipif(not HUMAN_EVAL.exists(), reason="../shared/data is not there")
def test_every_broken_solution_fails():
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        rows = problems()
        verdicts = pool.map(graded, rows, [broken(row) for row in rows])
        passed = [
            (row["task_id"], verdict)
            for row, verdict in zip(rows, verdicts, strict=True)
            if verdict.status != "wrong" or verdict.score
        ]
    assert not passed


# --- our own of the same kinds ---------------------------------------------------------------


def fenced(code, tag="python"):
    return f"```{tag}\n{code}\n```\n"


def program(code):
    """A fenced program out of a table, without the table's indent."""
    return fenced(textwrap.dedent(code).strip().replace("ADD_UP", RIGHT))


ADD = [{"stdin": "2 5\n", "stdout": "7\n"}, {"stdin": "-1 1\n", "stdout": "0\n"}]
RIGHT = "a, b = map(int, input().split())\nprint(a + b)"
TRIPLE = [{"args": [4], "expected": 12}, {"args": [-2], "expected": -6}]

FORMATS = {
    "tildes": ("~~~python\n" + RIGHT + "\n~~~", "correct"),
    "capital tag": (fenced(RIGHT, "Python3"), "correct"),
    "no tag": (fenced(RIGHT, ""), "correct"),
    "attributes after the tag": (fenced(RIGHT, 'python title="a.py"'), "correct"),
    "no fence": (RIGHT, "correct"),
    "windows lines": (("Here.\n" + fenced(RIGHT)).replace("\n", "\r\n"), "correct"),
    "four backticks": (f"````python\n{RIGHT}\n````", "correct"),
    "in a list": (
        "- do\n\n    ```py\n    " + RIGHT.replace("\n", "\n    ") + "\n    ```",
        "correct",
    ),
    "in a quote of the code": (fenced("x = '''\n  a ``` b\n'''\n" + RIGHT), "correct"),
    "after words": ("So: ```python\n" + RIGHT + "\n```", "correct"),
    "no end": ("```python\n" + RIGHT, "correct"),
    "output after it": (fenced(RIGHT) + "\nIt prints:\n" + fenced("7", ""), "correct"),
    "usage in a shell": (fenced(RIGHT) + "\n" + fenced("python3 a.py < in.txt", "bash"), "correct"),
    "an idea first": (fenced("a + b", "") + "\n" + fenced(RIGHT), "correct"),
    "the last one counts": (fenced(RIGHT) + fenced("a = input()\nprint(3)"), "wrong answer"),
    "thinking of the template": ("hm </think>\n" + fenced(RIGHT), "correct"),
    "two thoughts": ("<think>a</think>b<think>c</think>" + fenced(RIGHT), "correct"),
    "thinking that does not end": ("<think>\n" + fenced(RIGHT), "unparsed"),
    "only another language": (fenced("int main() { return 0; }", "cpp"), "unparsed"),
    "a word": ("Seven", "unparsed"),
    "a sentence that parses": ("yes and no", "unparsed"),
    "comments alone": (fenced("# read\n# add"), "unparsed"),
    "nothing": ("", "unparsed"),
    "cut off": (fenced("a, b = map(int, input("), "compile error"),
    "return outside": (fenced("return 3"), "compile error"),
    "a null character": (fenced("print(1)\0"), "compile error"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_where_a_program_stands(name):
    completion, expected = FORMATS[name]
    verdict = grade_code(completion, ADD)
    assert expected in (verdict.status, (FIRST.match(verdict.reason) or [""])[0]), verdict


WHOLE = {
    "reads all at once": (
        """
        import sys
        print(sum(map(int, sys.stdin.buffer.read().split())))
        """,
        "",
    ),
    "main guard": (
        """
        def main():
            a, b = map(int, input().split())
            print(a + b)
        if __name__ == '__main__':
            main()
        """,
        "",
    ),
    "quit": (
        """
        ADD_UP
        quit()
        """,
        "",
    ),
    "packages": (
        """
        import numpy as np
        print(np.sum(np.array(input().split(), dtype=int)))
        """,
        "",
    ),
    "a class": (
        """
        class A:
            def f(self):
                print(sum(map(int, input().split())))
        A().f()
        """,
        "",
    ),
    "exit status": (
        """
        ADD_UP
        import sys
        sys.exit(3)
        """,
        "runtime error",
    ),
    "fails after the answer": (
        """
        ADD_UP
        1 / 0
        """,
        "runtime error",
    ),
    "fails in a handler at the end": (
        """
        ADD_UP
        import os, atexit
        atexit.register(os._exit, 4)
        """,
        "runtime error",
    ),
    "kills itself": (
        """
        ADD_UP
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        "runtime error in test 1 of 2: ended by SIGKILL",
    ),
    "kills its group": (
        """
        import os
        os.killpg(0, 9)
        """,
        "runtime error",
    ),
    "kills everybody": (
        """
        import os
        os.kill(-1, 9)
        os.kill(1, 9)
        """,
        "runtime error",
    ),
    "reads too much": (
        """
        ADD_UP
        input()
        """,
        "runtime error",
    ),
    "sleeps": (
        """
        import time
        time.sleep(50)
        """,
        "time limit",
    ),
    "loops in C": (
        "sum(range(10**15))",
        "time limit",
    ),
    "stops itself": (
        """
        import os, signal
        os.kill(os.getpid(), signal.SIGSTOP)
        """,
        "time limit",
    ),
    "hogs memory": (
        """
        x = []
        while True:
            x.append(bytearray(10**6))
        """,
        "memory limit",
    ),
    "prints without end": (
        """
        while True:
            print('7')
        """,
        "output limit",
    ),
    "prints a long line": (
        "print('7' * 10**7)",
        "output limit",
    ),
    "writes a large file": (
        """
        open('f', 'wb').write(b'x' * 10**8)
        a, b = map(int, input().split())
        print(a + b)
        """,
        "runtime error",
    ),
    "many files": (
        """
        for i in range(99):
            open(str(i), 'wb').write(b'x' * 10**6)
        a, b = map(int, input().split())
        print(a + b)
        """,
        "runtime error",
    ),
    "looks for tests": (
        """
        import glob
        print(glob.glob('/work/*/*') + glob.glob('/tmp/*') + glob.glob('/home/*'))
        """,
        "wrong answer",
    ),
    "reads the grader's memory": (
        """
        import os
        open(f'/proc/{os.getppid()}/mem', 'rb')
        """,
        "runtime error",
    ),
    "prints to the errors": (
        """
        import sys
        print(7, file=sys.stderr)
        """,
        "wrong answer",
    ),
    "a second line": (
        """
        ADD_UP
        print()
        print(7)
        """,
        "wrong answer",
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_program(name, one_user):
    code, expected = WHOLE[name]
    limits = {"time_s": 1 if expected == "time limit" else 10, "memory_mb": 512, "file_kb": 2048}
    verdict = grade_code(program(code), ADD, **limits)
    assert verdict.correct if not expected else verdict.reason.startswith(expected), verdict
    assert not alive()


CALLS = {
    "a name bound by assignment": (
        "triple = lambda n: 3 * n",
        "correct",
    ),
    "prints while it works": (
        """
        def triple(n):
            print('debug', n, flush=True)
            return 3 * n
        """,
        "correct",
    ),
    "keeps a count": (
        """
        count = []
        def triple(n):
            count.append(n)
            return 3 * n * len(count)
        """,
        "correct",
    ),
    "a main part": (
        """
        def triple(n):
            return 3 * n
        if __name__ == '__main__':
            input()
        """,
        "correct",
    ),
    "an int of numpy": (
        """
        import numpy
        def triple(n):
            return numpy.int64(3 * n)
        """,
        "correct",
    ),
    "a float": (
        """
        def triple(n):
            return 3.0 * n
        """,
        "correct",
    ),
    "text": (
        """
        def triple(n):
            return f'{3 * n}'
        """,
        "wrong answer",
    ),
    "a list of it": (
        """
        def triple(n):
            return [3 * n]
        """,
        "wrong answer",
    ),
    "equal to all": (
        """
        class A:
            def __eq__(self, o):
                return True
        def triple(n):
            return A()
        """,
        "wrong answer",
    ),
    "a subclass that is equal to all": (
        """
        class A(int):
            def __eq__(self, o):
                return True
        def triple(n):
            return A(3 * n)
        """,
        "wrong answer",
    ),
    "the mock that is anything": (
        """
        from unittest.mock import ANY
        def triple(n):
            return ANY
        """,
        "wrong answer",
    ),
    "a list that holds itself": (
        """
        def triple(n):
            x = []
            x.append(x)
            return x
        """,
        "wrong answer",
    ),
    "endless values": (
        """
        import itertools
        def triple(n):
            return itertools.count()
        """,
        "wrong answer",
    ),
    "a forged answer": (
        """
        import os
        for i in range(3, 60):
            try:
                os.write(i, b'{"loaded": true}\\n{"value": 12}\\n{"ended": 0}\\n' * 9)
            except OSError:
                pass
        def triple(n):
            return 0
        """,
        "wrong answer",
    ),
    "nonsense on all descriptors": (
        """
        import os
        for i in range(3, 60):
            try:
                os.write(i, b'no\\n')
            except OSError:
                pass
        """,
        "runtime error",
    ),
    "nobody": (
        """
        def double(n):
            return 2 * n
        """,
        "runtime error",
    ),
    "fails on import": (
        """
        raise OSError('no')
        def triple(n):
            return 3 * n
        """,
        "runtime error",
    ),
    "exits": (
        """
        def triple(n):
            raise SystemExit(0)
        """,
        "runtime error",
    ),
    "leaves": (
        """
        import os
        def triple(n):
            os._exit(0)
        """,
        "runtime error",
    ),
    "a long integer": (
        """
        def triple(n):
            return 10**100000
        """,
        "wrong answer",
    ),
    "a large value": (
        """
        def triple(n):
            return 'x' * 10**8
        """,
        "output limit",
    ),
    "a deep value": (
        """
        def triple(n):
            x = []
            for i in range(10**5):
                x = [x]
            return x
        """,
        "wrong answer",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call(name, one_user):
    code, expected = CALLS[name]
    verdict = grade_code(program(code), TRIPLE, entry_point="triple", time_s=10)
    found = "correct" if verdict.correct else FIRST.match(verdict.reason)[0]
    assert found == expected, verdict
    assert not alive()


GOOD = "def area(r):\n    return 3.14 * r * r"
CHECK = """
def check(candidate):
    assert abs(candidate(2) - 12.56) < 1e-6
    assert candidate(1) < 4
"""
STACK = """class Stack:
    size = 0
    def __init__(self, *values):
        self.values = list(values)
    def push(self, value):
        self.values.append(value)
        return self
    def pop(self):
        if not self.values:
            raise IndexError("empty")
        return self.values.pop()
    def __len__(self):
        return len(self.values)
class Full(ValueError):
    pass
LIMIT = 3
def fill(stack, values):
    if len(values) > LIMIT:
        raise Full(len(values))
    for value in values:
        stack.push(value)
def each(function, values):
    return [function(value) for value in values]
def tidy(values):
    values.sort()
"""
TESTED = {
    "check is called": (
        GOOD,
        CHECK,
        "area",
        "",
    ),
    "check that fails": (
        """
        def area(r):
            return 3.1 * r * r
        """,
        CHECK,
        "area",
        "wrong answer",
    ),
    "own abs": (
        """
        def area(r):
            return 0 * r * r
        def abs(x):
            return 0
        """,
        CHECK,
        "area",
        "wrong answer",
    ),
    "own check": (
        """
        def area(r):
            return 0 * r * r
        def check(f):
            pass
        """,
        CHECK,
        "area",
        "wrong answer",
    ),
    "own math": (
        """
        class math:
            isclose = staticmethod(lambda a, b: True)
        def area(r):
            return 0
        """,
        """
        import math
        assert math.isclose(area(2), 12.56)
        """,
        "area",
        "wrong answer",
    ),
    "arithmetic that yields nothing": (
        """
        class A:
            __sub__ = __lt__ = __abs__ = lambda *a: 0.0
        def area(r):
            return A()
        """,
        CHECK,
        "area",
        "runtime error",
    ),
    "contains all": (
        """
        class A(list):
            def __contains__(self, x):
                return True
        def few():
            return A()
        """,
        "assert 3 in few()",
        "few",
        "wrong answer",
    ),
    "equal to all": (
        """
        class A:
            __eq__ = lambda *a: True
        def few():
            return A()
        """,
        "assert few() == 3",
        "few",
        "wrong answer",
    ),
    "not even the other way": (
        """
        class A(str):
            __eq__ = lambda *a: True
            __hash__ = str.__hash__
        def few():
            return A()
        """,
        "assert 'abc' == few()",
        "few",
        "wrong answer",
    ),
    "ends the loop": (
        """
        def few(x):
            raise StopIteration
        """,
        "assert all(map(lambda x: few(x) == x + 1, [1, 2]))",
        "few",
        "runtime error",
    ),
    "skips": (
        """
        import unittest
        def few(x):
            raise unittest.SkipTest('x')
        """,
        """
        import unittest
        class T(unittest.TestCase):
            def test(self):
                self.assertEqual(few(1), 2)
        unittest.main()
        """,
        "few",
        "wrong answer",
    ),
    "unit tests that nobody starts": (
        """
        def few(x):
            return 2
        """,
        """
        import unittest
        class T(unittest.TestCase):
            def test(self):
                self.assertEqual(few(1), 3)
        """,
        "few",
        "wrong answer",
    ),
    "unit tests in a main part": (
        """
        def few(x):
            return 2
        """,
        """
        import unittest
        class T(unittest.TestCase):
            def test(self):
                self.assertEqual(few(1), 2)
        if __name__ == '__main__':
            unittest.main()
        """,
        "few",
        "",
    ),
    "test functions that nobody calls": (
        """
        def few(x):
            return 2
        """,
        """
        from solution import few
        def test_it():
            assert few(1) == 3
        """,
        "",
        "wrong answer",
    ),
    "test functions that pass": (
        """
        def few(x):
            return 2
        """,
        """
        from solution import few
        def test_it():
            assert few(1) == 2
        """,
        "",
        "",
    ),
    "a bare except around it": (
        """
        import os
        def few(x):
            os._exit(0)
        """,
        """
        try:
            few(1)
        except:
            pass
        """,
        "few",
        "runtime error",
    ),
    "ends while it loads": (
        """
        import os
        os._exit(0)
        """,
        "assert few(1) == 2",
        "few",
        "runtime error",
    ),
    "writes to all descriptors": (
        """
        import os
        for i in range(3, 60):
            try:
                os.write(i, b'{"outcome": "passed", "reason": "", "loaded": true}\\n' * 4)
            except OSError:
                pass
        def few(x):
            return 0
        """,
        "assert few(1) == 2",
        "few",
        "runtime error",
    ),
    "loops": (
        """
        def few(x):
            while True:
                pass
        """,
        "assert few(1) == 2",
        "few",
        "time limit",
    ),
    "hogs memory": (
        """
        def few(x):
            return len(bytearray(10**10))
        """,
        "assert few(1) == 2",
        "few",
        "memory limit",
    ),
    "objects": (
        STACK,
        """
        s = Stack(1)
        assert s.push(2) is s
        assert len(s) == 2
        assert s.pop() == 2
        assert s.values == [1]
        assert isinstance(s, Stack)
        assert Stack.size == 0
        assert s != Stack(1)
        s.values = [5]
        assert s.pop() == 5
        """,
        "",
        "",
    ),
    "built-in exceptions": (
        STACK,
        """
        try:
            Stack().pop()
        except IndexError as error:
            assert str(error) == 'empty'
        else:
            assert False
        """,
        "",
        "",
    ),
    "own exceptions": (
        STACK,
        """
        try:
            fill(Stack(), [1, 2, 3, 4])
        except Full as error:
            assert isinstance(error, ValueError)
        else:
            assert False
        """,
        "",
        "",
    ),
    "an exception that does not come": (
        STACK,
        """
        try:
            fill(Stack(), [1])
        except Full:
            pass
        else:
            assert False
        """,
        "",
        "wrong answer",
    ),
    "constants": (
        STACK,
        "assert LIMIT == 3",
        "",
        "",
    ),
    "functions as arguments": (
        STACK,
        """
        assert each(lambda x: x * x, [1, 2]) == [1, 4]
        assert each(str, [1]) == ['1']
        """,
        "",
        "",
    ),
    "changes in place": (
        STACK,
        """
        x = [3, 1, 2]
        assert tidy(x) is None
        assert x == [1, 2, 3]
        """,
        "",
        "",
    ),
    "spoils its argument": (
        """
        def few(x):
            x.clear()
            return []
        """,
        """
        x = [2, 1]
        assert few(x) == sorted(x)
        """,
        "few",
        "wrong answer",
    ),
    "all types": (
        """
        def same(x):
            return x
        """,
        """
        values = [None, True, 2**80, 1.5, 2j, 'é', b'\\xff', [1, (2,)], {1, 2}, frozenset([1])]
        for x in [*values, {(1, 2): {'a': []}}, float('inf'), -(2**60)]:
            assert same(x) == x and type(same(x)) is type(x)
        """,
        "same",
        "",
    ),
    "several strings": (
        """
        def few(x):
            return x
        """,
        ["import math", "assert few(1) == 1", "assert few(math.pi) == math.pi"],
        "few",
        "",
    ),
    "the last of several": (
        """
        def few(x):
            return 1
        """,
        ["assert few(1) == 1", "assert few(2) == 2"],
        "few",
        "wrong answer",
    ),
    "a method": (
        """
        class Solution:
            def few(self, x):
                return x + 1
        """,
        """
        def check(candidate):
            assert candidate(1) == 2
        """,
        "Solution.few",
        "",
    ),
}


@pytest.mark.parametrize("name", TESTED)
def test_code_that_tests(name, one_user):
    code, tests, entry, expected = TESTED[name]
    seconds = 1 if expected == "time limit" else 10
    tests = textwrap.dedent(tests) if isinstance(tests, str) else tests
    verdict = grade_code(program(code), tests, entry_point=entry, time_s=seconds)
    assert verdict.correct if not expected else verdict.reason.startswith(expected), verdict
    assert not alive()


PREFIX = '''import math
from typing import List

def helper(x):
    return x + 1

def mean(values: List[float]) -> float:
    """ The mean. """
'''
MEAN = "assert mean([1, 3]) == 2\nassert helper(1) == 2"
CONTINUED = {
    "a body": ("    return sum(values) / len(values)\n", "correct"),
    "a body and more": ("    return sum(values) / len(values)\n\nprint(mean([1]))\n", "correct"),
    "a body and prose": ("    return sum(values) / len(values)\n\nThis is it, isn't?\n", "correct"),
    "a body in a fence": ("```python\nreturn sum(values) / len(values)\n```", "correct"),
    "the whole function": (
        "```py\ndef mean(values: List[float]):\n    return math.fsum(values) / len(values)\n```",
        "correct",
    ),
    "uses the helper": (fenced("def mean(values):\n    return helper(1)"), "correct"),
    "a future import": (
        "```\nfrom __future__ import annotations\ndef mean(values: Any):\n    return 2\n```",
        "correct",
    ),
    "in two blocks": (
        fenced("import math as m\ndef total(x):\n    return m.fsum(x)")
        + fenced("def mean(values):\n    return total(values) / 2"),
        "correct",
    ),
    "its own helper": (
        fenced("def helper(x):\n    return 7\ndef mean(values):\n    return helper(1) - 5"),
        "correct",
    ),
    "a wrong body": ("    return sum(values)\n", "wrong"),
    "prose": ("I do not know.", "unparsed"),
}


@pytest.mark.parametrize("name", CONTINUED)
def test_a_prefix(name):
    completion, expected = CONTINUED[name]
    verdict = grade_code(completion, MEAN, entry_point="mean", prefix=PREFIX)
    assert verdict.status == expected, verdict


def test_a_helper_of_the_prefix_is_not_the_candidates():
    prefix = "def code(s):\n    return s[::-1]\n\ndef decode(s):\n    pass\n"
    cheat = fenced("def code(s):\n    return s\ndef decode(s):\n    return s")
    test = "def check(candidate):\n    assert candidate(code('abc')) == 'abc'"
    assert grade_code(cheat, test, entry_point="decode", prefix=prefix).status == "wrong"
    right = "```python\ndef decode(s):\n    return code(s)\n```"
    assert grade_code(right, test, entry_point="decode", prefix=prefix).correct


def test_the_forms_of_livecodebench():
    whole = [{"input": "2 5\n", "output": "7\n", "testtype": "stdin"}]
    assert grade_code(fenced(RIGHT), whole).correct
    test = {"input": "[1, 2, 3]\n2", "output": "[2, 4, 6]", "testtype": "functional"}
    solution = "class Solution:\n    def scale(self, values: List[int], k: int) -> List[int]:\n"
    right = solution + "        return [self.by(v, k) for v in values]\n    def by(self, v, k):\n"
    right += "        return v * k"
    assert grade_code(fenced(right), [test]).correct
    assert grade_code(fenced(right), [test | {"output": "[2, 4, 7]"}]).status == "wrong"
    assert grade_code(fenced("def scale(v, k):\n    return [x * k for x in v]"), [test]).correct


def test_the_share_of_passed_tests():
    tests = [{"args": [n], "expected": n} for n in range(4)]
    half = fenced("def f(n):\n    return n % 2")
    assert grade_code(half, tests, entry_point="f", mode="fraction").score == 0.5
    assert grade_code(half, tests, entry_point="f").score == 0
    kills = fenced("import os\ndef f(n):\n    return n if n != 1 else os._exit(1)")
    verdict = grade_code(kills, tests, entry_point="f", mode="fraction")
    assert (verdict.status, verdict.score) == ("wrong", 0.75)
    slow = fenced("def f(n):\n    while n == 1:\n        pass\n    return n")
    verdict = grade_code(slow, tests, entry_point="f", mode="fraction", time_s=1)
    assert (verdict.status, verdict.score) == ("wrong", 0.75)
    asserts = [f"assert f({n}) == {n}" for n in range(4)]
    assert grade_code(slow, asserts, entry_point="f", mode="fraction", time_s=1).score == 0.75
    right = fenced("def f(n):\n    return n")
    assert grade_code(right, tests, entry_point="f", mode="fraction").score == 1
    fails = fenced("raise ValueError\ndef f(n):\n    return n")
    assert grade_code(fails, asserts, entry_point="f", mode="fraction").score == 0


def test_the_time_of_all_is_nobodys_fault():
    slow = fenced("import time\ntime.sleep(0.6)\nprint(sum(map(int, input().split())))")
    verdict = grade_code(slow, ADD * 4, time_s=5, total_s=1.5)
    assert verdict.status == "timed_out" and not verdict.score
    verdict = grade_code(fenced("while True: pass"), ADD, time_s=1, total_s=1.5, mode="fraction")
    assert verdict.status == "wrong" and not verdict.score


def test_tests_that_cannot_run_say_nothing_of_the_program():
    right = fenced("def f(n):\n    return n")
    for test in ("import no_such_package", "import os\nos._exit(0)", "f(object())"):
        assert grade_code(right, test, entry_point="f").status == "crashed", test
    looping = grade_code(right, "while True: pass", entry_point="f", time_s=0.5)
    assert looping.status == "timed_out"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"mode": "some"}, "mode"),
        ({"time_s": 0}, "time_s"),
        ({"time_s": True}, "time_s"),
        ({"total_s": float("nan")}, "total_s"),
        ({"memory_mb": 1.5}, "memory_mb"),
        ({"processes": 0}, "processes"),
        ({"network": True}, "network"),
        ({"entry_point": None}, "entry_point"),
        ({"prefix": "def ("}, "prefix"),
        ({"tests": ""}, "tests"),
        ({"tests": []}, "tests are empty"),
        ({"tests": None}, "tests are None"),
        ({"tests": [{}]}, r"tests\[0\]"),
        ({"tests": [3]}, r"tests\[0\]"),
        ({"tests": ["assert ("]}, r"tests\[0\]"),
        ({"tests": [{"stdin": 3, "stdout": ""}]}, r"tests\[0\]\.stdin"),
        ({"tests": [{"input": "", "output": "", "testtype": "web"}]}, r"tests\[0\]\.testtype"),
        ({"tests": [{"input": "{", "output": "1", "testtype": "functional"}]}, "JSON"),
        ({"tests": [{"args": 3, "expected": 3}], "entry_point": "f"}, r"tests\[0\]\.args"),
        ({"tests": [{"args": [3], "expected": 3}]}, "entry_point"),
        ({"tests": [{"args": [object()], "expected": 3}], "entry_point": "f"}, r"tests\[0\]"),
    ],
)
def test_a_wrong_setting_is_named(settings, named):
    with pytest.raises(ValueError, match=named):
        grade_code(fenced(RIGHT), **({"tests": ADD} | settings))


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("3.0", "3", True),
        ("3", "3.0", True),
        ("3.1", "3", False),
        ("10000000000000000000001", "10000000000000000000002", False),
        ("1.0000001", "1.0", True),
        ("1.00001", "1.0", False),
        ("123456789.1", "123456789.2", True),
        ("5", "1e999", False),
        ("nan", "1.0", False),
        ("YES", "yes", False),
        ("1  2", "1 2", True),
        ("1 2\n\n3", "1 2\n3", False),
        ("*\n***", "  *\n ***", False),
        (" 1 2", "1 2", True),
        ("a\r\nb\r\n", "a\nb", True),
        ("a b", "a\u00a0b", False),
        ("", "\n", True),
        ("0x10", "16", False),
        ("1_000", "1000", False),
        ("007", "7", False),
    ],
)
def test_printed_text(printed, expected, same):
    assert same_output(printed, expected) is same


@pytest.mark.parametrize(
    ("returned", "expected", "same"),
    [
        (["list", [1, 2]], [1, 2], True),
        (["tuple", [1, 2]], [1, 2], True),
        (["list", [1, 2]], [1, 2, 3], False),
        (["set", [1]], [1], False),
        (["set", [2, 1]], {1, 2}, True),
        (["dict", [["b", 1], ["a", ["list", []]]]], {"a": [], "b": 1}, True),
        (["dict", [["a", 1], ["a", 1]]], {"a": 1}, False),
        (["dict", [[1, 1]]], {True: 1}, False),
        (True, 1, False),
        (1, True, False),
        (None, 0, False),
        (["int", hex(2**90)], 2**90, True),
        (["int", "zz"], 5, False),
        (["float", "inf"], float("inf"), True),
        (5, float("inf"), False),
        (["float", "nan"], float("nan"), True),
        (6.0, 6, True),
        (6.0000001, 6, False),
        (0.30000000000000004, 0.3, True),
        ("6", 6, False),
        ({"a": 1}, {"a": 1}, False),
        (["list"], [], False),
        ([], [], False),
    ],
)
def test_returned_values(returned, expected, same):
    assert same_value(returned, expected) is same


HOSTILE = {
    "fences": "```\n" * 250_000,
    "open fences": "```python\n" + "x = 1\n" * 150_000,
    "backticks": "`" * 1_000_000,
    "late fences": "a ```python b\n" * 70_000,
    "thoughts": "<think></think>" * 66_000,
    "brackets": "(" * 1_000_000,
    "minus": "-" * 200_000 + "1",
    "attributes": "a" + ".b" * 100_000,
    "blanks": " " * 1_000_000,
    "indented": "".join(" " * (i % 900) + "a\n" for i in range(2_200)),
    "quotes": "> " * 500_000,
    "numbers": "1" * 250_000,
    "blocks": "```python\nx = y\n```\n" * 50_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_finding_code_takes_no_long_time(name):
    for find in (
        code_blocks.find_program,
        lambda text: code_blocks.find_function(text, ("f",)),
        lambda text: code_blocks.find_function(text, ("mean",), PREFIX),
    ):
        begun = time.monotonic()
        find(HOSTILE[name])
        assert time.monotonic() - begun < 5


def test_many_threads_at_once():
    def one(n):
        tests = [{"stdin": f"{n}\n", "stdout": f"{n * n}\n"}]
        return grade_code(fenced("n = int(input())\nprint(n * n)"), tests).correct

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        assert all(pool.map(one, range(12)))
