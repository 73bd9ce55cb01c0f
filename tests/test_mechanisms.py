"""Every algorithm in ten steps: its mechanism shows in its own metric, and it resumes to the bit.

The runs are processes of their own (tiny/runs.py), on a random policy and a task that it solves now
and then. What is asserted of the metrics is what the algorithm exists for.
"""

from __future__ import annotations

import signal

import numpy as np
import pytest
from tiny.runs import STEPS, compiled

from xrpo_jax.algorithms import base

# The algorithms of test_resume.py, and those whose parts the others share.
ELSEWHERE = {"xrpo", "grpo", "dapo", "xrpo_token", "drgrpo", "rloo", "gspo", "gspo_token", "cispo"}


def expo(metrics, rollouts, ledger):
    """The coefficient follows the batch's accuracy, the draw what was seen of each prompt."""
    for record in metrics:
        expected = 0.02 * 0.5 * (np.tanh(record["accuracy"]) + 1)
        assert record["beta_effective"] == pytest.approx(expected, rel=1e-5)
    assert len({record["beta_effective"] for record in metrics}) > 2
    first, last = metrics[0]["kl_reference"], metrics[-1]["kl_reference"]
    assert 0 <= first < last  # 0 in the first of the step's two updates
    evenness = [record["draw_evenness"] for record in metrics]
    assert evenness[-1] < evenness[0] < 1
    assert sum(metrics[-1]["value_histogram"]) == len(ledger["values"]["mean"])
    assert np.ptp(ledger["values"]["mean"]) > 0.3


def tepo(metrics, rollouts, ledger):
    """Two updates a batch: the second sees entropies that fell."""
    assert all(record["mask_share"] < 1 for record in metrics)
    assert sum(record["mask_share"] > 0 for record in metrics) >= 5
    assert max(record["masked_kl"] for record in metrics) > 0


def reco(metrics, rollouts, ledger):
    """Rare answers weigh more than frequent ones, and moving tokens are braked."""
    for record in metrics:
        assert 1 <= record["response_weight_low"] < record["response_weight_high"] <= 1000
    assert any(abs(record["variance_ratio"] - 1) > 1e-3 for record in metrics)


def grpo_entropy(metrics, rollouts, ledger):
    """A bonus that outweighs the reward brings the policy near the largest entropy there is."""
    assert metrics[0]["entropy"] < metrics[-1]["entropy"] - 0.05


def spo(metrics, rollouts, ledger):
    """A rollout a prompt against a tracker, which the first policy's samples began."""
    assert all(record["allocation"] == {"1": 16} for record in metrics)
    assert metrics[0]["decoded_tokens_total"] > metrics[0]["decoded_tokens"]
    values = ledger["values"]
    rates = values["rho"][np.isfinite(values["rho"])]
    assert (rates >= 0.875).all() and (rates <= 0.96).all() and np.ptp(rates) > 0
    assert len(np.unique(values["value"])) > 3 and (values["count"] > 0).all()
    assert any(abs(record["tracker_gap"]) > 0.01 for record in metrics)


def skpo(metrics, rollouts, ledger):
    """One of four segments is kept, and rewarded by what came of it."""
    assert {row["kind"] for row in rollouts} == {"upstream", "downstream"}
    for record in metrics:
        assert 0 < record["kept_share"] < 0.5 and 0 < record["segment_share"] <= 0.5
        assert -1 <= record["upstream_reward"] <= 1
        assert record["trained_rows"] == 4 * 5
    assert max(record["upstream_reward"] for record in metrics) > -1
    seen = ledger["values"]["answer_count"] > 0
    assert seen.any() and not seen.all()
    assert len(np.unique(ledger["values"]["answer_length"][seen])) > 3
    assert (ledger["values"]["length"][seen] > 0).any()  # segments are stored for the next visit
    assert min(record["value_rho"] for record in metrics) < 0.96  # and the policy moved from them


def critique_grpo(metrics, rollouts, ledger):
    """Prompts that only fail are answered again, some of them rightly."""
    assert all(0 <= record["gated"] <= 1 for record in metrics)
    assert max(record.get("rescued_share", 0) for record in metrics) > 0
    assert all(record["trained_rows"] <= 16 for record in metrics)
    refined = [row for row in rollouts if row["kind"] == "refined"]
    assert refined and {row["round"] for row in refined} == {1}


def treepo(metrics, rollouts, ledger):
    """Leaves share segments, which are decoded once."""
    for record in metrics:
        assert record["rollouts"] == record["trained_rows"] == 32 and record["drafts"] > 0
        assert 0.3 < record["reused_tokens"] < 0.6
        assert record["tree_branches"] > 1.5 and 2 < record["tree_depth"] <= 3
        assert record["shared_groups"] > 0.8
        leaves = record["length"] * record["rollouts"]
        assert record["reused_tokens"] == pytest.approx(1 - record["decoded_tokens"] / leaves)
        assert record["sampler_gap_max"] < 1e-4  # with the cache of another row, too
    assert max(record["tree_restarts"] for record in metrics) > 0
    assert {record["kind"] for record in rollouts} == {"plain"}


MECHANISMS = {
    "spo": (spo, {"offline": 2, "rho_half": 2.0}),
    "skpo": (skpo, {"rho_low": 0.875, "rho_half": 0.5}),
    "critique_grpo": (critique_grpo, {"rollout.seeded_length": 58}),
    "treepo": (treepo, {"rollout.group": 8}),
    "expo": (expo, {"retention": 0.5}),
    "tepo": (tepo, {}),
    "reco": (reco, {"response_cap": 1000.0}),  # every answer of a random policy is rare
    "grpo_entropy": (grpo_entropy, {"coefficient": 10.0}),
}


def test_every_algorithm_is_here():
    assert set(MECHANISMS) | ELSEWHERE == set(base.names())


@pytest.mark.parametrize("name", MECHANISMS)
def test_it_shows_its_mechanism_and_resumes_to_the_bit(runs, name):
    check, given = MECHANISMS[name]
    settings = {"algorithm.name": name}
    settings |= {key if "." in key else f"algorithm.{key}": value for key, value in given.items()}
    runs.finish(name, settings)
    metrics = runs.metrics(name)
    assert [record["step"] for record in metrics] == list(range(STEPS + 1))
    assert not any(compiled(metrics)[1:])
    steps = [record for record in metrics if "reward" in record]
    assert sum(record["gradient_norm"] > 0 for record in steps) >= 5
    total = [record["decoded_tokens_total"] for record in steps]
    assert np.diff(total).tolist() == [record["decoded_tokens"] for record in steps[1:]]
    check(steps, runs.rollouts(name), runs.tree(name)["ledger"])

    opened = [i for i, line in enumerate(runs.trace(name)) if line == "open metrics.jsonl"]
    killed = f"{name}-killed"
    assert runs.run(killed, settings, at=1 + opened[5]) == -signal.SIGKILL
    assert runs.latest(killed) == 3
    runs.finish(killed, settings)
    runs.assert_same(killed, name)
