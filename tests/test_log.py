"""The log's files after a kill, and what is counted and timed."""

import gzip
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from xrpo_jax import log as logs
from xrpo_jax.log import Clock, Compiles, Log, comparable, read_metrics, read_rollouts


def write(folder, steps: range, keep_rollouts: bool = True) -> None:
    log = Log(folder, steps.start, keep_rollouts)
    for step in steps:
        log.metrics(step, {"reward": step / 7, "seconds/step": 0.1})
        log.rollouts(step, [{"text": f"a {step}\n", "reward": 1.0}, {"text": "ü", "reward": 0.0}])


def both(folder) -> tuple[list, list]:
    return (
        read_metrics(folder / "metrics.jsonl"),
        list(read_rollouts(folder / "rollouts.jsonl.gz")),
    )


def test_what_was_logged_is_read_back(tmp_path):
    write(tmp_path, range(3))
    metrics, rollouts = both(tmp_path)
    assert metrics[2] == {"step": 2, "reward": 2 / 7, "seconds/step": 0.1}
    assert [record["step"] for record in rollouts] == [0, 0, 1, 1, 2, 2]
    assert rollouts[2] == {"step": 1, "text": "a 1\n", "reward": 1.0}
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_without_rollouts_there_is_no_file(tmp_path):
    write(tmp_path, range(2), keep_rollouts=False)
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl"}


def test_reading_what_is_not_there():
    assert read_metrics("/nowhere/metrics.jsonl") == []
    assert list(read_rollouts("/nowhere/rollouts.jsonl.gz")) == []


@pytest.mark.parametrize("resumed", [0, 1, 3, 5])
def test_a_resumed_run_leaves_the_same_files_as_a_straight_one(tmp_path, resumed):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    for folder in (straight, killed):
        folder.mkdir()
        write(folder, range(5))
    write(killed, range(resumed, 5))
    assert both(killed) == both(straight)
    assert (killed / "metrics.jsonl").read_bytes() == (straight / "metrics.jsonl").read_bytes()


def test_metrics_cut_off_anywhere_in_the_last_line(tmp_path):
    write(tmp_path, range(3))
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for cut in range(last, len(whole) + 1):
        path.write_bytes(whole[:cut])
        kept = 3 if cut >= len(whole) - 1 else 2  # without its line end it is whole, too
        assert [record["step"] for record in read_metrics(path)] == list(range(kept))
    path.write_bytes(whole[: last + 9])
    write(tmp_path, range(2, 4))
    assert [record["step"] for record in both(tmp_path)[0]] == [0, 1, 2, 3]


def test_rollouts_cut_off_anywhere_in_the_last_member(tmp_path):
    path = tmp_path / "rollouts.jsonl.gz"
    write(tmp_path, range(2))
    before = path.stat().st_size
    expected = list(read_rollouts(path))
    Log.rollouts(_opened(tmp_path), 2, [{"text": "last"}, {"text": "and least"}])
    whole = path.read_bytes()
    for cut in range(before, len(whole)):
        path.write_bytes(whole[:cut])
        found = list(read_rollouts(path))
        assert found[:4] == expected and len(found) <= 6
        # After a power cut a file may have its length but not its bytes.
        path.write_bytes(whole[:cut] + b"\0" * (len(whole) - cut))
        assert list(read_rollouts(path))[:4] == expected
    path.write_bytes(whole[:-5])
    write(tmp_path, range(2, 3))
    assert [record["step"] for record in both(tmp_path)[1]] == [0, 0, 1, 1, 2, 2]


def _opened(folder) -> Log:
    """A log that appends to the files as they are."""
    log = object.__new__(Log)
    log.rollouts_path, log.keep_rollouts = folder / "rollouts.jsonl.gz", True
    return log


def test_garbage_after_the_last_member_is_left_out(tmp_path):
    write(tmp_path, range(2))
    with open(tmp_path / "rollouts.jsonl.gz", "ab") as file:
        file.write(b"\0\0not gzip")
    assert len(list(read_rollouts(tmp_path / "rollouts.jsonl.gz"))) == 4


def test_a_kill_while_the_files_are_cut_back_loses_nothing(tmp_path, monkeypatch):
    write(tmp_path, range(4))
    expected = both(tmp_path)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(logs.os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            Log(tmp_path, 2, True)
    assert both(tmp_path) == expected
    Log(tmp_path, 4, True)
    assert both(tmp_path) == expected


def test_numbers_are_python_s(tmp_path):
    Log(tmp_path, 0, False).metrics(
        0,
        {"a": np.float32(0.5), "b": np.arange(2), "c": np.int64(3), "d": {4: 1}, "e": np.bool_(1)},
    )
    record = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert record == {"step": 0, "a": 0.5, "b": [0, 1], "c": 3, "d": {"4": 1}, "e": True}


def test_members_are_readable_by_any_gzip(tmp_path):
    write(tmp_path, range(3))
    text = gzip.decompress((tmp_path / "rollouts.jsonl.gz").read_bytes()).decode()
    assert len([json.loads(line) for line in text.splitlines()]) == 6


def test_comparable_leaves_out_what_the_machine_decides():
    record = {
        "step": 3, "reward": 0.5, "compiles": 0, "tokens_per_second": 9.0, "seconds/step": 1.0,
        "eval/pass@1": 0.1, "allocation": {"8": 2},
    }  # fmt: skip
    assert comparable(record) == {
        "step": 3, "reward": 0.5, "eval/pass@1": 0.1, "allocation": {"8": 2},
    }  # fmt: skip


# --- time and compilations -----------------------------------------------------------------------


def test_phases_nest_without_counting_twice(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(logs.time, "perf_counter", lambda: now[0])
    clock = Clock()

    def wait(seconds):
        now[0] += seconds

    wait(100)
    with clock("plan"):
        wait(1)
        with clock("sample"):
            wait(5)
        wait(2)
    wait(100)
    with pytest.raises(KeyError), clock("sample"):
        wait(0.5)
        raise KeyError
    with clock("plan"):
        wait(4)
    assert clock.seconds == {"plan": 7.0, "sample": 5.5}


def test_compilations_are_counted_until_closed():
    counter = Compiles()
    function = jax.jit(lambda x: jnp.sin(x) * 3 + 1)
    with jax.numpy_rank_promotion("allow"):
        function(np.ones(3, np.float32))
        first = counter.count
        assert first >= 1
        function(np.zeros(3, np.float32))
        assert counter.count == first
        function(np.zeros(4, np.float32))
        assert counter.count > first
        last = counter.count
        counter.close()
        function(np.zeros(5, np.float32))
        assert counter.count == last


def test_what_was_compiled_is_named_since_the_last_time():
    counter = Compiles()

    def some_function(x):
        return x * 2.5

    counter.take()
    jax.jit(some_function)(np.ones(3, np.float32))
    found = counter.take()
    assert found.names == ("jit(some_function)",) and found.seconds > 0 and found.cached == 0
    assert found.metrics() == {
        "compiles": 1,
        "compiles_cached": 0,
        "seconds/compile": found.seconds,
        "compiles_of": ["jit(some_function)"],
    }
    nothing = counter.take()
    assert nothing.metrics() == {"compiles": 0, "compiles_cached": 0, "seconds/compile": 0}
    counter.close()


def test_what_comes_out_of_the_persistent_cache_counts_too(tmp_path):
    # A warm cache must not hide that a step compiles: on the next machine it would.
    names = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    hits = []

    def heard(event, **_):
        hits.append(event == "/jax/compilation_cache/cache_hits")

    jax.monitoring.register_event_listener(heard)
    try:
        for name, value in names.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()

        def counted() -> int:
            counter = Compiles()
            jax.jit(lambda x: jnp.cos(x) * 5 - 2)(np.ones(7, np.float32))
            counter.close()
            return counter.count

        cold, missed = counted(), sum(hits)
        jax.clear_caches()
        warm = counted()
        assert cold >= 1 and missed == 0
        assert warm >= 1 and sum(hits) >= 1
    finally:
        jax.monitoring.unregister_event_listener(heard)
