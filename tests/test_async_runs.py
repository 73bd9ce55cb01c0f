"""Whole runs whose rollouts are drawn one step ahead: resumed to the bit, on devices too."""

from __future__ import annotations

import signal

import pytest
from tiny.runs import STEPS, compiled

ASYNC = {
    "algorithm.name": "xrpo",
    "algorithm.min_similarity": 0.0,
    "algorithm.capacity": 8,
    "train.async_rollouts": 1,
    "train.importance": "token",
}
TREE = {"algorithm.name": "treepo", "algorithm.segment_length": 2, "train.async_rollouts": 1}


@pytest.fixture(scope="module")
def straight(runs):
    """Ten steps in one go."""
    runs.finish("straight", ASYNC)
    return "straight"


def opened(runs, name: str, number: int, file: str = "metrics.jsonl") -> int:
    """The event at which a file is opened for the time `number`, counted from 0."""
    return 1 + [i for i, line in enumerate(runs.trace(name)) if line == f"open {file}"][number]


def test_what_is_logged(runs, straight):
    metrics = runs.metrics(straight)[:-1]
    assert [record["staleness"] for record in metrics] == [0] + [1] * (STEPS - 1)
    assert all(0 < record["importance_mean"] <= 2 for record in metrics)
    # At first the sampler's numerics are all that the weights correct for.
    assert abs(metrics[0]["importance_mean"] - 1) < 1e-3 < metrics[0]["seconds/sample_ahead"]
    assert max(abs(record["importance_mean"] - 1) for record in metrics[1:]) > 1e-3
    assert not any(compiled(metrics)[1:])


def test_the_first_two_steps_are_drawn_by_one_policy(runs, straight):
    """With the ledger and the policy of the beginning; the third is not."""
    still = {"algorithm.name": "grpo", "optimizer.learning_rate": 1e-30}
    runs.finish("still", still)
    runs.finish("ahead", still | {"train.async_rollouts": 1, "optimizer.learning_rate": 0.01})
    drawn = [[r for r in runs.rollouts(name) if r["step"] < 3] for name in ("still", "ahead")]
    same = [[r for r in rows if r["step"] < 2] for rows in drawn]
    assert same[0] == same[1] and drawn[0] != drawn[1]


def test_kills_leave_nothing_behind(runs, straight):
    """While metrics, a checkpoint and rollouts are written, and at any moment of a draw."""
    for number, file, delay in (
        (2, "metrics.jsonl", 0.0),
        (1, "rollouts.jsonl.gz", 0.02),
        (3, "metrics.jsonl", 0.1),
    ):
        at = opened(runs, straight, number, file)
        ended = runs.run("killed", ASYNC, at=at, delay=delay)
        assert ended == (-signal.SIGALRM if delay else -signal.SIGKILL)
    assert 0 < runs.latest("killed") < STEPS
    runs.finish("killed", ASYNC)
    runs.assert_same("killed", straight)


def test_how_often_it_is_saved_and_where_it_stops_changes_nothing(runs, straight):
    every = ASYNC | {"checkpoint.every": 1}
    assert runs.run("often", every, at=opened(runs, straight, 4), by="SIGTERM") == 0
    assert 0 < runs.latest("often") < 7
    assert runs.run("often", every | {"train.steps": 7}) == 0  # which ends there, and goes on
    runs.finish("often", every)
    runs.assert_same("often", straight)


def test_a_budget_of_tokens_ends_it_and_more_goes_on(runs, straight):
    spent = [record["decoded_tokens_total"] for record in runs.metrics(straight)[:-1]]
    runs.finish("tokens", ASYNC | {"train.tokens": spent[3]})
    assert [record["step"] for record in runs.metrics("tokens")] == [0, 1, 2, 3, 4]
    runs.finish("tokens", ASYNC)
    runs.assert_same("tokens", straight)


def test_trees_whose_caches_are_kept(runs):
    runs.finish("tree", TREE)
    assert runs.run("tree_killed", TREE, at=opened(runs, "tree", 5)) == -signal.SIGKILL
    runs.finish("tree_killed", TREE)
    runs.assert_same("tree_killed", "tree")


@pytest.mark.parametrize("devices", [2, 8])
def test_on_several_devices(runs, devices):
    """Both threads have programs on all devices: they finish, the same each time."""
    split = ASYNC | {"mesh.cpu_devices": devices, "train.share": 1, "rollout.slots": 8}
    runs.finish(f"split_{devices}", split)
    assert runs.run(f"again_{devices}", split, at=opened(runs, f"split_{devices}", 4)) < 0
    runs.finish(f"again_{devices}", split)
    runs.assert_same(f"again_{devices}", f"split_{devices}")


def test_corrected_without_drawing_ahead(runs):
    """The gap between sampler and trainer alone: weights of nearly 1."""
    runs.finish("now", {"algorithm.name": "grpo", "train.importance": "sequence"})
    metrics = runs.metrics("now")[:-1]
    assert all(abs(record["importance_mean"] - 1) < 1e-3 for record in metrics)
    assert not any("staleness" in record for record in metrics)
