"""A run that was killed anywhere goes on to the bit, and no step after the first compiles.

The runs are processes of their own (tiny/run.py) on a random policy and a task that it solves now
and then. A persistent compilation cache saves most of their time; what comes out of it counts as
compiled in `compiles` (test_log.py).
"""

from __future__ import annotations

import gzip
import json
import random
import signal

import pytest
from tiny.runs import STEPS, compiled

XRPO = {"algorithm.name": "xrpo", "algorithm.min_similarity": 0.0, "algorithm.capacity": 8}


@pytest.fixture(scope="module")
def straight(runs):
    """XRPO's ten steps in one go."""
    runs.finish("straight", XRPO)
    return "straight"


def test_the_straight_run_is_worth_comparing(runs, straight):
    metrics = runs.metrics(straight)
    assert [record["step"] for record in metrics] == list(range(STEPS + 1))
    assert [record["step"] for record in metrics if "eval/pass@1" in record] == [0, 4, 8, 10]
    assert metrics[-2]["corpus"] >= 2 and max(r.get("seeded", 0) for r in metrics) > 0
    assert sum(record.get("gradient_norm", 0) > 0 for record in metrics) >= 5
    kinds = {record["kind"] for record in runs.rollouts(straight)}
    assert kinds == {"plain", "seeded"} and len(runs.rollouts(straight)) == 16 * STEPS
    tree = runs.tree(straight)
    assert (tree["ledger"]["seeder"]["prompt"] >= 0).sum() >= 2
    assert sorted(path.name for path in (runs.folder / straight / "checkpoints").iterdir()) == [
        "10",
        "9",
    ]


def test_three_steps_and_a_kill_and_seven_in_fresh_processes(runs, straight):
    # The fourth step's metrics are being written: they must not be there twice.
    at = 1 + [i for i, line in enumerate(runs.trace(straight)) if line == "open metrics.jsonl"][3]
    assert runs.run("seven", XRPO, at=at) == -signal.SIGKILL
    assert runs.latest("seven") == 3 and len(runs.metrics("seven")) == 3
    runs.finish("seven", XRPO, fresh=True)
    runs.assert_same("seven", straight)
    # No step after the first of the resumed run compiles: the fourth of all.
    assert not any(compiled(runs.metrics("seven"))[4:])


# Where in the writing of a checkpoint a kill falls: with all files there, before the rename that
# makes it whole, and (that is what the delay is for) among the writes of Orbax's own threads.
PARTIAL = "checkpoints/3.orbax-checkpoint-tmp"
WRITES = (
    (f"os.rename {PARTIAL}/default.orbax-checkpoint-tmp", 0.0),
    (f"os.rename {PARTIAL}", 0.0),
    (f"os.mkdir {PARTIAL}/default.orbax-checkpoint-tmp/array_metadatas", 0.004),
)


def test_kills_while_a_checkpoint_is_written(runs, straight):
    """One after the other in one run: each leaves its debris for the next."""
    for at, delay in WRITES:
        ended = -signal.SIGALRM if delay else -signal.SIGKILL
        assert runs.run("writes", XRPO, at=at, delay=delay) == ended
        # Within the delay the checkpoint may have become whole.
        assert runs.latest("writes") in ((0, 3) if delay else (0,))
    # While an old one is deleted for the new: half of it is left.
    assert runs.run("writes", XRPO, at="os.remove manifest.ocdbt") == -signal.SIGKILL
    runs.finish("writes", XRPO)
    runs.assert_same("writes", straight)
    left = {path.name for path in (runs.folder / "writes" / "checkpoints").iterdir()}
    assert left == {"9", "10"}


def test_kills_at_random_moments(runs, straight):
    draw = random.Random(0)
    length = len(runs.trace(straight))
    statuses = []
    for _ in range(5):
        at, delay = draw.randint(1, length // 2), draw.choice([0.0, 0.0, 0.01, 0.05])
        statuses.append(runs.run("random", XRPO, at=at, delay=delay))
        if statuses[-1] == 0:
            break
    assert sum(status < 0 for status in statuses) >= 3
    runs.finish("random", XRPO)
    runs.assert_same("random", straight)


def test_asked_to_stop_it_finishes_the_step_and_a_run_may_be_prolonged(runs, straight):
    short = XRPO | {"train.steps": 6}
    at = 1 + [i for i, line in enumerate(runs.trace(straight)) if line == "open metrics.jsonl"][4]
    assert runs.run("longer", short, at=at, by="SIGTERM") == 0
    assert runs.latest("longer") == 5  # no multiple of checkpoint.every
    assert "stopped after 5 of 6 steps; the same command goes on" in runs.output("longer")
    runs.finish("longer", short)
    assert [record["step"] for record in runs.metrics("longer")] == list(range(7))
    runs.finish("longer", XRPO)  # its evaluation after the sixth step was not to be one of ten
    runs.assert_same("longer", straight)


def test_a_run_ends_with_its_tokens_and_may_be_given_more(runs, straight):
    spent = [record["decoded_tokens_total"] for record in runs.metrics(straight)[:-1]]
    budget = XRPO | {"train.tokens": spent[3]}
    runs.finish("tokens", budget)
    metrics = runs.metrics("tokens")
    assert [record["step"] for record in metrics] == [0, 1, 2, 3, 4]
    assert "eval/pass@1" in metrics[-1] and "reward" not in metrics[-1]
    assert f"ended after 4 steps: train.tokens={spent[3]} are decoded" in runs.output("tokens")
    more = XRPO | {"train.tokens": spent[5]}
    at = 1 + [i for i, line in enumerate(runs.trace("tokens")) if line == "open metrics.jsonl"][1]
    assert runs.run("tokens", more, at=at) == -signal.SIGKILL
    # It has made more than this by now: the end, which it went beyond, is evaluated all the same.
    reached = runs.latest("tokens")
    runs.finish("tokens", budget)
    last = runs.metrics("tokens")[-1]
    assert last["step"] == reached and "eval/pass@1" in last and "reward" not in last
    runs.finish("tokens", XRPO)
    runs.assert_same("tokens", straight)


def test_a_finished_run_started_again_changes_nothing(runs, straight):
    def contents():
        return {
            path: path.read_bytes()
            for path in (runs.folder / straight).rglob("*")
            # The policy's file header lists its metadata in any order.
            if path.is_file() and path.name not in ("curve.png", "model.safetensors")
        }

    before = contents()
    runs.finish(straight, XRPO)
    assert contents() == before


@pytest.mark.parametrize("name", ["xrpo", "grpo", "dapo"])
def test_no_step_after_the_first_compiles(runs, straight, name):
    if name == "xrpo":
        metrics = runs.metrics(straight)
        assert max(record["seeded"] for record in metrics[:-1]) > 0  # both lengths were used
    else:
        runs.finish(name, {"algorithm.name": name})
        metrics = runs.metrics(name)
    assert len(compiled(metrics)) == STEPS
    assert not any(compiled(metrics)[1:])


def test_a_step_that_compiles_after_the_first_is_warned_of(runs):
    """By name, on the terminal and in the metrics; what a run compiles before that is counted."""
    runs.finish("growing", {"algorithm.name": "grpo", "task.name": "growing", "train.steps": 3})
    said, metrics = runs.output("growing"), runs.metrics("growing")
    assert "WARNING, step 1: compiled jit(late) in " in said and said.count("WARNING") == 1
    assert metrics[1]["compiles"] == 1 and metrics[1]["compiles_of"] == ["jit(late)"]
    assert metrics[1]["seconds/compile"] > 0
    assert metrics[2]["compiles"] == metrics[2]["seconds/compile"] == 0
    assert f"compiled {metrics[0]['compiles_warm_up']} functions in " in said
    assert metrics[0]["compiles_warm_up"] >= 8 and "compiles_warm_up" not in metrics[1]


def test_no_run_warned_of_what_it_compiled(runs, straight):
    assert "WARNING" not in runs.output(straight)


def test_traces_and_the_cache_of_compiled_functions_change_nothing(runs, straight):
    """Steps 3 and 4 are recorded, and the phases in them, with everything compiled anew."""
    runs.finish("traced", XRPO | {"profile.steps": "3:5", "compile.cache_dir": "no"})
    runs.assert_same("traced", straight)
    assert "from the cache" not in runs.output("traced")
    (file,) = (runs.folder / "traced" / "profile").rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    steps = [event["args"]["step_num"] for event in events if event.get("name") == "step"]
    assert sorted(steps) == ["3", "4"]
    names = {event.get("name") for event in events}
    assert {"plan", "sample", "verify", "annotate", "score", "update", "evaluate"} <= names
