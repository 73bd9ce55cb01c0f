"""Runs test code against a candidate in another process; run as a script in a sandbox of its own.

The test code is trusted and the candidate is not. What the candidate defines stands here as
references (code_link): a call sends the arguments over and gets a value back, as plain data or as
another reference. One line of JSON for each test goes to the grader, on a descriptor that the
candidate does not have; a pass is such a line.
"""

import ast
import builtins
import json
import os
import sys
import time
import types

FOLDER = os.path.dirname(os.path.abspath(__file__))
PACKAGES = [path for path in sys.path if path.endswith("-packages")]
sys.path[:] = [path for path in sys.path if path not in PACKAGES] + PACKAGES
sys.path.insert(0, FOLDER)
import code_wire as wire  # noqa: E402
from code_link import Broken, Link  # noqa: E402

sys.path.remove(FOLDER)


def globals_of(job, link):
    """The namespace of the tests: the trusted part of the prompt, then what the program defines."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    space = module.__dict__
    try:
        exec(compile(job["prefix"], "prefix", "exec", dont_inherit=True), space)
    except Exception as error:
        raise Broken(f"the prefix: {type(error).__name__}: {error}") from None
    entry, _, method = job["entry"].partition(".")
    wanted = [name for name in job["names"] if name not in space and not hasattr(builtins, name)]
    wanted += [entry] if entry else []
    message = link.receive()
    if "raised" in message:
        raise link.error(message["raised"], "load")
    link.send({"names": wanted})
    given = link.receive().get("names")
    if not isinstance(given, dict):
        link.fail("forged")
    solution = types.ModuleType("solution")
    for name in wanted:
        if name not in given:
            continue
        encoded = given[name]
        if isinstance(encoded, list) and encoded[:1] == ["module"] and name != entry:
            # A module that the program imported: the tests get the real one of that name.
            if encoded[1] in sys.stdlib_module_names | {"numpy"}:
                space[name] = __import__(encoded[1], fromlist=["*"])
                continue
        space[name] = solution.__dict__[name] = link.read(encoded)
    sys.modules["solution"] = solution
    if entry and entry not in space:
        raise link.error({"name": "NameError", "text": f"name {entry!r} is not defined"}, "load")
    if entry:
        space["candidate"] = getattr(space[entry](), method) if method else space[entry]
    return space


def run_test(code, space, results):
    """Runs one test's code, and what a test runner would call of it."""
    unittest = sys.modules.get("unittest")
    tree = ast.parse(code)
    exec(compile(tree, "test", "exec", dont_inherit=True), space)
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    called = {function.id for function in calls if isinstance(function, ast.Name)}
    cases = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name not in called:
            if node.name == "check" and "candidate" in space and len(node.args.args) == 1:
                space["check"](space["candidate"])
            elif node.name.startswith("test") and not node.args.args:
                space[node.name]()
        elif isinstance(node, ast.ClassDef) and unittest and not results:
            case = space.get(node.name)
            if isinstance(case, type) and issubclass(case, unittest.TestCase):
                cases.append(unittest.defaultTestLoader.loadTestsFromTestCase(case))
    if cases:
        results.append(unittest.TestResult())
        unittest.TestSuite(cases).run(results[-1])
    for result in results:
        for _, text in result.failures + result.errors:
            raise AssertionError(text.strip().rpartition("\n")[2])
        if not result.wasSuccessful() or not result.testsRun:
            raise AssertionError("the unit tests did not pass")


def judged(error, link):
    """The outcome and the reason of a test that ended with an exception."""
    if link.gone:
        return link.gone, ""
    own = [name for one, name in link.raised if one is error]
    try:
        text = str(error)
    except BaseException:
        text = ""
    if own:
        return ("memory limit" if own[0] == "MemoryError" else "runtime error"), f"{own[0]}: {text}"
    if isinstance(error, AssertionError):
        return "wrong answer", text
    foreign = isinstance(error, ModuleNotFoundError) and error.name != "solution"
    if foreign or isinstance(error, Broken | SystemExit | MemoryError):
        return "broken", f"{type(error).__name__}: {text}"
    return "runtime error", f"{type(error).__name__}: {text}"


def collect_results(results):
    """Makes unittest.main end in no exit, and its result count whatever the tests do with it."""
    import unittest  # slow to import, and few tests use it

    def main(module="__main__", *args, exit=True, **named):
        named |= {"argv": ["test"], "testRunner": unittest.TextTestRunner(verbosity=0)}
        program = unittest.TestProgram("__main__", exit=False, **named)
        results.append(program.result)
        return program

    unittest.main = main


def main():
    with open(f"{FOLDER}/tests.json", encoding="utf-8") as file:
        job = json.load(file)
    answers, told = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    link, space = Link(answers, job["requests"], job["most"]), None
    for code in job["tests"]:
        results, reason = [], ""
        if "unittest" in code:
            collect_results(results)
        link.deadline = time.monotonic() + job["time_s"]
        try:
            space = space or globals_of(job, link)
            run_test(code, space, results)
            said = "passed"
        except BaseException as error:
            said, reason = judged(error, link)
        if link.gone and said == "passed":  # a bare except of the tests swallowed it
            said = link.gone
        message = {"outcome": said, "reason": reason[:300], "loaded": space is not None}
        os.write(told, wire.dumps(message))
        if link.gone or space is None:
            break
    os._exit(0)


if __name__ == "__main__":
    main()
