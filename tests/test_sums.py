"""The task `sums`: questions, splits that know the order of operands, and grading."""

import collections

import pytest

from xrpo_jax.tasks import sums
from xrpo_jax.types import text_of


def asked(task):
    return [text_of(task.prompt(i)) for i in range(len(task))]


def test_questions_and_answers_by_hand():
    for operator, operands, text, answer in (
        ("+", (7, 5), "What is 7 + 5? Answer with just the number.", 12),
        ("-", (62, 45), "What is 62 - 45? Answer with just the number.", 17),
        ("x", (12, 3), "What is 12 x 3? Answer with just the number.", 36),
        ("+", (10, 20, 33), "What is 10 + 20 + 33? Answer with just the number.", 63),
    ):
        problem = sums.Problem(level="harder", operator=operator, operands=operands)
        assert problem.text == text and problem.answer == answer


def test_levels_take_turns_and_a_small_one_leaves_the_rest():
    task = sums.make(size=900)
    counts = collections.Counter(task.level(i) for i in range(len(task)))
    assert set(counts) == set(task.levels) == set(sums.LEVELS)
    assert counts["one_digit"] < 170 and abs(counts["two_digit"] - counts["harder"]) <= 1
    assert len(set(asked(task))) == 900
    assert [task.level(i) for i in range(3)] == list(sums.LEVELS)
    few = sums.make(size=30, levels="two_digit,one_digit")
    assert collections.Counter(few.level(i) for i in range(30)) == {
        "two_digit": 15,
        "one_digit": 15,
    }


def test_what_is_held_out_is_not_trained_on_in_another_order():
    train, test = (sums.make(split=split, size=400).problems for split in ("train", "test"))
    seen = {(problem.operator, *sorted(problem.operands)) for problem in train}
    assert not seen & {(problem.operator, *sorted(problem.operands)) for problem in test}
    assert any(
        problem.operands[0] > problem.operands[-1] for problem in test if problem.operator == "+"
    )


def test_the_same_questions_every_time():
    assert asked(sums.make(size=50)) == asked(sums.make(size=50))
    assert asked(sums.make(size=50)) != asked(sums.make(size=50, seed=1))
    assert asked(sums.make(size=2))[1] == "What is 99 - 70? Answer with just the number."


@pytest.mark.parametrize(
    "completion, status, answer",
    [
        ("12", "correct", "12"),
        ("7 + 5 = 12.", "correct", "12"),
        ("It is 12.0", "correct", "12"),
        ("012", "correct", "12"),
        ("12 or 13", "wrong", "13"),
        ("1,200", "wrong", "1200"),
        ("12.5", "wrong", "12.5"),
        ("-12", "wrong", "-12"),
        ("\u221212", "wrong", "-12"),
        ("<think>7 + 5 is 11?</think> 12", "correct", "12"),
        ("<think>7 + 5 is 12", "unparsed", None),
        ("twelve", "unparsed", None),
        ("", "unparsed", None),
        ("9" * 5000, "wrong", "9" * 5000),
    ],
)
def test_the_last_number_counts(completion, status, answer):
    task = sums.Sums(
        problems=(sums.Problem(level="one_digit", operator="+", operands=(7, 5)),),
        levels=("one_digit",),
    )
    verdict = task.rewards(0, completion)
    assert verdict.status == status and verdict.score == (status == "correct")
    assert task.answer(0, completion) == answer


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"split": "dev"}, "split='dev'; allowed: test, train"),
        ({"size": 0}, "size=0; allowed: 1 to 20000"),
        ({"levels": "one"}, "levels='one'; allowed: some of one_digit,two_digit,harder"),
        ({"levels": "harder,harder"}, "levels='harder,harder'"),
        ({"levels": "one_digit", "size": 300}, "size=300; allowed: at most 16. for levels"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        sums.make(**settings)
