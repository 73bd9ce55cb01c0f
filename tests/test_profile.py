"""Which steps are recorded, and that the trace is one that the viewers read."""

import gzip
import json

import jax
import jax.numpy as jnp
import pytest

from xrpo_jax import config as settings
from xrpo_jax.log import Clock
from xrpo_jax.profile import Profiler, steps_of


def test_steps_are_read():
    assert steps_of("3:5") == range(3, 5) and steps_of("0:1") == range(1)
    assert not steps_of("")


@pytest.mark.parametrize(
    "text", ["3", "5:3", "3:3", "3:", ":5", "-1:2", "3:5:2", "a:b", "3-5", " "]
)
def test_what_is_no_range_of_steps_is_refused(text):
    with pytest.raises(ValueError, match="allowed: FIRST:END such as 3:5"):
        steps_of(text)
    config = settings.default()
    config.profile.steps = text
    with pytest.raises(ValueError, match=f"profile.steps='{text}'; allowed"):
        settings.parse(config)


def test_steps_that_a_run_does_not_have_are_refused():
    config = settings.default()
    config.train.steps, config.profile.steps = 5, "5:6"
    with pytest.raises(ValueError, match="profile.steps='5:6'; allowed: steps below train.steps=5"):
        settings.parse(config)
    config.profile.steps = "4:9"
    assert settings.parse(config).profile.steps == "4:9"


def record(folder, text: str, start: int, end: int) -> list[list[str]]:
    """The names of a trace's own events, for each trace that a loop over steps leaves."""
    profiler = Profiler(folder, steps_of(text))
    work = jax.jit(lambda x: x + 1)
    for step in range(start, end):
        profiler.begin(step)
        with Clock()(f"phase {step}"):
            work(jnp.zeros(3)).block_until_ready()
        profiler.end(step, step + 1 == end)
    found = []
    for file in sorted(folder.rglob("*.trace.json.gz")):
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        named = [event for event in events if event.get("name", "").startswith(("step", "phase"))]
        named.sort(key=lambda event: event["ts"])
        found.append([event.get("args", {}).get("step_num", event["name"]) for event in named])
    return found


@pytest.mark.parametrize(
    "text, start, end, wanted",
    [
        ("1:3", 0, 5, [["1", "phase 1", "2", "phase 2"]]),
        ("0:1", 0, 3, [["0", "phase 0"]]),
        ("1:9", 0, 3, [["1", "phase 1", "2", "phase 2"]]),  # the run ends before
        ("1:4", 2, 6, [["2", "phase 2", "3", "phase 3"]]),  # it was resumed in between
        ("1:4", 4, 6, []),
        ("", 0, 3, []),
    ],
)
def test_the_trace_holds_those_steps_and_their_phases(tmp_path, text, start, end, wanted):
    assert record(tmp_path / "profile", text, start, end) == wanted
    assert (tmp_path / "profile").exists() == bool(wanted)
