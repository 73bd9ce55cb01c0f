"""Completions with their right answers as lines of JSON: read and checked, then graded."""

from __future__ import annotations

import json

from xrpo_jax.types import Verdict
from xrpo_jax.verify import math
from xrpo_jax.verify.choice import LETTERS, grade_choice
from xrpo_jax.verify.code import grade_code
from xrpo_jax.verify.code_cases import read_tests

KINDS = ("math", "code", "choice")


def read(path: str, kind: str) -> list[dict]:
    """The lines of a file of one kind; ValueError names the line and what is wrong with it."""
    rows = []
    with open(path, encoding="utf-8") as lines:
        for place, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                _check(row, kind)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {place}: {error}") from None
            rows.append(row)
    if not rows:
        raise ValueError(f"{path} has no lines")
    return rows


def _check(row: object, kind: str) -> None:
    if not isinstance(row, dict):
        raise ValueError(f"a {type(row).__name__}; allowed: an object with completion and gold")
    if not isinstance(row.get("completion"), str):
        raise ValueError(f"completion={row.get('completion')!r}; allowed: text")
    if kind == "code":
        read_tests(row.get("tests"), row.get("entry_point", ""))
    elif kind == "choice":
        grade_choice("", row.get("gold"), letters=row.get("letters", LETTERS))
    else:
        math.right_answer(row.get("gold"))


def grade_line(kind: str, rules: dict, row: dict) -> Verdict:
    """The verdict on a line that `read` returned; `rules` are for mathematics."""
    if kind == "code":
        names = ("entry_point", "prefix", "mode")
        return grade_code(
            row["completion"], row["tests"], **{name: row[name] for name in names if name in row}
        )
    if kind == "choice":
        return grade_choice(row["completion"], row["gold"], letters=row.get("letters", LETTERS))
    return math.grade(row["completion"], row["gold"], **rules)
