r"""Mathematical answers: where a completion states one, and whether it equals the right one.

What is equal is told by equality.py.
"""

from __future__ import annotations

import re

from xrpo_jax.types import Verdict
from xrpo_jax.verify.equality import NeedsAlgebra, Rules, same
from xrpo_jax.verify.extract import MAX_ANSWER, after_thinking, boxed, last_number, stated
from xrpo_jax.verify.spelling import balanced, clean
from xrpo_jax.verify.structure import parse


def right_answer(gold: object) -> str:
    """The right answer as text; ValueError that names `gold` where it could not be met."""
    text = str(gold) if isinstance(gold, str | int | float) and not isinstance(gold, bool) else ""
    if not clean(text):
        raise ValueError(f"gold={gold!r}; allowed: an answer that is not empty")
    text = boxed(text) or text
    if not balanced(text):
        raise ValueError(f"gold={gold!r}; allowed: LaTeX whose braces match")
    if len(text) > MAX_ANSWER:
        raise ValueError(f"gold of {len(text)} characters; allowed: at most {MAX_ANSWER}")
    return text


def answer_of(completion: str, *, last: bool = False, thinking: bool = False) -> str | None:
    """The answer that a completion states, as it is written; None where there is none.

    `last` takes the last number where nothing is stated.
    """
    found = stated(completion, thinking=thinking)
    if found is None and last:
        found = last_number(completion if thinking else after_thinking(completion) or "")
    if not found or len(found) > MAX_ANSWER or not clean(found) or not balanced(found):
        return None
    return found


def grade(
    completion: str,
    gold: str | int | float,
    *,
    last_number: bool = False,
    thinking: bool = False,
    **rules,
) -> Verdict:
    """Whether the completion's answer equals `gold`, computed in this process, without a deadline.

    `last_number`: take it where nothing is stated. `thinking`: read what stands before `</think>`,
    too. The others are those of `Rules`. Raises ValueError for a gold that no answer could meet.
    """
    rules = Rules(**rules)
    right = right_answer(gold)
    found = answer_of(completion, last=last_number, thinking=thinking)
    if found is None:
        return Verdict(status="unparsed", score=0.0, reason="no final answer found")
    found = _option(right, found)
    if same(parse(right), parse(found), rules):
        return Verdict(status="correct", score=1.0)
    return Verdict(status="wrong", score=0.0, reason=f"{found[:80]} is not {right[:80]}")


def _option(right: str, found: str) -> str:
    """The letter of "(B) 5" where the right answer is a letter alone."""
    if not re.fullmatch(r"\(?[A-J]\)?", clean(right)):
        return found
    match = re.match(r"\W*(?:text[a-z]*\{\W*)?([A-J])[).:}]+\s*\S", clean(found))
    match = match or re.fullmatch(r"(?i:option|choice)?[^\w-]*([A-J])\W*", clean(found))
    return match[1] if match else found


__all__ = ["NeedsAlgebra", "Rules", "answer_of", "grade", "right_answer"]
