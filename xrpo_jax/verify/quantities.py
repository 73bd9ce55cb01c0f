r"""Numbers with a percent sign, a unit or a word of size: `15\%`, `5 \text{ cm}^2`, 2 million."""

from __future__ import annotations

import re

from xrpo_jax.verify.spelling import number
from xrpo_jax.verify.units import CHANGING, UNITS

_LETTERS = "mgslLhNJWVAKC"  # that are units when they stand in \text or \mathrm
_SIZES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SIZED = re.compile(rf"(.+?)\s*(?:\\text\{{\s*)?({'|'.join(_SIZES)})s?\s*\}}?", re.IGNORECASE)
_FONT = r"\\(?:text|textrm|textbf|mbox|mathrm|operatorname|rm)\s*"
_POWER = r"(?:\s*\^\{?-?[0-9]\}?)?"
_WRAPPED = re.compile(
    rf"(.*?[^\s])((?:\s*(?:/|\\cdot)?\s*{_FONT}\{{[^{{}}]*\}}{_POWER})+)", re.DOTALL
)
_KNOWN = "|".join(
    sorted((re.escape(name) for name in UNITS if len(name) > 1), key=len, reverse=True)
)
_ATOM = rf"(?:{_KNOWN}|[mgsNJWVK](?![A-Za-z]))s?{_POWER}"
# Bare words: any after a number and a space, known units after anything.
_BARE = re.compile(
    rf"(.*?[0-9}})\]])((?: \(?(?:[A-Za-z]{{3,}}|sq|of|in|a|{_KNOWN})\.?\)?)+{_POWER})"
)
_ATTACHED = re.compile(
    rf"(.*?[0-9}})\]])\s*((?:sq\s|square\s|cubic\s)?(?:{_KNOWN})s?(?![A-Za-z]){_POWER}"
    rf"(?:\s*/\s*{_ATOM})*|[mgsJN](?:\s*/\s*{_ATOM})+)\.?"
)
_CHINESE = re.compile(r"(.*?[0-9}])\s*([㐀-鿿]{1,4})")
_WARM = re.compile(r"(.+?)\s*°\s*(?:\\(?:text|mathrm)\s*\{\s*([CF])\s*\}|([CF]))")


def quantity(text: str, *, expression: bool = False):
    r"""The fields of a number node with its value, percent sign and unit; None if it is none.

    With `expression`, what stands before the unit, and the unit, of an expression that has one.
    """
    if not expression:
        bare = _plain(text)
        if bare is not None:
            return bare
    for pattern in (_WARM, _WRAPPED, _ATTACHED, _CHINESE, _BARE):
        match = pattern.fullmatch(text)
        if not match or (expression and pattern in (_CHINESE, _BARE)):
            continue
        words = _words(match, pattern is _WRAPPED)
        if words is None:
            continue
        inner = match[1].strip().removesuffix("\\").strip()
        if expression:
            if re.search(r"[=,<>;]|\\text|\\pm", inner):
                continue
            return inner, words
        found = _plain(inner)
        if found is not None and not found["unit"]:
            return found | {"unit": words}
    if expression:
        rest = text.removesuffix("°").strip()
        whole = re.fullmatch(r"\(.*\)|\\frac.*", rest)
        if text.endswith("°") and whole and not re.search(r"[=,<>;°]|\\(?:sin|cos|tan)", rest):
            return rest, "°"
        return None
    sized = _SIZED.fullmatch(text)
    if sized:
        found = _plain(sized[1].strip())
        if found is not None and not found["percent"]:
            return found | {"value": found["value"] * 10 ** _SIZES[sized[2].lower()]}
    return None


def _words(match: re.Match, wrapped: bool) -> str | None:
    """The unit that a match has; None for words that are none."""
    if match.re is _WARM:
        return {"C": "celsius", "F": "fahrenheit"}[match[2] or match[3]]
    words = re.sub(rf"{_FONT}\{{([^{{}}]*)\}}", r" \1 ", match[2]) if wrapped else match[2]
    words = re.sub(r"\s+(?=\^)", "", " ".join(words.replace("\\", " ").split()))
    if CHANGING.search(words) or re.search(r"[0-9](?<!\^[0-9])(?<!\^\{[0-9])(?<!-[0-9])", words):
        return None
    if re.search(r"[(){}=<>+,;:?!\"]", words.replace("^{", "").replace("}", "")):
        return None
    single = re.findall(r"(?<![A-Za-z.])[A-Za-z](?![A-Za-z.])", words)
    if any(letter not in _LETTERS + "a" for letter in single) or not words.strip():
        return None
    return words


def _plain(text: str) -> dict | None:
    """A number alone, with its sign for dollars, percent or degrees."""
    money = re.fullmatch(r"([+-]?)\s*\\\$\s*(.+)", text)
    bare = money[1] + money[2] if money else text
    bare, percent = bare.removesuffix("%").strip(), bare.endswith("%")
    degrees = bare.endswith("°")
    bare = bare.removesuffix("°").strip()
    value = number(bare)
    if value is None:
        return None
    unit = "dollar" if money else "°" if degrees else ""
    return {"value": value, "percent": percent, "text": bare, "unit": unit}
