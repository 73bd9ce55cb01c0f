"""A trace of some steps for the standard viewers, TensorBoard's profiler (XProf) and Perfetto."""

from __future__ import annotations

import pathlib
import re

import jax


def steps_of(text: str) -> range:
    """The steps of "3:5", which are 3 and 4; none of "". ValueError on anything else."""
    if not text:
        return range(0)
    found = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", text)
    steps = range(*map(int, found.groups())) if found else range(0)
    if not steps:
        raise ValueError(
            f"steps={text!r}; allowed: FIRST:END such as 3:5 for steps 3 and 4, or nothing"
        )
    return steps


class Profiler:
    """Records the steps of a range, from `begin` of the first to `end` of the last, in `folder`.

    Without steps it does nothing. What is recorded computes nothing else.
    """

    def __init__(self, folder: pathlib.Path, steps: range):
        self.folder, self.steps = folder, steps
        self._running, self._step = False, None

    def begin(self, step: int) -> None:
        """A step starts; a run that resumes in the middle of the range records the rest."""
        if step not in self.steps:
            return
        if not self._running:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # it records every call, and slows down what it shows
            jax.profiler.start_trace(self.folder, profiler_options=options)
            self._running = True
        self._step = jax.profiler.StepTraceAnnotation("step", step_num=step)
        self._step.__enter__()

    def end(self, step: int, last: bool) -> None:
        """A step has ended, and with `last` the run: the trace is written after its last step."""
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None
        if self._running and (last or step + 1 not in self.steps):
            jax.profiler.stop_trace()
            self._running = False
