"""The discounted tracker of SPO and SKPO against golden numbers and by hand."""

import dataclasses

import numpy as np
import pytest
from fakes import progress, rollout

from xrpo_jax.explore.curriculum import Prioritized
from xrpo_jax.explore.values import Discounted, discount
from xrpo_jax.types import Progress


def step_of(*rows, prompts=(0,)) -> Progress:
    """One step that drew `rows`, a tuple a prompt."""
    return Progress(prompts=prompts, rollouts=rows, batch=len(rows))


def asks(*answers):
    """A policy that gives `answers` in turn, and what it was asked."""
    asked, queue = [], list(answers)

    def logp_of(texts):
        asked.append([(prompt.tolist(), tokens.tolist()) for prompt, tokens in texts])
        return [np.array(queue.pop(0), np.float32) for _ in texts]

    return logp_of, asked


def unasked(texts):
    raise AssertionError("the policy was asked about nothing")


# --- golden numbers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rho, after, counts",
    [
        (0.96, [-0.5, -0.117347, 0.270405, -0.066900], [1, 1.96, 2.8816, 3.766336]),
        (0.875, [-0.5, -0.1, 0.316568, -0.081121], None),
    ],
)
def test_golden_discounted_means(rho, after, counts):
    """SKPO's, of rewards from -1 to 1."""
    part = Discounted(low=rho, high=rho)
    memory, seen, counted = part.init(2, 4), [], []
    assert 2 * part.read(memory, 2)[0] - 1 == 0  # the first baseline
    for reward in (-0.5, 0.25, 1, -1):
        observed = {0: (reward + 1) / 2}
        memory = part.update(memory, observed, {0: rollout(True)}, {}, unasked)
        seen.append(2 * part.read(memory, 2)[0] - 1)
        counted.append(memory["count"][0])
    np.testing.assert_allclose(seen, after, atol=5e-7)
    if counts:
        np.testing.assert_allclose(counted, counts, atol=1e-12)
        np.testing.assert_allclose(
            1 / np.array(counted), [1, 0.510204, 0.347029, 0.265510], atol=5e-7
        )
    assert memory["value"][1] == 0.5 and memory["count"][1] == 0  # never drawn


def test_golden_offline_estimates():
    """SPO's: 3 of 8 correct, then one success under the same policy."""
    part = Discounted(offline=8)
    memory = part.begin(part.init(3, 4), np.array([3, 0, 8]), np.array([8, 8, 8]))
    np.testing.assert_allclose(memory["value"], [0.388889, 0.5 / 9, 8.5 / 9], atol=5e-7)
    np.testing.assert_allclose(memory["value"] * memory["count"], [3.111111, 4 / 9, 68 / 9], 1e-6)
    memory = part.observe(memory, step_of((rollout(True),)), {(0, 0): np.zeros(2)}, unasked)
    assert memory["value"][0] == pytest.approx(0.459293, abs=5e-7)
    a = memory["value"][0] * memory["count"][0]
    assert a == pytest.approx(3.986667, abs=5e-7)
    assert memory["count"][0] - a == pytest.approx(4.693333, abs=5e-7)
    assert memory["count"].tolist()[1:] == [8, 8]


@pytest.mark.parametrize(
    "moved, rho",
    [(0, 0.96), (0.003, 0.96), (0.006, 0.933033), (0.0116, 0.875), (0.06, 0.875)],
)
def test_golden_forgetting(moved, rho):
    part = Discounted()
    logp_of, _ = asks([-1 + 2 * moved, -1])  # the mean of both tokens is D
    memory = part.init(1, 4)
    for _ in range(2):
        memory = part.observe(
            memory, step_of((rollout(True),)), {(0, 0): np.array([-1, -1])}, logp_of
        )
    assert memory["rho"][0] == pytest.approx(rho, abs=1e-5)


def test_golden_weights_of_the_draw():
    weights = Prioritized(floor=0.05).weight(np.array([0, 0.25, 0.5, 0.75, 1]))
    np.testing.assert_allclose(weights, [0.05, 0.483013, 0.55, 0.483013, 0.05], atol=5e-7)


def test_the_first_observation_overwrites():
    mean, count = discount(np.array([0.5]), np.array([0.0]), np.array([0.125]), np.array([0.9]))
    assert mean == [0.125] and count == [1.0]


# --- what is stored, and what is asked -----------------------------------------------------------


def test_stored_responses_are_looked_at_again_in_one_call():
    part = Discounted(half=0.5, low=0.1)
    first = rollout(True, prompt=1, text="abc"), rollout(False, prompt=2, slot=1, text="z")
    old = {(0, 0): np.float32([-1, -0.75, -1, -1]), (1, 0): np.float32([-3, -3])}
    drawn = step_of(first[:1], first[1:], prompts=(1, 2))
    one = part.observe(part.init(4, 5), drawn, old, unasked)
    assert one["rho"].tolist()[1:3] == [0.96, 0.96] and np.isnan(one["rho"][[0, 3]]).all()
    assert one["length"].tolist() == [0, 4, 2, 0]
    assert one["tokens"][1].tolist() == [97, 98, 99, 1, 0]
    assert one["logp"][1].tolist() == [-1, -0.75, -1, -1, 0]

    # The prompt is what the row of now was trained under, the response what was stored.
    rows = [
        dataclasses.replace(
            rollout(True, prompt=prompt, slot=slot, text="d"), trained_prompt=np.int32([prompt])
        )
        for slot, prompt in enumerate((3, 2, 1))
    ]
    logp_of, asked = asks([-0.5, -0.25, -1.5, -2], [-3, -2.9])
    two = part.observe(
        one,
        step_of(*((row,) for row in rows), prompts=(3, 2, 1)),
        {(2, 0): np.float32([-5, -6])},
        logp_of,
    )
    assert asked == [[([1], [97, 98, 99, 1]), ([2], [122, 1])]]
    moved = np.array([np.mean([0.5, 0.5, 0.5, 1]), 0.05])
    np.testing.assert_allclose(two["rho"][[1, 2, 3]], [*2 ** (-moved / 0.5), 0.96], rtol=1e-6)
    assert np.isnan(two["rho"][0])
    assert two["length"].tolist() == [0, 2, 2, 0]  # only prompt 1's was trained on
    assert two["logp"][1].tolist()[:2] == [-5, -6] and two["tokens"][1].tolist()[:2] == [100, 1]
    assert one["length"].tolist() == [0, 4, 2, 0] and one["count"].tolist() == [0, 1, 1, 0]


def test_only_rows_that_were_trained_on_are_stored():
    part = Discounted()
    rows = tuple(rollout(i == 1, index=i, text="ab"[i]) for i in range(2))
    memory = part.observe(part.init(1, 4), step_of(rows), {(0, 1): np.float32([-1, -2])}, unasked)
    assert memory["tokens"][0].tolist() == [98, 1, 0, 0] and memory["value"][0] == 0.5
    again = part.observe(memory, step_of(rows), {}, asks([-1, -2])[0])
    assert again["tokens"][0].tolist() == [98, 1, 0, 0]
    assert again["count"][0] == pytest.approx(1.96)


def test_a_longer_response_leaves_nothing_of_itself_in_a_shorter_one():
    part = Discounted()
    memory = part.init(1, 6)
    for text, length in (("abcde", 6), ("z", 2)):
        row = rollout(True, text=text)
        logp = {(0, 0): np.full(length, -1.0)}
        memory = part.observe(memory, step_of((row,)), logp, asks(np.full(6, -1.0))[0])
    logp_of, asked = asks([-1, -1])
    part.observe(memory, step_of((row,)), logp, logp_of)
    assert asked == [[([7], [122, 1])]]


def test_a_constant_rate_stores_nothing_and_asks_nothing():
    part = Discounted(low=0.96, high=0.96)
    memory = part.init(2, 4)
    assert set(memory) == {"value", "count", "rho"}
    for _ in range(3):
        memory = part.observe(memory, progress([(1, 2), (0, 2)]), {(0, 0): np.zeros(2)}, unasked)
    np.testing.assert_allclose(memory["value"], [0.5, 0.0])
    assert memory["rho"].tolist() == [0.96, 0.96]


def test_what_could_not_be_graded_counts_for_nothing():
    part = Discounted()
    begun = part.observe(part.init(3, 4), progress([(1, 2), (1, 2), (1, 2)]), {}, unasked)
    failed = rollout(False, reward=float("nan"))
    rows = ((failed, failed), (failed, rollout(True, slot=1, index=1)), ())
    logp = {(0, 0): np.zeros(2), (1, 0): np.zeros(2)}
    after = part.observe(begun, step_of(*rows, prompts=(0, 1, 2)), logp, unasked)
    for name in begun:
        np.testing.assert_array_equal(after[name][[0, 2]], np.nan if name == "rho" else
                                      begun[name][[0, 2]])  # fmt: skip
    assert after["value"][1] == pytest.approx(0.5 + 0.5 / 1.96)
    assert after["length"].tolist() == [0, 2, 0]


def test_memory_keeps_its_shapes_and_types():
    part = Discounted()
    begun = part.init(2, 4)
    after = part.observe(begun, progress([(1, 2), (0, 2)]), {(1, 0): np.zeros(2)}, unasked)
    for memory in (after, part.begin(begun, np.array([1, 2]), np.array([8, 8]))):
        for name, values in begun.items():
            assert memory[name].shape == values.shape and memory[name].dtype == values.dtype
    assert begun["count"].tolist() == [0, 0]


def test_report():
    part = Discounted()
    memory = part.init(4, 4)
    assert part.report(memory) == {}
    memory = part.observe(memory, progress([(1, 2), (0, 2)]), {}, unasked)
    memory = part.observe(memory, progress([(2, 2)]), {}, unasked)
    found = part.report(memory)
    assert found["value_rho"] == pytest.approx(0.96)
    assert found["value_count"] == pytest.approx((1.96 + 1) / 2)
    assert found["value"] == pytest.approx((0.5 + 0.5 / 1.96) / 2)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"low": 0.97}, "rho_low=0.97, algorithm.rho_high=0.96; allowed: 0 to 1, in this order"),
        ({"high": 1.1}, "rho_high=1.1; allowed: 0 to 1"),
        ({"half": 0.0}, "rho_half=0.0; allowed: above 0"),
    ],
)
def test_settings_are_checked(given, message):
    with pytest.raises(ValueError, match=message):
        Discounted(**given)
