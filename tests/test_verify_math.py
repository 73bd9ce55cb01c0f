"""Equality of mathematical answers: kinds by hand, the public faults, fuzz, the public data."""

import json
import pathlib
import random
import re
import subprocess
import sys
import threading
import time
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from xrpo_jax.data.load import load
from xrpo_jax.data.read import read
from xrpo_jax.tasks import files
from xrpo_jax.verify import Pool, grade_math
from xrpo_jax.verify.math import NeedsAlgebra, grade
from xrpo_jax.verify.spelling import clean, number
from xrpo_jax.verify.structure import parse, spell

SHARED = pathlib.Path(__file__).parents[2] / "shared"
CASES = SHARED / "cases" / "math_equiv.jsonl"
DATA = SHARED / "data"


def right(gold, answer, **rules):
    return grade(f"So \\boxed{{{answer}}}.", gold, **rules).correct


EQUAL = [
    ["1234567", "1,234,567", r"1{,}234{,}567", r"1\,234\,567", r"1,\!234,\!567", "1234567.00"],
    ["1/2", r"\frac{1}{2}", r"\dfrac12", r"\frac{2}{4}", "0.5", ".50", "½", "$0.5$", r"\(0.5\)"],
    ["-3/4", r"-\frac{3}{4}", r"\frac{-3}{4}", r"\frac{3}{-4}", "-.75", "−0.75", "-(3/4)"],
    ["17/5", r"3\frac{2}{5}", "3 2/5", "3.4"],
    ["-9/4", r"-2\frac{1}{4}", "-2.25"],
    ["2/3", r"0.\overline{6}", "0.(6)", r"\frac{2}{3}"],
    [
        "27",
        r"\$27",
        "$27.00",
        "€27",
        "27.",
        "27 dollars",
        r"27 \text{ dollars}",
        "x=27",
        "(27)",
    ],
    ["45", r"45^\circ", r"45^{\circ}", "45°", r"45 \text{ degrees}", "45 degrees", "045"],
    ["864", r"864 \mbox{ inches}^2", r"864\,\mathrm{~in}^{2}", "864 square inches"],
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


ALGEBRA = [  # equal, though not spelled alike
    ["(x+1)^2", "x^2+2x+1", "x(x+2)+1", "1+2x+x^2"],
    [r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}", r"\sqrt{\frac13}", r"\tan 30^\circ"],
    [r"2\sqrt{3}", r"\sqrt{12}", r"√12", r"12^{1/2}"],
    [r"\sqrt{2}+\sqrt{3}", r"\sqrt{5+2\sqrt{6}}"],
    ["1024", "2^{10}", r"\binom{1024}{1}", r"4^5"],
    ["120", "5!", r"\frac{6!}{3!}"],
    ["2i", r"\sqrt{-4}", r"2\mathrm{i}"],
    ["-1", r"e^{i\pi}", "i^2"],
    [r"\frac{\ln 3}{\ln 2}", r"\log_2 3"],
    ["3", r"\log_2 8", r"\sqrt[3]{27}", r"\lfloor 3.7 \rfloor", r"\sum_{k=1}^{2} k"],
    [r"|x|", r"\sqrt{x^2}"],
    [r"\frac{\pi}{6}", r"\arcsin(1/2)", r"\frac{1}{6}\pi"],
    ["y=2x+1", "2x-y+1=0", "4x = 2y - 2"],
    [r"\frac{x^2}{9}+\frac{y^2}{5}=1", "5x^2+9y^2=45"],
    [r"3\pm\sqrt{2}", r"3-\sqrt{2}, 3+\sqrt{2}", r"x = 3 \pm \sqrt 2"],
    ["x < 4", r"(-\infty, 4)", "4 > x", r"x \in (-\infty, 4)"],
    [r"2 \le x \le 6", "[2, 6]", r"x \ge 2 \text{ and } x \le 6", r"6 \geq x \geq 2"],
    [r"x<-2 \text{ or } x>3", r"(-\infty,-2)\cup(3,\infty)", r"(3, \infty) \cup (-\infty, -2)"],
    [r"x \ne 1", r"\mathbb{R}\setminus\{1\}", r"(-\infty,1)\cup(1,\infty)"],
    [r"\{1,2,3\}", "3, 2, 1", r"x=1, x=2 \text{ or } x=3"],
    ["(x,y)=(1,2)", "x=1, y=2", "y=2, x=1"],
    [r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\ 3&\frac82\\ \end{bmatrix}"],
    [r"\emptyset", r"\varnothing", r"\{\}"],
    ["f(x)+1", "1+f(x)"],
    [r"2k\pi", r"2\pi k"],
    ["1 hour", r"60 \text{ minutes}", "3600 seconds"],
    [r"1\text{ m}", "100 cm"],
    ["50 cents", r"0.5 \text{ dollars}"],
]
ALMOST = [  # near, but not equal
    ("5", "5 or 6"), ("x=5", "x=5, x=6"), ("x^2", "x"), (r"\sqrt{2}", "1.414"), ("(0,1)", "[0,1]"),
    ("2", "2x"), ("5", "5=6"), ("x=y", "x=x"), ("x^2+y^2=1", "0=0"), (r"\{1,2\}", "1"),
    ("A", r"\text{a choice}"), ("x>2", r"x\ge2"), ("4", "2^3"), (r"\frac{1}{x}", r"\frac{1}{y}"),
    (r"-\infty", r"\infty"), ("5", r"\frac{0}{0}"), ("5", r"\infty"), ("5", "x"), ("5", "nan"),
    ("yes", "no"), (r"2\text{ hours}", r"2\text{ minutes}"), (r"(0,\infty)", r"(-\infty,\infty)"),
    (r"\sin x", r"\cos x"), ("12", "1,2"), ("1:2", "2:1"), ("1+2i", "1-2i"), ("y=x", "y=-x"),
    (r"\sqrt{x}", r"-\sqrt{x}"), ("0", r"\emptyset"), ("8 pm", "8 am"), ("x", "|x|"),
    ("x=1, y=2", "2, 1"), ("x=1, y=2", "x=2, y=1"), (r"\frac{2^{305}+1}{3\cdot 2^{306}}",
    r"\frac16"),
    (r"e^{-1000}", "0"), ("0", r"e^{-1000}"), (r"\sqrt{2}", r"\sqrt{2}+10^{-40}"), ("x<y", "y<x"),
    ("21_3", "21_4"), (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"),
    ("no", "on"), (r"\{4,7\}", "(4,7)"), ("1, 2", "(1, 2)"), (r"2\sin x", r"\sin 2x"),
]  # fmt: skip


@pytest.mark.parametrize("same", EQUAL, ids=lambda same: same[0])
def test_equal_answers_have_one_spelling(same):
    assert len({spell(parse(text)) for text in same}) == 1
    assert all(right(gold, answer, algebra=False) for gold in same for answer in same)


def test_different_answers_have_different_spellings():
    spellings = [spell(parse(same[0])) for same in EQUAL]
    assert len(set(spellings)) == len(spellings)


@pytest.mark.parametrize("same", ALGEBRA, ids=lambda same: same[0])
def test_equal_values_are_equal(same):
    assert all(right(gold, answer) for gold in same for answer in same)


@pytest.mark.parametrize(("gold", "other"), ALMOST)
def test_near_values_are_not_equal(gold, other):
    assert not right(gold, other) and not right(other, gold)


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
    assert not right(gold, other) and not right(other, gold)


def test_a_percentage_equals_its_number_and_its_value():
    assert right("15%", "15%") and right("15", "15%") and right("15%", "0.15")
    assert not right("15%", "1500") and not right("15", "0.15") and not right("x%", "x")


@pytest.mark.parametrize(
    ("gold", "answer", "rules"),
    [
        ("3.14159", r"\pi", {"tolerance": 1e-5}), ("100", "101", {"tolerance": 0.011}),
        (r"\pi", "3.14", {"tolerance": 1e-3}), ("1/3", "0.333", {"decimals": 3}),
        (r"\sqrt{2}", "1.414", {"decimals": 3}), (r"\sqrt{2}", "1.4142135623731", {}),
    ],
)  # fmt: skip
def test_tolerance_and_decimals_are_settings(gold, answer, rules):
    assert right(gold, answer, **rules)
    assert not rules or not right(gold, answer)


def test_strict_keeps_percent_units_and_order():
    for gold, answer in (("8", "8%"), ("5 cm", "5"), ("2, 5", "5, 2")):
        assert right(gold, answer) and not right(gold, answer, strict=True)
        assert right(gold, gold, strict=True)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"tolerance": -1}, "tolerance=-1; allowed: from 0"),
        ({"tolerance": float("nan")}, "tolerance=nan"),
        ({"decimals": 0}, "decimals=0; allowed: at least 1"),
    ],
)
def test_wrong_rules_are_refused(rules, message):
    with pytest.raises(ValueError, match=message):
        right("1", "1", **rules)


@pytest.mark.parametrize(
    "gold", ["", "   ", None, True, [], "$ $", r"\frac{", "}", r"\text{}", "1" * 1001]
)
def test_a_gold_that_no_answer_could_meet_is_refused(gold):
    for grader in (grade, grade_math):
        with pytest.raises(ValueError, match="gold"):
            grader(r"\boxed{}", gold)


def test_numbers_may_be_golds():
    assert right(42, "42") and right(0.5, r"\frac12") and not right(0.5, "5")


def test_the_last_number_counts_where_it_is_asked_for():
    text = "There are 12 cats and 30 birds"
    assert grade(text, "30").status == "unparsed"
    assert grade(text, "30", last_number=True).correct
    assert grade(r"<think>30", "30", last_number=True).status == "unparsed"
    assert grade(r"<think>30", "30", last_number=True, thinking=True).correct


# --- the public faults ---------------------------------------------------------------------------


def cases():
    if not CASES.exists():
        return []
    with open(CASES) as lines:
        return [json.loads(line) for line in lines]


def graded_case(given):
    if given.get("task") == "countdown":
        gold = {"numbers": given["numbers"], "target": given["target"]}
        row = files.Example(prompt=(), gold=gold, kind="countdown", level="")
        return files.Files(examples=(row,)).rewards(0, given["completion"])
    kinds = {"int": int, "float": float}
    gold = kinds.get(given.get("gold_type"), lambda value: value)(given["gold"])
    return grade(given["completion"], gold)


@pytest.mark.skipif(not CASES.exists(), reason="../shared/cases is not there")
@pytest.mark.parametrize("case", cases(), ids=lambda case: f"{case['id']}-{case['fault']}")
def test_public_fault(case, tmp_path):
    given, expected = case["input"], case["expected"]
    before = set(pathlib.Path("/tmp").glob("rlvr_pwned*"))
    began = time.perf_counter()
    if "error_names" in expected or case["fault"] == "gold_unparseable":
        with pytest.raises(ValueError, match="gold"):  # the row cannot be scored
            graded_case(given)
    else:
        verdict = graded_case(given)
        assert verdict.score == expected["reward"], verdict
        assert len(verdict.reason) < 300
    assert time.perf_counter() - began < expected["max_seconds"]
    assert set(pathlib.Path("/tmp").glob("rlvr_pwned*")) == before
    if "then" in given:
        then = given["then"]
        assert grade(then["completion"], then["gold"]).score == then["expected_reward"]


TOWERS = [
    r"8^{8^{8^8}}", r"6^{6^{6^6}}-6", r"\frac{9^{9^{9^9}}-1}{8}", r"(8\cdot 10^{8})!+1",
    "1.5^{10^{12}}",
    r"\binom{10^9}{5\cdot 10^8}", r"\dbinom{1000000000}{500000000}", r"\sum_{k=1}^{10^{9}} \frac1k",
    r"\prod_{k=1}^{10^{9}} k", r"\sin(\sin(e^{e^{e^{4}}}+3))", r"e^{e^{e^{e^{e}}}}",
    r"10^{-10^{10}}",
    r"((((x+1)^{50}+y)^{50}+z)^{50}+w)^{50}",
    "+".join("1" * 400), "9" * 900, "0." + "0" * 900 + "1",
    "(" * 100 + "1" + ")" * 100, r"\frac{1}{" * 60 + "1" + "}" * 60,
    r"\sqrt{" * 80 + "2" + "}" * 80,
    "2^" * 100 + "2", "x" * 500, "-" * 900 + "1", r"2^{2^{2^{2^{2^{2^2}}}}}", "1/0", "0^0",
    r"0^{-1}",
    r"\int_0^{\infty} e^{-x^2} dx", r"\lim_{x \to 0} \frac{\sin x}{x}", r"\frac{d}{dx} x^2",
    ",".join(["x^2+1"] * 150), r"1\pm" * 100 + "1", r"999999999999 \bmod 7", r"\gcd(10^{50}, 6)",
]  # fmt: skip


@pytest.mark.parametrize("answer", TOWERS, ids=lambda answer: answer[:30])
def test_hostile_sizes_end_soon(answer):
    began = time.perf_counter()
    assert not grade(f"\\boxed{{{answer}}}", "4").correct
    assert not right("x+4", answer)
    assert time.perf_counter() - began < 5


def test_a_tower_equals_itself():
    assert right("10^{10^{10}}", "10^{10^{10}}", algebra=False)


def test_threads_and_pools_grade_what_would_hang():
    answers = [f"\\boxed{{{n}^{{8^{{8^8}}}}}}" for n in range(2, 18)]
    found = []
    threads = [
        threading.Thread(target=lambda text=text: found.append(grade_math(text, "4")))
        for text in answers
    ]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [verdict.score for verdict in found] == [0.0] * 16
    with Pool(grade, workers=2, deadline=10.0) as pool:
        verdicts = pool.map([(text, "9") for text in answers * 4])
    assert [verdict.score for verdict in verdicts] == [0.0] * 64
    assert time.perf_counter() - began < 60


# --- fuzz ----------------------------------------------------------------------------------------

PIECES = (
    r"\boxed{ \boxed { } \ $ #### answer is <answer> </answer> <think> </think> \frac 1 23 ,456 . "
    r"- / % e9 e-999 \text{ cm ^\circ \times 10^{ ½ − x= ( ) 0 ~ \pm \cup \infty \le < > "
    r"= [ ] \{ \} "
    r"\begin{pmatrix} & \\ \end{pmatrix} \sqrt _ ^ ^{ ! | x y \pi \sin \log_ \sum_{k=1}^ "
    r"\binom or and : "
    r"\mathbb{R} \setminus \in \ne ° √ \dots blue"
).split() + [" ", "\n", "answer is "]
TEXTS = st.one_of(
    st.text(max_size=60),
    st.lists(st.sampled_from(PIECES), max_size=14).map("".join),
    st.lists(st.sampled_from(PIECES), max_size=14).map(" ".join),
)


@given(TEXTS, TEXTS)
@settings(max_examples=10_000, deadline=None, database=None)
@example("e9" * 5, "1")
@example("1e999", "1e999")
@example("\\frac{1}{0}", "3/0")
@example("", "+")
def test_any_text_is_graded(gold, answer):
    """Neither crashes nor hangs, whatever stands where; what is equal to itself stays so."""
    began = time.perf_counter()
    for completion in (answer, f"\\boxed{{{answer}}}"):
        try:
            grade(completion, gold)
        except ValueError as error:
            assert "gold" in str(error)
    node = parse(answer)
    spell(node)
    assert node == parse(answer)
    try:
        verdict = grade(f"\\boxed{{{answer}}}", answer, algebra=False)
    except (ValueError, NeedsAlgebra):
        verdict = None
    if verdict is not None and verdict.status == "wrong":  # the box ended within the answer
        assert answer.count("{") + answer.count("}") + answer.count("\\boxed") > 0
    assert time.perf_counter() - began < 5


def spelled(text):
    return spell(parse(text))


@given(st.fractions(max_denominator=10**6), st.sampled_from(["{}", "$ {} $", "x = {}", "{}."]))
@settings(max_examples=200, deadline=None)
def test_every_fraction_is_read_exactly(value, around):
    plain = f"{value.numerator}/{value.denominator}"
    latex = f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    for text in (plain, latex, f"{value.numerator:,}/{value.denominator:,}"):
        assert spelled(around.format(text)) == str(value)
        assert right(str(value), around.format(text))
    assert not right(str(value), str(value + Fraction(1, 10**7)))


@given(
    st.decimals(
        allow_nan=False, allow_infinity=False, places=4, min_value=-(10**9), max_value=10**9
    )
)
@settings(max_examples=200, deadline=None)
def test_every_decimal_is_read_exactly(value):
    expected = Fraction(value)
    assert number(f"{value:f}") == number(f"{value:,f}") == expected
    assert spelled(f"{value:f}") == str(expected)


EXPRESSIONS = st.recursive(
    st.one_of(st.integers(0, 9).map(str), st.sampled_from(["x", "y", r"\pi", r"\sqrt{2}"])),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda p: f"({p[0]}+{p[1]})"),
        st.tuples(inner, inner).map(lambda p: f"{p[0]} \\cdot {p[1]}"),
        st.tuples(inner, inner).map(lambda p: f"({p[0]}-{p[1]})"),
        st.tuples(inner, inner).map(lambda p: f"\\frac{{{p[0]}}}{{{p[1]}+7}}"),
    ),
    max_leaves=6,
)


@given(EXPRESSIONS)
@settings(max_examples=150, deadline=None)
def test_an_expression_equals_itself_rewritten_and_nothing_near(expression):
    gold = f"{expression} + y"
    assert right(gold, f"y + {expression}")
    assert right(gold, f"\\frac{{2y + 2({expression})}}{{2}}")
    assert not right(gold, f"y + {expression} + 1") and not right(gold, f"{expression} - y")


def test_cleaning_is_stable():
    for same in EQUAL + ALGEBRA:
        for text in same:
            assert clean(clean(text)) == clean(text)


# --- the public data -----------------------------------------------------------------------------

public = pytest.mark.skipif(not DATA.exists(), reason="../shared/data is not there")


@public
@pytest.mark.parametrize("name", ["gsm8k_train", "gsm8k_test"])
def test_the_solutions_of_gsm8k_are_right_and_others_wrong(name):
    rows = [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]
    golds = [row["answer"].rpartition("####")[2].strip() for row in rows]
    assert all(grade(row["answer"], gold).correct for row, gold in zip(rows, golds, strict=True))
    order = list(range(len(rows)))
    random.Random(0).shuffle(order)
    hits = [
        (golds[i], golds[j])
        for i, j in enumerate(order)
        if grade(rows[j]["answer"], golds[i]).correct
    ]
    assert all(number(a) == number(b) for a, b in hits)  # true coincidences, nothing else
    assert len(hits) < 0.03 * len(rows)


@public
def test_the_solutions_of_math_are_right():
    examples = load(read(str(DATA / "math500.jsonl")), "math500", format="math").examples
    wrong = [one.gold for one in examples if not grade(one.solution, one.gold).correct]
    assert len(examples) == 500 and wrong == []


# --- the command ---------------------------------------------------------------------------------


def command(path, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "xrpo_jax.verify", *arguments, str(path)],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_command_grades_a_file(tmp_path):
    path = tmp_path / "cases.jsonl"
    rows = [
        {"completion": r"\boxed{(x+1)^2}", "gold": "x^2+2x+1"},
        {"completion": r"\boxed{2}", "gold": "3"},
        {"completion": "nothing", "gold": "3"},
        {"completion": r"\boxed{9^{9^{9^9}}}", "gold": "3"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = command(path, "--kind=math")
    assert done.returncode == 0, done.stderr
    verdicts = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["status"] for one in verdicts] == ["correct", "wrong", "unparsed", "wrong"]
    assert "25.0%" in done.stderr and "correct" in done.stderr


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ('{"completion": "x"}\n', (), "line 1.*gold"),
        ('{"completion": "x", "gold": "1"}\nnot json\n', (), "line 2"),
        ('{"completion": "x", "gold": ""}\n', (), "line 1.*gold=''"),
        ('{"completion": 1, "gold": "1"}\n', (), "line 1.*completion"),
        ("", (), "no lines"),
        ('{"completion": "x", "gold": "1"}\n', ("--kind=latin",), "latin"),
        ('{"completion": "x", "gold": "1"}\n', ("--deadline=0",), "deadline=0"),
    ],
)
def test_the_command_refuses_what_is_wrong(tmp_path, text, arguments, message):
    path = tmp_path / "cases.jsonl"
    path.write_text(text)
    done = command(path, *(arguments or ("--kind=math",)))
    assert done.returncode != 0 and not done.stdout
    assert re.search(message, done.stderr), done.stderr
    assert "Traceback" not in done.stderr
