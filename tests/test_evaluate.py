"""Held-out metrics: golden numbers, voting rules, intervals, and a whole evaluation."""

import dataclasses
import itertools
from fractions import Fraction
from math import comb

import numpy as np
import pytest
from fakes import Draw, Texts, encode, tools, tools_for

from xrpo_jax import rng
from xrpo_jax.evaluate import cons_at_k, consensus, evaluate, interval, pass_at_k, summarise
from xrpo_jax.tasks import arithmetic

# --- pass@k --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "n, correct, k, expected",
    [(4, 2, 2, 0.833333), (10, 3, 5, 0.916667), (32, 1, 8, 0.25), (8, 0, 8, 0), (8, 1, 8, 1)],
)
def test_pass_at_k_of_the_specification(n, correct, k, expected):
    assert pass_at_k(n, correct, k) == pytest.approx(expected, abs=5e-7)


def test_pass_at_k_is_the_share_of_subsets_with_a_success():
    for n in range(1, 13):
        for correct in range(n + 1):
            assert pass_at_k(n, correct, 1) == pytest.approx(correct / n)
            for k in range(1, n + 1):
                expected = 1 - Fraction(comb(n - correct, k), comb(n, k))
                assert pass_at_k(n, correct, k) == pytest.approx(float(expected), abs=1e-12)


def test_pass_at_k_of_many_samples_is_stable():
    assert pass_at_k(100_000, 1, 50_000) == pytest.approx(0.5)
    assert pass_at_k(4096, 4096, 4096) == 1.0


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((4, 2, 5), "pass@5 of 4 samples; allowed: k from 1 to 4"),
        ((4, 2, 0), "pass@0 of 4 samples"),
        ((4, 5, 2), "5 of 4 samples correct; allowed: 0 to 4"),
        ((4, -1, 2), "-1 of 4 samples correct"),
    ],
)
def test_pass_at_k_says_what_is_wrong(arguments, message):
    with pytest.raises(ValueError, match=message):
        pass_at_k(*arguments)


# --- cons@k --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answers, right, expected",
    [
        (["7", "7", "9"], "7", 1),
        (["9", "7", "9"], "7", 0),
        ([None, None, None, "7"], "7", 1),  # unparsed answers never win over parsed ones
        ([None, None], "7", 0),
        (["9", "7"], "7", 0),  # a tie goes to the first that appeared
        (["7", "9"], "7", 1),
        ([None, "9", "7", "7", "9"], "9", 1),
        (["7"], "7", 1),
    ],
)
def test_the_most_frequent_answer_counts(answers, right, expected):
    correct = [answer == right for answer in answers]
    assert consensus(answers, correct) == expected
    assert cons_at_k(answers, correct, len(answers)) == expected


def test_cons_at_k_is_the_mean_over_subsets_in_the_order_drawn():
    answers = ["1", "2", None, "2", "1", "3"]
    correct = [answer == "2" for answer in answers]
    exact = np.mean(
        [
            consensus([answers[i] for i in chosen], [correct[i] for i in chosen])
            for chosen in itertools.combinations(range(6), 3)
        ]
    )
    assert cons_at_k(answers, correct, 3, draws=4000) == pytest.approx(exact, abs=0.03)
    assert cons_at_k(answers, correct, 3, seed=1) == cons_at_k(answers, correct, 3, seed=1)
    assert len({cons_at_k(answers, correct, 3, seed=seed) for seed in range(9)}) > 1


@pytest.mark.parametrize("k", [0, 3])
def test_cons_at_k_says_what_is_wrong(k):
    with pytest.raises(ValueError, match=f"cons@{k} of 2 samples; allowed: k from 1 to 2"):
        cons_at_k(["1", "2"], [True, False], k)


# --- intervals -----------------------------------------------------------------------------------


def test_intervals_resample_problems():
    draw = np.random.default_rng(0)
    inside, widths = 0, {}
    for problems in (25, 100):
        for trial in range(60):
            values = (draw.random(problems) < 0.4).astype(float)
            low, high = interval(values, seed=trial)
            inside += low <= 0.4 <= high
            widths.setdefault(problems, []).append(high - low)
    assert inside / 120 > 0.88
    assert np.mean(widths[25]) / np.mean(widths[100]) == pytest.approx(2, rel=0.15)
    expected = 2 * 1.96 * (0.24 / 100) ** 0.5
    assert np.mean(widths[100]) == pytest.approx(expected, rel=0.1)


def test_intervals_are_seeded_and_of_equal_values_a_point():
    values = np.random.default_rng(0).random(30)
    assert interval(values, seed=3) == interval(values, seed=3) != interval(values, seed=4)
    assert interval(np.full(9, 0.25)) == (0.25, 0.25)
    low, high = interval(values)
    assert low < values.mean() < high


# --- a whole evaluation --------------------------------------------------------------------------

WORDS = ("a", "b", "c", "d", "e", "f", "g")
TASK = Texts(prompts=WORDS, answers=tuple("ABCDEFG"), levels=("easy", "hard"))
TOOLS = tools_for(TASK, 9)
SAYS = {  # prompt -> its completions by index; 9 characters and more are cut off at 8 tokens
    0: ("A", "A", "x", "x"),
    1: ("x", "x", "x", "B"),
    2: ("", "", "", "C"),
    3: ("123456789",) * 4,
    4: ("x", "E", "E", "E"),
    5: ("x", "y", "z", "F"),
    6: ("G", "G", "G", "G"),
}


def run(seed: int = 2, step: int = 6):
    draw = Draw(says=lambda text, prompt, index: SAYS[prompt][index])
    metrics, records = evaluate(
        TOOLS, draw, None, samples=4, max_new_tokens=8, seed=seed, step=step
    )
    return metrics, records, draw.calls


def test_evaluation_counts_by_hand():
    metrics, records, _ = run()
    rates = [0.5, 0.25, 0.25, 0, 0.75, 0.25, 1]
    assert metrics["pass@1"] == pytest.approx(np.mean(rates))
    assert (metrics["pass@1_low"], metrics["pass@1_high"]) == interval(np.array(rates))
    assert metrics["pass@4"] == pytest.approx(6 / 7)
    # Right by vote: a (tie, first), c (the others unparsed), e, g.
    assert metrics["cons@4"] == pytest.approx(4 / 7)
    assert metrics["pass@1/easy"] == pytest.approx(np.mean(rates[::2]))
    assert metrics["pass@1/hard"] == pytest.approx(np.mean(rates[1::2]))
    assert metrics["truncated"] == pytest.approx(4 / 28)
    lengths = [min(len(text) + 1, 8) for texts in SAYS.values() for text in texts]
    assert metrics["length"] == pytest.approx(np.mean(lengths))
    assert len(records) == 28
    assert records[5] == {
        "prompt": 1, "level": "hard", "question": "b",
        "text": "x", "correct": False, "status": "wrong", "reason": "", "answer": "x",
        "length": 2, "stopped": True,
    }  # fmt: skip


def test_evaluation_draws_all_problems_in_one_call():
    """In parts each would wait for its longest row."""
    (call,) = run()[2]
    assert call["prompts"] == list(WORDS) and len(call["row"]) == 28
    coordinates = set(zip(call["prompt"].tolist(), call["index"].tolist(), strict=True))
    assert coordinates == {(prompt, index) for prompt in range(7) for index in range(4)}


def test_evaluation_has_random_numbers_of_its_own():
    key = run()[2][0]["step_key"]
    assert (key == np.array(rng.key(2, 6, "evaluate"))).all()
    assert (key != np.array(rng.key(2, 6, "rollout"))).any()
    assert (key != run(step=7)[2][0]["step_key"]).any()


def test_one_sample_has_neither_pass_at_k_nor_votes():
    one = {"correct": True, "status": "correct", "answer": "1", "length": 2, "stopped": True}
    records = [one] * 3
    names = ("pass@1", "pass@1/a", "length", "truncated")
    assert set(summarise(records, ["a"] * 3, 1)) == {
        f"{name}{suffix}" for name in names for suffix in ("", "_low", "_high")
    }


def test_votes_are_over_values_not_spellings():
    task = arithmetic.make(size=3)
    first, second = task.problems[0].answer.split()
    spellings = [f"= {first} {second}", f"= {first:0>2} {second:0>2}", "= 1 1", "nonsense"]
    tools_ = tools_for(arithmetic.Arithmetic(problems=task.problems[:1]), 99)
    draw = Draw(says=lambda text, prompt, index: spellings[index], new=30)
    metrics, _ = evaluate(tools_, draw, None, samples=4, max_new_tokens=30, seed=0, step=0)
    assert metrics["cons@4"] == 1.0 and metrics["pass@1"] == 0.5


def test_fakes_agree_with_the_record_they_stand_for():
    assert tools(["a"]).decode(encode("abc")) == "abc"


def test_a_verifier_that_raises_does_not_end_the_evaluation():
    """It counts as not correct, and apart from wrong answers."""

    @dataclasses.dataclass(frozen=True)
    class Raising(Texts):
        def rewards(self, i, completion):
            if completion == "boom":
                raise RuntimeError("scorer")
            return super().rewards(i, completion)

        def answer(self, i, completion):
            assert completion != "boom"
            return completion

    task = Raising(prompts=("a", "b"), answers=("x", "y"))
    draw = Draw(says=lambda text, prompt, index: "boom" if prompt else "x")
    metrics, records = evaluate(
        tools_for(task, 9), draw, None,
        samples=2, max_new_tokens=8, seed=0, step=0,
    )  # fmt: skip
    assert metrics["pass@1"] == 0.5 and metrics["verifier_failed"] == 0.5
    assert [record["status"] for record in records] == ["correct"] * 2 + ["crashed"] * 2
    assert records[2]["answer"] is None
