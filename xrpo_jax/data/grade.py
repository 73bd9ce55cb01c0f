r"""What a completion answers, and whether that equals the right answer: exact and bounded.

An answer has one spelling that stands for all that count as equal: a number is its reduced
fraction, everything else is its LaTeX without the parts that only change its looks. Units after a
number are dropped and not compared. What takes algebra (`x(x+1)` against `x^2+x`, sets in another
order) counts as different: such answers are graded wrong, never right by accident.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_ANSWER = 1000  # characters; what is longer is no final answer

_WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_UNSIGNED = rf"(?:{_WHOLE}(?:\.[0-9]*)?|\.[0-9]+)"
_SIGNED = rf"[+-]?{_UNSIGNED}"
_PLAIN = re.compile(
    rf"({_SIGNED})(?:(?:[eE]|\s*(?:\\times|\\cdot)\s*10\s*\^\s*)\{{?([+-]?[0-9]{{1,3}})\}}?)?"
)
_RATIO = re.compile(
    rf"([+-]?)(?:(?:([0-9]+)\ ?)?\\frac\s?\{{({_SIGNED})\}}\s?\{{({_SIGNED})\}}"
    rf"|(?:([0-9]+)\ )?\(?({_UNSIGNED})\s?/\s?({_UNSIGNED})\)?)"
)
_LAST = re.compile(
    rf"(?:(?<![0-9A-Za-z)}}])-)?{_UNSIGNED}(?:/[0-9]+|[eE][+-]?[0-9]{{1,3}})?(?:\\?%)?"
)
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?:\s*\{|\s*(?=[0-9\\-]))")
_LABEL = re.compile(r"(?:\banswer\b[*_]*\s*(?:is|=|:|：)|答案\s*[:：是])[*_:：\s]*", re.IGNORECASE)
# What explains an answer after it.
_REASON = re.compile(
    r"(?i),?\s+(?:because|since|which|as|so|where|that is|i\.e\.)\s|(?<=[0-9$]),\s+(?=[a-z]{3})"
)
_HASH = re.compile(r"\s*[-+$(.\\]*[0-9\\].*")
_TEXT = r"\\(?:text[a-z]*|mbox|mathrm|mathbf|operatorname|rm)\s*\{([^{}]*)\}"
# Words after a number are its unit, save those that change the value.
_NO_UNIT = (
    r"(?!\s*(?:hundred|thousand|[mbtr]+illion|dozen|half|squared|cubed|factorial|pi\b|[ije]\}))"
)
_UNIT = re.compile(
    rf"(.*?[0-9}}.])(?:\s*\\(?:text|textrm|mbox|mathrm|rm)\s*\{{{_NO_UNIT}[^{{}}0-9]*\}}"
    r"(?:\^\{?-?[0-9]\}?)?)+"
)
_UNIT_WORDS = re.compile(
    rf"(.*?[0-9}}.])(?: {_NO_UNIT}(?:[A-Za-z]{{3,}}|[cmkn]m|[km]g|m[lL]|ft|in|oz|lb|mi|hr)\.?)+"
    r"(?:\^\{?[0-9]\}?)?"
)
_SIGNS = str.maketrans(
    {chr(0xFF01 + i): chr(0x21 + i) for i in range(94)}  # full-width characters
    | {"−": "-", "–": "-", "⁄": "/", "½": "1/2", "π": r"\pi", "°": "", "∞": r"\infty", "\u202f": ""}
    | {"×": r"\times ", "·": r"\cdot ", "≤": r"\le ", "≥": r"\ge ", "√": r"\sqrt"}
)
_REWRITES = [
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\\[()\[\]]|\\?\$|[€£¥]", ""),
        (r",\s*\\!\s*|\{,\}", ","),  # thousands as LaTeX spaces them
        (r"(?<!\\)\\[,;:!]", ""),
        (r"(?<!\\)\\ |~|\\q?quad(?![A-Za-z])", " "),
        (r"\\(?:left|right|displaystyle|big[lr]?)(?![A-Za-z])", ""),
        (r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\degree(?![A-Za-z])", ""),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\frac\s*([0-9])", r"\\frac{\1}"),
        (r"(\\frac\s*\{[^{}]*\})\s*([0-9])", r"\1{\2}"),
        (r"\\sqrt\s*([0-9A-Za-z])", r"\\sqrt{\1}"),
        (r"\\%|\s*\bpercent\b", "%"),
    )
]
# `x =`, `f(x) =` and `x \in` before the answer; not where another equation follows.
_NAMED = re.compile(
    r"\s*(?:\\[A-Za-z]+|[A-Za-z])(?:_\{?\w+\}?)?(?:\([A-Za-z]\))?\s*(?:=|\\in(?![A-Za-z]))(?!.*=)"
)
_LOOSE_SPACE = re.compile(
    r"(?<![0-9A-Za-z]) | (?![0-9A-Za-z])|(?<=[0-9]) (?=[A-Za-z])|(?<=[A-Za-z]) (?=[0-9])"
)


def _final(pattern: re.Pattern, text: str) -> re.Match | None:
    found = None
    for match in pattern.finditer(text):
        found = match
    return found


def boxed(text: str) -> str | None:
    r"""What the last \boxed{} holds; "" if it is empty or cut off, None if there is no box."""
    last = _final(_BOX, text)
    if last is None:
        return None
    if not last[0].endswith("{"):  # `\boxed 8` and `\boxed\frac{1}{3}`
        return re.match(r"[^\s$]*", text[last.end() : last.end() + MAX_ANSWER])[0].rstrip(".,")
    depth, inside = 1, text[last.end() : last.end() + MAX_ANSWER + 1]
    for brace in re.finditer(r"\\.|[{}]", inside, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return inside[: brace.start()].strip()
    return ""


def stated(completion: str) -> str | None:
    r"""The answer as the text states it; "" where it is cut off, None where nothing is stated.

    In this order: the last box, `<answer>`, `#### x`, "the answer is x"; after the thinking only.
    """
    text = completion.rpartition("</think>")[2]
    if "<think>" in text:  # still thinking: what it holds so far is no answer
        return ""
    box = boxed(text)
    if box is not None:
        return box
    start = text.rfind("<answer>")
    if start >= 0:
        end = text.find("</answer>", start)
        return text[start + len("<answer>") : end].strip() if end >= 0 else ""
    start = text.rfind("####")
    marked = _HASH.match(text, start + 4) if start >= 0 else None  # not of a Markdown heading
    if marked:
        return marked[0].strip()
    label = _final(_LABEL, text)
    if label:
        line = text[label.end() : label.end() + 2 * MAX_ANSWER].partition("\n")[0]
        line = _REASON.split(line, maxsplit=1)[0]
        return re.split(r"\.(?:\s|$)|。", line, maxsplit=1)[0].strip(" *_") or None
    return None


def math_answer(completion: str) -> str | None:
    """The one spelling of the answer: stated, or else the last number; None if there is none."""
    found = stated(completion)
    if found is None:
        last = _final(_LAST, completion.rpartition("</think>")[2].translate(_SIGNS))
        found = last[0] if last else None
    return canonical(found) if found else None


def choice_answer(completion: str, letters: str) -> str | None:
    """The letter chosen out of `letters`; None if there is none."""
    found = stated(completion)
    if found is None:  # a letter alone on the last line, or "B) ..." from the start
        text = completion.rpartition("</think>")[2].strip()[-MAX_ANSWER:]
        match = re.fullmatch(r"\W*([A-Z])\W*", text.rpartition("\n")[2])
        match = match or re.match(r"\W*([A-Z])[).:]", text)
    else:
        match = re.match(
            r"(?i:\W|option\b|choice\b|text[a-z]*\{)*([A-Z]|(?<=\()[a-z](?=\)))(?![A-Za-z0-9'])",
            found[:MAX_ANSWER],
        )
    if not match and found and re.fullmatch(r"\W*[a-z]\W*", found):
        match = re.fullmatch(r"\W*([a-z])\W*", found)
    letter = match[1].upper() if match else ""
    return letter if letter and letter in letters else None


def equal(gold: str, found: str) -> bool:
    """Whether two canonical answers are equal; 15% equals 15%, 0.15 and 15, as golds vary."""
    if gold == found:
        return True
    percent, plain = (gold, found) if gold.endswith("%") else (found, gold)
    value = _value(percent[:-1]) if percent.endswith("%") else None
    return value is not None and plain in (str(value), str(value / 100))


def canonical(text: str) -> str | None:
    """The one spelling of an answer; None where nothing is left, or too much to be an answer."""
    if len(text) > MAX_ANSWER:
        return None
    text = text.translate(_SIGNS)
    for pattern, new in _REWRITES:
        text = pattern.sub(new, text)
    text = _NAMED.sub("", text, count=1) if _NAMED.match(text) else text
    unit = _UNIT.fullmatch(text.strip(" ."))
    if unit and _value(unit[1].strip()) is not None:
        text = unit[1]
    text = re.sub(_TEXT, r" \1 ", text)
    text = re.sub(r"\s+", " ", text).lstrip(" *").rstrip(" .,;:*\\")
    text = re.sub(r"^\{([^{}]*)\}$|^\(([A-Za-z]|[0-9]+)\)$", r"\1\2", text)
    unit = _UNIT_WORDS.fullmatch(text)
    if unit and _value(unit[1]) is not None:
        text = unit[1]
    percent = "%" if text.endswith("%") else ""
    value = _value(text.removesuffix("%").strip())
    if value is not None:
        return f"{value}{percent}"
    text = re.sub(r" ?, ?", ", ", _LOOSE_SPACE.sub("", text))
    words = re.fullmatch(r"[A-Za-z0-9' .:,-]*", text) and re.search(r"[A-Za-z]{3}", text)
    return (text.lower() if words else text) or None


def _value(text: str) -> Fraction | None:
    """A decimal, a fraction or a mixed number, exactly; None where the text is something else."""
    match = _PLAIN.fullmatch(text)
    if match:
        digits = match[1].replace(",", "")
        value = Fraction(digits)
        places = len(digits.partition(".")[2])
        # 0.6666666667 is how some golds and many answers write 2/3.
        if places >= 10:
            near = value.limit_denominator(1000)
            value = near if abs(near - value) * 10**places < 1 else value
        return value * Fraction(10) ** int(match[2] or 0)
    match = _RATIO.fullmatch(text)
    if not match:
        return None
    sign, *parts = match.groups()
    whole, top, bottom = parts[:3] if parts[1] else parts[3:]
    top, bottom = (Fraction(part.replace(",", "")) for part in (top, bottom))
    if bottom == 0:
        return None
    value = Fraction(whole or 0) + top / bottom
    return -value if sign == "-" else value
