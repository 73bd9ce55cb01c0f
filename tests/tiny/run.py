"""Serves runs of `python -m xrpo_jax.main` that may kill themselves; tests/test_resume.py starts it.

What a run needs is imported once. A request is a JSON line on standard input: each becomes a forked
child, in which JAX starts anew, with `argv`, its standard `output` (a file), and `kill`: at the
n-th event on a file under `folder`, `delay` seconds later. Python's audit hook sees those events,
so that a kill also falls within the writing of a checkpoint. Answers are wait statuses.
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

transformers.AutoTokenizer  # noqa: B018 - imported when first named
CHANGES = ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove")


def watch(folder: str, trace: str, kill: dict | None) -> None:
    """Note the changes of files under `folder` in `trace`, and end at number `kill["at"]`."""
    out = os.open(trace, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    seen = 0

    def hook(event: str, arguments: tuple) -> None:
        nonlocal seen
        if event not in CHANGES or not str(arguments[0]).startswith(folder):
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
        seen += 1
        os.write(out, f"{event} {str(arguments[0])[len(folder) :]}\n".encode())
        if kill and seen == kill["at"]:
            if kill["delay"]:
                signal.setitimer(signal.ITIMER_REAL, kill["delay"])  # SIGALRM ends a process
            else:
                os.kill(os.getpid(), signal.SIGKILL)

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
