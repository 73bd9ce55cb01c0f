"""Where an answer is found: boxes, tags, marks, labels, letters, formats; linear in the text."""

import json
import pathlib
import time

import pytest

from xrpo_jax.verify import extract
from xrpo_jax.verify.choice import choice, grade_choice
from xrpo_jax.verify.extract import MAX_ANSWER, boxed, stated, well_formed
from xrpo_jax.verify.math import answer_of
from xrpo_jax.verify.spelling import number
from xrpo_jax.verify.structure import parse, spell

CASES = pathlib.Path(__file__).parents[2] / "shared" / "cases" / "answer_extract.jsonl"


def spelled(completion):
    """The answer in one spelling; the last number counts."""
    answer = answer_of(completion, last=True)
    return None if answer is None else spell(parse(answer))


# --- the public faults ---------------------------------------------------------------------------

MODES = {
    "auto": stated,
    "boxed": lambda text: boxed(extract.after_thinking(text) or ""),
    "answer_tag": lambda text: extract.tagged(extract.after_thinking(text) or ""),
    "answer_line": stated,
    "hash": extract.hashed,
    "last_number": extract.last_number,
}


def cases():
    if not CASES.exists():
        return []
    with open(CASES) as lines:
        return [json.loads(line) for line in lines]


@pytest.mark.skipif(not CASES.exists(), reason="../shared/cases is not there")
@pytest.mark.parametrize("case", cases(), ids=lambda case: f"{case['id']}-{case['fault']}")
def test_public_fault(case):
    given, expected = case["input"], case["expected"]
    text, mode = given["text"], given["mode"]
    began = time.perf_counter()
    if mode == "choice":
        found = choice(text, given["choices"])
    elif mode == "format_check":
        found = well_formed(text, opened=given["think_prefilled"])
    else:
        found = MODES[mode](text) or None
    assert time.perf_counter() - began < given.get("max_seconds", 2)
    if "number" in expected:
        assert parse(found).value == number(str(expected["number"]))
    else:
        assert found == expected["answer"]


# --- by hand -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"so \boxed{12} and then \boxed{\frac{3}{4}}.", "3/4"),  # the last box
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{\{1,2\}} {x", "{1, 2}"),
        (r"They are \boxed{2}, \boxed{5} and \boxed{9}.", "{2, 5, 9}"),
        (r"\boxed{5} \boxed{6}", "{5, 6}"),  # not the last of several guesses
        (r"\boxed{5}. So \boxed{5}", "5"),
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
    assert spelled(completion) == answer


@pytest.mark.parametrize(
    "completion",
    ["", "I do not know.", r"\boxed{}", r"\boxed{ \ }", r"\boxed{5} no: \boxed{6", "<answer>42",
     "Answer:", "#### none", r"<think>it is \boxed{4}", r"<think>\boxed{4}</think> I am done.",
     r"a</think>b<think>\boxed{4}", "--- , . $", r"\boxed{" + "7" * (MAX_ANSWER + 1) + "}"],
)  # fmt: skip
def test_no_answer_is_none(completion):
    assert spelled(completion) is None


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
    assert choice(completion, "ABCD") == letter


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
    assert spelled(text) == "12"


@pytest.mark.parametrize(
    ("gold", "completion", "status"),
    [
        ("B", r"\boxed{B}", "correct"), ("(b)", "Answer: B", "correct"), ("B", "(C)", "wrong"),
        ("B", "no idea", "unparsed"), ("B", r"\boxed{F}", "unparsed"),
    ],
)  # fmt: skip
def test_a_choice_is_graded(gold, completion, status):
    assert grade_choice(completion, gold, letters="ABCD").status == status


@pytest.mark.parametrize("gold", ["", "E", "AB", None, 1])
def test_a_gold_that_is_no_choice_is_refused(gold):
    with pytest.raises(ValueError, match="gold=.*ABCD"):
        grade_choice("A", gold, letters="ABCD")


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("<think>a</think><answer>4</answer>", True),
        (" <think>\na\n</think>\n\n<answer> 4 </answer>\n", True),
        ("<think>a</think>So <answer>4</answer>", False),
        ("<think>a</think><answer>4</answer> Done.", False),
        ("<think>a</think><answer> </answer>", False),
        ("<think><answer>4</answer></think><answer>4</answer>", False),
        ("<answer>4</answer><think>a</think>", False),
        ("<think>a</think><answer>4", False),
        ("a</think><answer>4</answer>", False),  # the opening tag is missing
        ("", False),
    ],
)
def test_the_format_is_checked(text, good):
    assert well_formed(text) is good


def test_thinking_counts_where_it_is_asked_for():
    text = r"<think>it is \boxed{4}"
    assert stated(text) == "" and stated(text, thinking=True) == "4"
    assert choice(r"<think>\boxed{B}", "AB", thinking=True) == "B"


# --- hostile text --------------------------------------------------------------------------------

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
def test_hostile_text_is_read_at_once(text):
    began = time.perf_counter()
    for read in (spelled, stated, boxed, well_formed, lambda text: choice(text, "ABCD")):
        read(text)
    for find in (extract.tagged, extract.hashed, extract.labelled, extract.last_number):
        find(text)
    parse(text[:MAX_ANSWER])
    assert time.perf_counter() - began < 4


def test_what_is_too_long_is_no_answer():
    assert boxed("\\boxed{" + "1" * MAX_ANSWER + "}") == "1" * MAX_ANSWER
    assert boxed("\\boxed{" + "1" * (MAX_ANSWER + 1) + "}") == ""
    assert spelled("9" * 10**6) is None
