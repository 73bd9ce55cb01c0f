"""Items handed to a pool one at a time, graded while the caller goes on with other work."""

from __future__ import annotations

import collections
import hashlib
import pickle
import threading
import time
from collections.abc import Callable

from xrpo_jax.types import Verdict
from xrpo_jax.verify.zygote import Job

Serve = Callable[["collections.deque[Job]", dict[bytes, Verdict], Callable[[], bool]], None]


def job_of(place: int, item: tuple) -> Job:
    """What is sent for `item`, the one at `place`; ValueError where it does not pickle."""
    try:
        if not isinstance(item, tuple):
            raise TypeError(f"a {type(item).__name__}")
        payload = pickle.dumps(item, protocol=5)
    except Exception as error:
        raise ValueError(
            f"item {place} cannot be sent to a worker: {type(error).__name__}: {error}; allowed: "
            "tuples of what pickles"
        ) from error
    return Job(hashlib.blake2b(payload, digest_size=16).digest(), payload)


class Stream:
    """What was handed in by one caller, and the thread that has it graded.

    The thread lives while there is something to grade, so that a stream which nobody asks again
    ends by itself. `serve(waiting, verdicts, over)` grades until `waiting`, which may grow
    meanwhile, is empty, and raises when `over()`.
    """

    def __init__(self, serve: Serve, recall: Callable[[bytes], Verdict | None]):
        self._serve, self._recall = serve, recall
        self._change = threading.Condition()
        self._keys: list[bytes] = []
        self._seen: set[bytes] = set()
        self._waiting: collections.deque[Job] = collections.deque()
        self._verdicts: dict[bytes, Verdict] = {}
        self._working, self._over = False, False
        self._error: BaseException | None = None
        self._busy = self._waited = 0.0

    def add(self, item: tuple) -> None:
        """Hand in an item without waiting for anything; equal ones are graded once.

        Raises ValueError where it does not pickle, and what grading has raised so far.
        """
        self.put(job_of(len(self._keys), item))

    def put(self, job: Job) -> None:
        """`add` of what job_of returned."""
        with self._change:
            self._raise()
            self._keys.append(job.key)
            if job.key in self._seen:
                return
            self._seen.add(job.key)
            known = self._recall(job.key)
            if known is not None:
                self._verdicts[job.key] = known
                return
            self._waiting.append(job)
            if not self._working:
                # In this order an interrupt between the two leaves nobody waiting for no thread.
                threading.Thread(target=self._work, name="pool", daemon=True).start()
                self._working = True

    def verdicts(self) -> list[Verdict]:
        """Wait for the verdict on each job, in the order handed in. Raises what grading raised."""
        began = time.perf_counter()
        with self._change:
            self._change.wait_for(lambda: not self._working)
            self._waited += time.perf_counter() - began
            self._raise()
            return [self._verdicts[key] for key in self._keys]

    @property
    def hidden(self) -> float:
        """Seconds in which something was being graded and nobody waited for it."""
        return max(self._busy - self._waited, 0.0)

    def close(self) -> None:
        """Give up what is not graded yet: its workers are gone on return."""
        self._over = True
        with self._change:
            self._change.wait_for(lambda: not self._working)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
        if self._over:
            raise RuntimeError("the stream is closed")

    def _work(self) -> None:
        began = time.perf_counter()
        while True:
            graded: dict[bytes, Verdict] = {}
            error = None
            try:
                self._serve(self._waiting, graded, lambda: self._over)
            except BaseException as raised:
                error = raised
            with self._change:
                self._verdicts |= graded
                self._error = error
                if error is not None or not self._waiting:
                    self._busy += time.perf_counter() - began
                    self._working = False
                    self._change.notify_all()
                    return
