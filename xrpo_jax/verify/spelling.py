r"""One spelling for what only looks different: LaTeX without its layout, and exact numbers.

`clean` keeps the value of any answer; `number` reads decimals, fractions, mixed numbers, scientific
notation and repeating decimals as exact fractions.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from fractions import Fraction

MAX_DIGITS = 2000  # of a number that is read exactly

_WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_UNSIGNED = rf"(?:{_WHOLE}(?:\.[0-9]*)?|\.[0-9]+)"
_SIGNED = rf"[+-]?\s?{_UNSIGNED}"
_PLAIN = re.compile(
    rf"({_SIGNED})(?:(?:[eE]|\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*)"
    r"\{?\s*([+-]?[0-9]{1,3})\s*\}?)?"
)
_RATIO = re.compile(
    rf"([+-]?)\s?(?:(?:([0-9]+)\ ?)?\\frac\s?\{{({_SIGNED})\}}\s?\{{({_SIGNED})\}}"
    rf"|(?:([0-9]+)\ )?\(?({_UNSIGNED})\s?/\s?({_UNSIGNED})\)?)"
)
_REPEATING = re.compile(
    r"([+-]?)([0-9]*)\.([0-9]*)(?:\\(?:overline|bar|dot)\{?([0-9]+)\}?|\(([0-9]+)\))"
)
_RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-", strict=True))
_SIGNS = str.maketrans(
    {"½": " 1/2", "⅓": " 1/3", "⅔": " 2/3", "¼": " 1/4", "¾": " 3/4", "º": "°", "′": "'"}
    | {"−": "-", "–": "-", "⁄": "/", "，": ",", "：": ":", "∶": ":", "。": ".", "·": r"\cdot "}
    | {"∞": r"\infty ", "×": r"\times ", "÷": "/", "⋅": r"\cdot ", "∙": r"\cdot ", "±": r"\pm "}
    | {"≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx "}
    | {"∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}"}
    | {"⟨": r"\langle ", "⟩": r"\rangle ", "∨": r"\lor ", "∧": r"\land ", "…": r"\dots "}
    | {"⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "∓": r"\mp "}
    | {"π": r"\pi ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "φ": r"\varphi "}
    | {"λ": r"\lambda ", "μ": r"\mu ", "σ": r"\sigma ", "ω": r"\omega ", "γ": r"\gamma "}
    | {"“": '"', "”": '"', "\u202f": "", "\u2009": "", "\xa0": " ", "€": "", "£": "", "¥": ""}
    | dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u00ad", "")  # without width
)
# √12 is one numeral, \sqrt12 is not.
_ROOT = re.compile(r"([√∛])\s*([0-9]+|[A-Za-z]|\([^()]*\)|\{[^{}]*\})")
_FONT = (
    r"\\(?:mathbf|mathrm|mathit|mathsf|boldsymbol|text[a-z]*|mbox|operatorname\*?|emph|rm|bm)\s*"
)
_LOOKS = [
    (re.compile(pattern), new)
    for pattern, new in (
        (r"(?<=\\\\)\[[0-9.]+[a-z]+\]", ""),  # \\[2mm]
        (r"(?<!\\)\\[()\[\]]|(?<!\\)\$|US\s*(?=\\\$)|\\(?:euro|pounds)(?![A-Za-z])|₹", ""),
        (r"\\(?:color|textcolor)\s*\{[^{}]*\}", ""),
        (r"\\rm\s+([A-Za-z]+)$", r"\\mathrm{\1}"),
        (r"^([^{}]*)\\over(?![A-Za-z])([^{}]*)$", r"\\frac{\1}{\2}"),
        (r"\{\\(?:rm|bf|it|sf)\s+([^{}]*)\}", r"\\mathrm{\1}"),
        # Thousands as LaTeX spaces them.
        (r"(?<=[0-9])(?:,\s*\\!\s*|\{,\}|\\[,;: ]|~|(?<=[0-9]),\\ )(?=[0-9]{3}(?![0-9]))", ""),
        (r"\{,\}", ","),
        (r"(?<![0-9.,])([0-9]{1,3})((?: [0-9]{3})+)(?![0-9])", lambda m: m[0].replace(" ", "")),
        (r"(?<!\\)\\[,;:!]", " "),
        (r"(?<!\\)\\ |~|\\q?quad(?![A-Za-z])|\\(?:hspace|vspace|phantom)\{[^{}]*\}", " "),
        (r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![A-Za-z])\.?", ""),
        (r"\\(?:displaystyle|textstyle|limits)(?![A-Za-z])", ""),
        (r"(?<=[0-9])\s*\^\s*\{?(?:\\text\s*\{)?o\}?\}?(?![A-Za-z])", "°"),
        (r"\^\s*\{?\s*\\(?:circ|degree)(?![A-Za-z])\s*\}?|\\degree(?![A-Za-z])", "°"),
        (r"\{([0-9.]+)\}(?=°)", r"\1"),
        (r"\\(?:[dtc]frac|nicefrac|sfrac)(?![A-Za-z])", r"\\frac"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}", r"\\frac{\1}{\2}"),
        (r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}", r"\\binom{\1}{\2}"),
        (r"\\(?:mid|[lr]?vert)(?![A-Za-z])", "|"),
        (r"\\[lcdv]?dots[bcimo]?(?![A-Za-z])|\.{3,}", r"\\dots "),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset "),
        (r"\\bigcup(?![A-Za-z])", r"\\cup "),
        (r"\\vee(?![A-Za-z])", r"\\lor "),
        (r"\\wedge(?![A-Za-z])", r"\\land "),
        (r"\\(?:leq|leqslant)(?![A-Za-z])|<=", r"\\le "),
        (r"\\(?:geq|geqslant)(?![A-Za-z])|>=", r"\\ge "),
        (r"\\(?:neq|not\s*=)(?![A-Za-z])|!=", r"\\ne "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\over(?:right|left)arrow(?![A-Za-z])", r"\\vec"),
        (r"\\%|\s*\bpercent\b", "%"),
        (r"\*\*(?=[0-9A-Za-z({\\-])", "^"),
        (r"(?<=[0-9])\s*[xX]\s*(?=10\s*\^)", r"\\times "),
        (rf"(?:{_FONT})?\{{\s*([-+])\s*\}}", r"\1"),
        # Fonts around what is no word: one letter or digits; after a number it may be a unit.
        (r"\s+", " "),
        (rf"(?<![0-9}}/])(?<![0-9}}/]\s)(?<!cdot)(?<!cdot\s){_FONT}\{{\s*([A-Za-z])\s*\}}", r"\1"),
        (rf"{_FONT}\{{\s*([-+]?[0-9][0-9.,]*)\s*\}}", r"\1"),
        (rf"{_FONT}\{{\s*([abcefijknopqrtuvwxyz])\s*\}}", r"\1"),
        # Functions as plain text has them.
        (r"(?<![\\A-Za-z])(sqrt)\s*\(([^()]*)\)", r"\\sqrt{\2}"),
        (r"(?<![\\A-Za-z{])((?:arc)?(?:sin|cos|tan)|cot|sec|csc|ln|log|pi)(?![A-Za-z}])", r"\\\1 "),
        (r"(?<![\\A-Za-z])(?:infinity|infty|oo)(?![A-Za-z])", r"\\infty "),
    )
]  # fmt: skip
_WRAPPED = re.compile(
    r"\\(?:text[a-z]*|mbox|math(?:rm|bf|it|sf|tt)|operatorname|boxed|fbox|underline|emph)"
    r"\s*\{([^{}]*)\}\.?"
)


@functools.lru_cache(maxsize=20_000)
def clean(text: str) -> str:
    """The answer without what only changes its looks; single spaces, ASCII for the usual signs."""
    text = _ROOT.sub(_root, text)
    text = re.sub(f"[{''.join(_RAISED)}]+", _power, text).translate(_SIGNS)
    text = unicodedata.normalize("NFKC", text)
    for pattern, new in _LOOKS:
        text = pattern.sub(new, text)
    text = _arguments(text)
    text = _trimmed(re.sub(r"\s+", " ", text))
    while True:  # `{{7}}`, `\text{ 7 }`
        inner = _braced(text)
        wrapped = _WRAPPED.fullmatch(text)
        if inner is None and wrapped is None:
            return text
        text = _trimmed(wrapped[1] if inner is None else inner)


def _root(match: re.Match) -> str:
    degree = "[3]" if match[1] == "∛" else ""
    return rf"\sqrt{degree}{{{match[2].strip('{}')}}}"


def _power(match: re.Match) -> str:
    return f"^{{{''.join(_RAISED[sign] for sign in match[0])}}}"


def _trimmed(text: str) -> str:
    text = text.lstrip(" *\"`'").rstrip(' .,;:*"`\\')
    return text[1:].lstrip() if text.startswith("=") else text


def _arguments(text: str) -> str:
    r"""`\frac12`, `\frac\pi6`, `\frac{\sqrt2}2` and `\sqrt2` with braces around their arguments."""
    parts, begin = [], 0
    for match in re.finditer(r"\\(frac|binom|sqrt)(?![A-Za-z])", text):
        if match.start() < begin:
            continue
        end = match.end()
        if match[1] == "sqrt":
            degree = re.compile(r"\s*\[[^\[\]]*\]").match(text, end)
            end = degree.end() if degree else end
        arguments = []
        for _ in range(1 if match[1] == "sqrt" else 2):
            argument = _argument(text, end)
            if argument is None:
                break
            arguments.append(argument[0])
            end = argument[1]
        head = text[begin : match.end()] + (
            degree[0].strip() if match[1] == "sqrt" and degree else ""
        )
        parts.append(head + "".join(f"{{{_arguments(inner)}}}" for inner in arguments))
        begin = end
    return "".join(parts) + text[begin:]


def _argument(text: str, place: int) -> tuple[str, int] | None:
    """The argument of a command from `place` on, and where it ends."""
    match = re.compile(r"\s*(?:([0-9A-Za-z])|(\\[A-Za-z]+)\s*|(\{))").match(text, place)
    if not match:
        return None
    if match[1]:
        return match[1], match.end()
    if match[2] and match[2] not in (r"\frac", r"\sqrt", r"\binom", r"\text", r"\mathrm"):
        return match[2], match.end()
    if match[2]:  # its own arguments belong to it
        end = match.end()
        while (inner := re.compile(r"\{").match(text, end)) or (
            match[2] == r"\sqrt" and end == match.end() and text[end : end + 1].isalnum()
        ):
            end = _closing(text, end) if inner else end + 1
            if end is None:
                return None
        return text[match.start(2) : end], end
    end = _closing(text, match.start(3))
    return None if end is None else (text[match.end() : end - 1], end)


def _closing(text: str, place: int) -> int | None:
    """Where the braces that open at `place` have closed."""
    depth = 0
    for brace in re.compile(r"\\.|[{}]").finditer(text, place):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return brace.end()
    return None


def _braced(text: str) -> str | None:
    """What one pair of braces around the whole text holds."""
    if not (text.startswith("{") and text.endswith("}") and not text.endswith("\\}")):
        return None
    return text[1:-1] if _closing(text, 0) == len(text) else None


def balanced(text: str) -> bool:
    r"""Whether the braces of a LaTeX text match; `\{` and `\}` do not count."""
    depth = 0
    for brace in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth < 0:
            return False
    return depth == 0


def number(text: str) -> Fraction | None:
    """The exact value of a decimal, fraction or mixed number; None for anything else.

    Percent and units are the caller's. A numeral of over 2000 digits is none.
    """
    if len(text) > MAX_DIGITS:
        return None
    match = _PLAIN.fullmatch(text)
    if match:
        value = Fraction(match[1].replace(",", "").replace(" ", ""))
        return value * Fraction(10) ** int(match[2] or 0)
    match = _RATIO.fullmatch(text)
    if match:
        sign, *parts = match.groups()
        whole, top, bottom = parts[:3] if parts[1] else parts[3:]
        top, bottom = (Fraction(part.replace(",", "").replace(" ", "")) for part in (top, bottom))
        if bottom == 0:
            return None
        value = Fraction(whole or 0) + top / bottom
        return -value if sign == "-" else value
    match = _REPEATING.fullmatch(text)
    if match:
        sign, whole, fixed, *cycle = match.groups()
        cycle = cycle[0] or cycle[1]
        value = Fraction(int(whole + fixed or "0")) + Fraction(int(cycle), 10 ** len(cycle) - 1)
        value /= 10 ** len(fixed)
        return -value if sign == "-" else value
    return None


def decimals(text: str) -> tuple[int, int]:
    """Places after the point of a plain decimal, and its significant digits; 0, 0 for others."""
    match = re.fullmatch(r"[+-]?([0-9,]*)\.([0-9]+)", text)
    if not match:
        return 0, 0
    return len(match[2]), len((match[1].replace(",", "") + match[2]).lstrip("0"))
