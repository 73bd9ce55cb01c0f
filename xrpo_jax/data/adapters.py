"""Rows of known layouts to examples: one small function a layout, and how a layout is recognised.

Column names are those of the published files; where copies of a data set differ, both are read.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable

from xrpo_jax.data.code_tests import decode_tests
from xrpo_jax.data.example import BadRow, Example, column, level_of, plain, prompt_of, text_column
from xrpo_jax.types import Conversation, question
from xrpo_jax.verify.extract import boxed
from xrpo_jax.verify.math import right_answer
from xrpo_jax.verify.spelling import number

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
PROMPTS = ("problem", "Problem", "question", "Question", "prompt", "input")
ANSWERS = ("answer", "Answer", "final_answer", "expected_answer", "target")

Adapter = Callable[[dict], Example]


def _math(prompt: str | Conversation, gold: str, name: str, level: str, solution="") -> Example:
    """An example graded as mathematics; BadRow where the answer is none that grading could meet."""
    try:
        right_answer(gold)
    except ValueError as error:
        what = "empty" if not gold.strip() else f"no answer that can be graded ({error})"
        raise BadRow(f"{name} is {what}") from error
    given = isinstance(prompt, tuple)
    prompt = prompt if given else question(prompt)
    return Example(
        prompt=prompt, gold=gold, kind="math", level=level, solution=solution, given=given
    )


def _gsm8k(row: dict) -> Example:
    worked, marker, gold = text_column(row, "answer").rpartition("####")
    gold = gold.strip().replace(",", "")
    if not marker or not gold:
        raise BadRow("answer has nothing after '####'" if marker else "answer has no '####'")
    # <<48/2=24>> are notes for a calculator.
    worked = re.sub(r"<<[^<>]*>>", "", worked).strip()
    return _math(text_column(row, "question"), gold, "answer", "gsm8k", worked)


def _solved(row: dict, default: str) -> Example:
    """MATH and its like: an answer column wins over the last box of the solution."""
    solution = row.get("solution") if isinstance(row.get("solution"), str) else ""
    name, gold = "solution", boxed(solution, joined=False)  # as MATH reads it
    if "answer" in row:
        name, gold = "answer", plain(row["answer"], "answer")
    elif not gold:
        text_column(row, "solution", "answer")
        raise BadRow(r"solution has no \boxed{} with an answer")
    level = level_of(row, default, "level", "subject", "type")
    return _math(text_column(row, "problem"), gold, name, level, solution)


def _pair(row: dict, level: str) -> Example:
    """A problem and its answer under any of the usual names."""
    (name, gold), (asked, prompt) = column(row, *ANSWERS), column(row, *PROMPTS)
    solution = row.get("solution") if isinstance(row.get("solution"), str) else ""
    gold = plain(gold, name)
    if "####" in gold:
        raise BadRow(f"{name} is a worked solution ('####'), as in layout gsm8k, not an answer")
    return _math(prompt_of(prompt, asked), gold, name, level, solution)


def _aime(row: dict) -> Example:
    example = _pair(row, "aime")
    value = number(example.gold)
    return dataclasses.replace(example, gold=example.gold if value is None else f"{value}")  # 073


def _olympiadbench(row: dict) -> Example:
    row = row if row.get("final_answer") is None else row | {"answer": row["final_answer"]}
    level = level_of(row, "olympiadbench", "subfield")
    name, gold = column(row, "answer")
    return _math(text_column(row, "question"), plain(gold, name), name, level)


def _svamp(row: dict) -> Example:
    prompt = f"{text_column(row, 'Body').strip()} {text_column(row, 'Question').strip()}"
    gold = plain(column(row, "Answer")[1], "Answer")
    return _math(prompt, gold, "Answer", level_of(row, "svamp", "Type"))


def _asdiv(row: dict) -> Example:
    prompt = f"{text_column(row, 'body').strip()} {text_column(row, 'question').strip()}"
    # "9 (apples)": the unit is no part of the answer.
    gold = re.sub(r"(?<=[0-9])\s*\([^()]*\)$", "", text_column(row, "answer").strip())
    return _math(prompt, gold, "answer", level_of(row, "asdiv", "solution_type"))


def _mawps(row: dict) -> Example:
    name, gold = column(row, "target", "lSolutions", "Answer", "answer")
    return _math(
        text_column(row, "input", "sQuestion", "Question"), plain(gold, name), name, "mawps"
    )


def _mmlu(row: dict) -> Example:
    choices, (_, answer) = column(row, "choices")[1], column(row, "answer")
    if not isinstance(choices, list) or not 2 <= len(choices) <= len(LETTERS):
        raise BadRow("choices is no list of 2 to 26 texts")
    letters = LETTERS[: len(choices)]
    if isinstance(answer, str) and answer.strip().isascii() and answer.strip().isdigit():
        answer = int(answer)
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(letters):
        answer = letters[answer]
    if not isinstance(answer, str) or len(answer.strip()) != 1 or answer.strip() not in letters:
        raise BadRow(f"answer is {answer!r}; allowed: 0 to {len(letters) - 1}, or {letters}")
    offered = "\n".join(
        f"{a}. {plain(b, 'choices')}" for a, b in zip(letters, choices, strict=True)
    )
    return Example(
        prompt=question(f"{text_column(row, 'question').strip()}\n{offered}"),
        gold=answer.strip(),
        kind="choice",
        level=level_of(row, "mmlu", "subject", "type"),
        letters=letters,
    )


def _humaneval(row: dict) -> Example:
    prompt, name = text_column(row, "prompt"), text_column(row, "entry_point")
    gold = {"tests": text_column(row, "test"), "entry_point": name, "prefix": prompt}
    solution = text_column(row, "canonical_solution")
    return Example(
        prompt=question(prompt), gold=gold, kind="code", level="humaneval", solution=solution
    )


def _livecodebench(row: dict) -> Example:
    tests = []
    for name in ("public_test_cases", "private_test_cases"):
        try:
            tests += decode_tests(text_column(row, name))
        except ValueError as error:
            raise BadRow(str(error) if isinstance(error, BadRow) else f"{name} {error}") from error
    if not tests:
        raise BadRow("public_test_cases and private_test_cases hold no test")
    starter = row.get("starter_code") or ""
    try:
        facts = json.loads(row.get("metadata") or "{}")
    except (TypeError, ValueError) as error:
        raise BadRow(f"metadata is no JSON ({error})") from error
    name = facts.get("func_name", "") if isinstance(facts, dict) else ""
    if not name and any(test.get("testtype") == "functional" for test in tests):
        raise BadRow("metadata has no func_name, which functional tests call")
    return Example(
        prompt=question(f"{text_column(row, 'question_content')}\n\n{starter}".strip()),
        gold={
            "tests": tests,
            "entry_point": f"Solution.{name}" if name and "class Solution" in starter else name,
            "prefix": "",  # a starter has no imports, and its class no bodies
        },
        kind="code",
        level=level_of(row, "livecodebench", "difficulty"),
    )


def _dapo(row: dict) -> Example:
    """verl's layout: a message list, and the answer in reward_model.ground_truth."""
    name, gold = "reward_model.ground_truth", column(row, "reward_model")[1]
    if not isinstance(gold, dict) or "ground_truth" not in gold:
        raise BadRow("reward_model has no ground_truth")
    gold = plain(gold["ground_truth"], name)
    if re.fullmatch(r'\["[^"]*"\]', gold):  # a list of one, written out as text
        gold = json.loads(gold)[0]
    prompt = prompt_of(column(row, "prompt")[1], "prompt")
    return _math(prompt, gold, name, level_of(row, "dapo", "data_source"))


def _countdown(row: dict) -> Example:
    target, numbers = column(row, "target")[1], column(row, "nums")[1]
    try:
        numbers = json.loads(numbers) if isinstance(numbers, str) else list(numbers)
        if any(isinstance(one, float | bool) for one in (target, *numbers)):
            raise ValueError("not whole numbers")
        target, numbers = int(target), [int(number) for number in numbers]
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRow(f"target and nums are no whole numbers ({error})") from error
    if not numbers or max(numbers) > 999 or min(numbers) < 0:
        raise BadRow(f"nums is {numbers}; allowed: at least one number of 0 to 999")
    prompt = (
        f"Using the numbers {numbers}, write an expression that equals {target}. You may use "
        "+, -, *, / and brackets, and each number exactly once."
    )
    gold = {"target": target, "numbers": numbers}
    level = f"{len(numbers)} numbers"
    return Example(prompt=question(prompt), gold=gold, kind="countdown", level=level)


# The columns that show a layout, and its function. `auto` tries them in this order; where columns
# show nothing of their own there are none, and such data is `plain` unless it is named.
LAYOUTS: dict[str, tuple[tuple[str, ...], Adapter]] = {
    "humaneval": (("prompt", "entry_point", "test"), _humaneval),
    "livecodebench": (("question_content", "public_test_cases"), _livecodebench),
    "dapo": (("prompt", "reward_model"), _dapo),
    "countdown": (("target", "nums"), _countdown),
    "mmlu": (("question", "choices", "answer"), _mmlu),
    "svamp": (("Body", "Question", "Answer"), _svamp),
    "asdiv": (("body", "question", "answer"), _asdiv),
    "mawps": (("input", "target"), _mawps),
    "olympiadbench": (("question", "final_answer"), _olympiadbench),
    "gsm8k": (("question", "answer"), _gsm8k),
    "math": (("problem", "solution"), functools.partial(_solved, default="math")),
    "minerva": ((), functools.partial(_solved, default="minerva")),
    "aime": ((), _aime),
    "amc": ((), functools.partial(_pair, level="amc")),
    "plain": ((), functools.partial(_pair, level="plain")),
}


def recognise(row: dict) -> str:
    """The layout of a row by its columns; BadRow where it has no question or no answer."""
    for name, (columns, _) in LAYOUTS.items():
        if columns and all(column in row for column in columns):
            if name != "gsm8k" or "####" in str(row["answer"]):
                return name
    column(row, *PROMPTS)
    column(row, *ANSWERS)
    return "plain"


def adapter(layout: str, prompt_key: str = "", answer_key: str = "") -> Adapter:
    """The function of a layout; with keys, the one that reads just these columns."""
    if prompt_key or answer_key:
        return functools.partial(_keyed, prompt_key=prompt_key, answer_key=answer_key)
    return LAYOUTS[layout][1]


def _keyed(row: dict, prompt_key: str, answer_key: str) -> Example:
    name, gold = column(row, *([answer_key] if answer_key else ANSWERS))
    asked, prompt = column(row, *([prompt_key] if prompt_key else PROMPTS))
    return _math(prompt_of(prompt, asked), plain(gold, name), name, "plain")
