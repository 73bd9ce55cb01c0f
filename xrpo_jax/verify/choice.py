"""Multiple-choice letters."""

from __future__ import annotations

import re

from xrpo_jax.types import Verdict
from xrpo_jax.verify.extract import MAX_ANSWER, after_thinking, stated

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_CHOSEN = re.compile(
    r"(?i:[^\w\-+=]|option\b|choice\b|\\?(?:text|math)[a-z]*\{)*"
    r"([A-Z]|(?<=\()[a-z](?=\)))(?![A-Za-z0-9'^_+*/=-])"
)
_SAID = re.compile(
    r"(?i:\b(?:correct|right|best)\s+(?:option|choice)\s*(?:is|:)"
    r"|\banswer\s+(?:must|should|would)\s+be|\b(?:I|we)\s+(?:choose|pick|select)|\bit(?:'s|\s+is))"
    r"\s*(?i:option\b|choice\b)?\W*([A-Z])(?![A-Za-z0-9'])"
    r"|(?<![A-Za-z0-9'])([A-Z])\)?\s+(?i:is\s+(?:the\s+)?(?:correct|right))(?![A-Za-z])"
)
# What takes the letter back, or names another: "A or B", "A, C", "A is wrong", "A man".
_ANOTHER = re.compile(
    r"[\s,;/&}\\]*(?:(?:text\s*\{)?\s*(?:and|or)\b[\s}]*)?\W*(?:boxed\s*\{\s*)?"
    r"([A-Z])(?![A-Za-z0-9'])"
)
_DENIED = re.compile(r"\W*(?:is|was)\s+(?:not|wrong|incorrect|false)|\s+(?:man|woman|person)\b")
_ARTICLE = re.compile(r" (?!(?:because|since|as|so|which|is|for|by|due|from|if|when|the)\b)[a-z]")


def choice(completion: str, letters: str = LETTERS, *, thinking: bool = False) -> str | None:
    """The letter chosen out of `letters`, capital; None where there is none, or several are named.

    It stands where an answer is stated (see extract.py), in "C is correct" and the like, alone on
    the last line, or at the head of the text as in "B) five"; a letter out of range is none.
    """
    found = stated(completion, thinking=thinking)
    letter = None
    if found is None:
        text = completion if thinking else after_thinking(completion)
        letter = _unstated(text.strip()[-2 * MAX_ANSWER :])
    else:
        found = found[:MAX_ANSWER]
        match = _CHOSEN.match(found) or re.fullmatch(r"\W*([a-z])\W*", found)
        if match and not _several(found[match.end() :], match[1], letters):
            letter = match[1].upper()
    return letter if letter and letter in letters else None


def _several(rest: str, letter: str, letters: str) -> bool:
    """Whether what follows a letter denies it, names another, or shows it to be a word."""
    another = _ANOTHER.match(rest)
    if another and another[1] in letters and another[1] != letter:
        return not re.match(r"\W*[).:]\s*[A-Z]", rest)  # "A. E" may be option A, whose text is E
    return bool(_DENIED.match(rest) or (letter in "AI" and _ARTICLE.match(rest)))


def _unstated(text: str) -> str | None:
    said = None
    for match in _SAID.finditer(text):
        said = match
    if said:
        return said[1] or said[2]
    match = re.fullmatch(r"\W*([A-Z])\W*", text.rpartition("\n")[2])
    if match:
        return match[1]
    heads = re.findall(r"(?m)^\W*([A-Z])[).:]", text)
    match = re.match(r"\W*([A-Z])[).:]", text)
    if not match or len(heads) > 1 or _DENIED.match(text[match.end() :]):
        return None
    return match[1]


def grade_choice(
    completion: str, gold: str, *, letters: str = LETTERS, thinking: bool = False
) -> Verdict:
    """Whether the completion chooses the letter `gold` out of `letters`.

    `thinking` reads what stands before `</think>`, too. Raises ValueError for a gold that is none
    of the letters.
    """
    right = gold.strip(" ().").upper() if isinstance(gold, str) else ""
    if len(right) != 1 or right not in letters:
        raise ValueError(f"gold={gold!r}; allowed: one of the letters {letters}")
    found = choice(completion, letters, thinking=thinking)
    if found is None:
        return Verdict(status="unparsed", score=0.0, reason=f"no letter of {letters} chosen")
    if found == right:
        return Verdict(status="correct", score=1.0)
    return Verdict(status="wrong", score=0.0, reason=f"{found} is not {right}")
