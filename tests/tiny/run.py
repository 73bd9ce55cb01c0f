"""Serves runs of `python -m xrpo_jax.main` that may be killed, for tests/test_resume.py.

What a run needs is imported once. A request is a JSON line on standard input: each becomes a
forked child, in which JAX starts anew, with `argv` and its `output` (a file). `kill` says when it
ends, if at all: at number `at` of the events on files under `folder`, or at the first that reads
`at` in the trace, and `delay` seconds later, by `signal`. Python's audit hook sees those events, so
that a kill also falls within the writing of a checkpoint. `trace` (a file) lists them. An answer is
a wait status.
"""

from __future__ import annotations

import json
import os
import pathlib
import runpy
import signal
import sys
import traceback

import matplotlib.pyplot  # noqa: F401
import transformers

import xrpo_jax.tasks
import xrpo_jax.train  # noqa: F401

transformers.AutoTokenizer, transformers.LlamaConfig  # noqa: B018 - imported when named
CHANGES = ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree")


def watch(folder: str, trace: str, kill: dict | None) -> None:
    """Write the changes of files under `folder` to `trace`, and end at the one that `kill` says."""
    out = os.open(trace, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    seen = 0

    def hook(event: str, arguments: tuple) -> None:
        nonlocal seen, kill
        if event not in CHANGES:
            return
        path = str(arguments[0])
        relative = event in ("os.rmdir", "os.remove") and arguments[1] != -1  # rmtree's way
        if not relative and not path.startswith(folder):
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
        seen += 1
        line = f"{event} {path.removeprefix(folder)}"
        os.write(out, f"{line}\n".encode())
        if kill and (kill["at"] == seen or line == kill["at"]):
            number, delay, kill = getattr(signal, kill["signal"]), kill["delay"], None
            if delay:
                signal.setitimer(signal.ITIMER_REAL, delay)  # SIGALRM ends the process
            else:
                os.kill(os.getpid(), number)

    sys.addaudithook(hook)


def run(request: dict) -> None:
    """`python -m xrpo_jax.main`, with the folder of tests/tiny/tasks among the tasks."""
    out = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    xrpo_jax.tasks.__path__.append(str(pathlib.Path(__file__).parent / "tasks"))
    watch(request["folder"], request["trace"], request["kill"])
    sys.argv = ["xrpo_jax.main", *request["argv"]]
    runpy.run_module("xrpo_jax.main", run_name="__main__", alter_sys=True)


def main() -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                run(json.loads(line))
                code = 0
            except SystemExit as error:
                code = error.code or 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        print(os.waitpid(child, 0)[1], flush=True)


if __name__ == "__main__":
    main()
