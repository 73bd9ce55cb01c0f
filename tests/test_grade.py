"""Final answers: where they are found, which are equal, and that no text takes long or crashes."""

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from xrpo_jax.data.grade import (
    MAX_ANSWER,
    boxed,
    canonical,
    choice_answer,
    equal,
    math_answer,
    stated,
)


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"so \boxed{12} and then \boxed{\frac{3}{4}}.", "3/4"),  # the last box
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{\{1,2\}} {x", r"\{1, 2\}"),
        (r"$\boxed 8$.", "8"),
        (r"\boxed\frac{1}{3}$", "1/3"),
        (r"\fbox{19} or rather \framebox{20}", "20"),
        (r"I use \boxed as asked: \boxed{17}", "17"),
        (r"Answer: 3. After a check, \boxed{4}.", "4"),  # a box wins over a label
        ("<answer>1</answer> no <answer> 2 </answer>", "2"),
        ("3+4=7\n#### 7\nThat was it, in 3 steps.", "7"),
        ("#### 1\n#### -2,340.75", "-9363/4"),
        ("#### Step 2: halve\nThe answer is 5.", "5"),  # a Markdown heading is no marker
        ("The answer is $1,250.50.", "2501/2"),
        ("**Answer:** 21", "21"),
        ("Answer: 3\nWait.\nAnswer: 5", "5"),
        ("答案：36", "36"),
        ("The final answer is Navin.", "navin"),
        ("it dropped to -7 degrees", "-7"),
        ("5-3", "3"),  # a difference holds no negative number
        ("about 1.5e3 units", "1500"),
        ("the share is 1/2", "1/2"),
        ("<think>\\boxed{3}</think>so \\boxed{4}", "4"),
        ("was \\boxed{3}</think>so \\boxed{4}", "4"),  # opened within the prompt
    ],
)
def test_the_final_answer_is_found(completion, answer):
    assert math_answer(completion) == answer


@pytest.mark.parametrize(
    "completion",
    ["", "I do not know.", r"\boxed{}", r"\boxed{ \ }", r"\boxed{5} no: \boxed{6", "<answer>42",
     "Answer:", "#### none", r"<think>it is \boxed{4}", r"<think>\boxed{4}</think> I am done.",
     r"a</think>b<think>\boxed{4}", "--- , . $", r"\boxed{" + "7" * (MAX_ANSWER + 1) + "}"],
)  # fmt: skip
def test_no_answer_is_none(completion):
    assert math_answer(completion) is None


EQUAL = [
    ["1234567", "1,234,567", r"1{,}234{,}567", r"1\,234\,567", r"1,\!234,\!567", "1234567.00"],
    ["1/2", r"\frac{1}{2}", r"\dfrac12", r"\frac{2}{4}", "0.5", ".50", "½", "$0.5$", r"\(0.5\)"],
    ["-3/4", r"-\frac{3}{4}", r"\frac{-3}{4}", r"\frac{3}{-4}", "-.75", "−0.75", "-(3/4)"],
    ["17/5", r"3\frac{2}{5}", "3 2/5", "3.4"],
    ["-9/4", r"-2\frac{1}{4}", "-2.25"],
    ["2/3", "0.6666666667", "0.666666666666", r"\frac{2}{3}"],
    [
        "27",
        r"\$27",
        "$27.00",
        "€27",
        "27.",
        "27 dollars",
        "27 cm",
        r"27 \text{ dollars}",
        "x=27",
        "(27)",
    ],
    ["45", r"45^\circ", r"45^{\circ}", "45°", r"45 \text{ degrees}", "45 degrees", "045"],
    ["864", r"864 \mbox{ inches}^2", r"864\,\mathrm{~cm}^{2}", "864 square inches"],
    ["0.0015", "1.5e-3", r"1.5\times 10^{-3}", r"1.5 \cdot 10^{-3}"],
    ["15%", r"15\%", "15 percent", "15.0%"],
    [r"(3,\frac{\pi}{2})", r"\left( 3, \frac{\pi}{2} \right)", r"(3, \frac{\pi}{2})"],
    ["Evelyn", r"\text{Evelyn}", "evelyn.", r"\textbf{Evelyn}"],
    ["C", "(C)", r"\text{(C)}", r"\mathrm{C}"],
    [r"11\sqrt2", r"11 \sqrt{2}", r"11√2"],
    [r"x^2+1", "f(x)=x^2+1", "f(x) = x^2 + 1", "{x^2}+1".replace("{x^2}", "x^2")],
    ["2π", r"2\pi", r"2 \pi"],
    ["0", "-0", "000", "0.0"],
    ["12", "１２"],
]


@pytest.mark.parametrize("same", EQUAL, ids=lambda same: same[0])
def test_equal_answers_have_one_spelling(same):
    assert len({canonical(text) for text in same}) == 1
    assert all(canonical(canonical(text)) == canonical(text) for text in same)


def test_different_answers_have_different_spellings():
    spellings = [canonical(same[0]) for same in EQUAL]
    assert len(set(spellings)) == len(spellings)


@pytest.mark.parametrize(
    ("gold", "other"),
    [
        ("4", "4x"), ("5", "m = 5t"), ("1234", "(1,234)"), ("512", "5,12"), ("86", "8 6"),
        ("6/5", r"3\frac{2}{5}"), ("1/23", r"\frac123"), ("1/3", "0.3333"), (r"\pi", "3.14"),
        ("3", "3 million"),
        ("3", r"3\text{ million}"), ("2", "2 pi"), ("2", r"2\mathrm{i}"), ("3", r"3\mathbf{i}"),
        ("5", "5 squared"), ("2", "2 ab"), ("27", "27 x"),
        ("(1,2)", "(2,1)"), ("[1,4]", "[1,4)"), (r"21_3", "21_4"),
        ("50", "0.5"), ("25%", "2500"), ("1000000007", "1000000008"), ("10:30", "9:30"),
        ("2x+1", "2y+1"), ("x^2", "x2"), ("A", "AB"), ("0.0000000001", "0"), (r"\pm 7", "7"),
    ],
)  # fmt: skip
def test_different_answers_are_not_equal(gold, other):
    assert not equal(canonical(gold), canonical(other))


def test_a_percentage_equals_its_number_and_its_value():
    assert equal("15%", "15%") and equal("15", "15%") and equal("15%", "3/20")
    assert not equal("15%", "1500") and not equal("15", "3/20") and not equal("x%", "x")


@pytest.mark.parametrize(
    ("completion", "letter"),
    [
        (r"\boxed{C}", "C"), (r"\boxed{\text{(C)}}", "C"), (r"\boxed{C: a longer text}", "C"),
        ("So the answer is B. Option A looks right at first.", "B"), ("Answer: (d)", "D"),
        ("The answer is D since I added both parts.", "D"), ("Thus\n\nC", "C"), ("B) five", "B"),
        ("The answer is option A", "A"), ("**Answer: C**", "C"), ("<think>A</think>\n(B)", "B"),
        ("<answer>A</answer>", "A"), ("Answer: E", None), ("ANSWER: Can not tell", None),
        ("A man walks", None), ("", None), (r"\boxed{Difficult}", None), (r"\boxed{B", None),
        (r"<think>\boxed{B}", None), ("I think so", None), (r"\boxed{AB}", None),
    ],
)  # fmt: skip
def test_the_letter_of_a_choice_is_found(completion, letter):
    assert choice_answer(completion, "ABCD") == letter


PIECES = (
    r"\boxed{ \boxed { } \ $ #### answer is <answer> </answer> <think> </think> \frac 1 23 ,456 . "
    r"- / % e9 e-999 \text{ cm ^\circ \times 10^{ ½ − x= ( ) 0 ~"
).split() + [" ", "\n", "answer is "]
TEXTS = st.one_of(st.text(max_size=60), st.lists(st.sampled_from(PIECES), max_size=25).map("".join))


@given(TEXTS)
@settings(max_examples=400, deadline=None)
@example("e9" * 5)
@example("1e999")
@example("\\frac{1}{0}")
@example("3/0")
def test_any_text_is_graded_and_spelled_stably(text):
    for found in (math_answer(text), canonical(text)):
        if found is not None:
            assert found and equal(found, found)
    assert choice_answer(text, "ABCD") in (None, *"ABCD")
    spelled = canonical(text)
    if spelled is not None and spelled.lstrip("-").isdigit():
        assert canonical(spelled) == spelled
        assert canonical(f"\\boxed{{{spelled}}}"[7:-1]) == spelled


@given(st.fractions(max_denominator=10**6), st.sampled_from(["{}", "$ {} $", "x = {}", "{}."]))
@settings(max_examples=200, deadline=None)
def test_every_fraction_is_read_exactly(value, around):
    plain = f"{value.numerator}/{value.denominator}"
    latex = f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    for text in (plain, latex, f"{value.numerator:,}/{value.denominator:,}"):
        assert canonical(around.format(text)) == str(value)
        assert math_answer(f"so \\boxed{{{around.format(text)}}}") == str(value)


@given(
    st.decimals(
        allow_nan=False, allow_infinity=False, places=4, min_value=-(10**9), max_value=10**9
    )
)
@settings(max_examples=200, deadline=None)
def test_every_decimal_is_read_exactly(value):
    numerator, denominator = value.as_integer_ratio()
    expected = canonical(f"{numerator}/{denominator}")
    assert canonical(f"{value:f}") == canonical(f"{value:,f}") == expected


HOSTILE = {
    "digits": "9" * 10**6,
    "decimals": "0." + "3" * 10**6,
    "braces": "\\boxed{" + "{" * 10**5,
    "boxes": "\\boxed{" * 10**5,
    "closed boxes": "\\boxed{" * 10**5 + "1" + "}" * 10**5,
    "closing": "\\boxed{1" + "}" * 10**6,
    "backslashes": "\\boxed{" + "\\" * 10**6,
    "commas": "1,234" * 2 * 10**5,
    "thousands": "1" + ",234" * 2 * 10**5,
    "spaces": "answer is " + " " * 10**6,
    "labels": "answer is " * 10**5,
    "tags": "<answer>" * 10**5,
    "thinking": "<think>" * 10**5 + "</think>" * 10**5,
    "marks": "####" * 2 * 10**5,
    "stars": "answer" + "*" * 10**6,
    "power": "\\boxed{9^{9^{9^{9}}}}",
    "exponent": "\\boxed{1e99999999999}",
    "large exponent": "\\boxed{1e999}",
    "fractions": "\\boxed{" + "\\frac{1}{" * 80 + "1" + "}" * 80 + "}",
    "slashes": "1/" * 10**6,
    "units": "\\boxed{5" + " cm" * 300 + "!}",
    "texts": "\\boxed{5" + "\\text{a}" * 110 + "!}",
    "equations": "\\boxed{x" + "=x" * 450 + "}",
    "minus": "-" * 10**6,
    "points": "." * 10**6,
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_text_is_graded_at_once(text):
    began = time.perf_counter()
    math_answer(text)
    choice_answer(text, "ABCD")
    canonical(text)
    stated(text)
    boxed(text)
    assert time.perf_counter() - began < 2


def test_what_is_too_long_is_no_answer():
    assert canonical("1" * MAX_ANSWER) == "1" * MAX_ANSWER
    assert canonical("1" * (MAX_ANSWER + 1)) is None
    assert math_answer("9" * 10**6) is None
    assert boxed("\\boxed{" + "1" * MAX_ANSWER + "}") == "1" * MAX_ANSWER


@pytest.mark.parametrize(
    "text",
    [
        "The answer is 12 because 3*4=12",
        "The answer is 12, since 3 x 4 is 12.",
        "The final answer is $12$, which is 3*4.",
        "Answer: 12 as 3*4 says 12",
    ],
)
def test_a_reason_after_the_answer_is_no_part_of_it(text):
    assert math_answer(text) == "12"


def test_lists_after_a_label_are_whole():
    assert math_answer("The answer is 1, 2, 3") == canonical("1, 2, 3")
    assert math_answer("The answer is (1, 2)") == canonical("(1, 2)")


def test_a_small_letter_alone_is_a_choice():
    assert choice_answer("Answer: b", "ABCD") == "B"
    assert choice_answer("Answer: because", "ABCD") is None
