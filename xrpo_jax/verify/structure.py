r"""What kind of thing an answer is: number, text, list, set, tuple, interval, relation, matrix ...

An answer is a tree of `Node`s whose leaves are exact numbers, words, or LaTeX of one expression.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from fractions import Fraction

from xrpo_jax.verify.quantities import quantity
from xrpo_jax.verify.spelling import clean

MAX_DEPTH = 30
MAX_MEMBERS = 200


@dataclasses.dataclass(frozen=True, kw_only=True)
class Node:
    r"""One answer or part of one.

    kind: number (`value`, `percent`, `unit`) · text · expression (LaTeX in `text`) · based (a
    numeral in `text`, its base in `value`) · list, set (unordered) · chain (all of one value) ·
    sequence (with dots), ratio, parts (ordered) · tuple (`text` holds its two brackets; an interval
    is one, too) · union · matrix (of tuples) · relation (`text` the operator, `named` for
    `x = ...`) · dots · empty.
    `name` is the variable of an interval that was written as an inequality.
    """

    kind: str
    text: str = ""
    parts: tuple[Node, ...] = ()
    value: Fraction | None = None
    percent: bool = False
    unit: str = ""
    name: str = ""


EMPTY = Node(kind="set")
INFINITY = r"\infty"
_DOTS = r"\dots"
_TEXT = re.compile(r"\\(?:text[a-z]*|mbox|mathrm|mathbf|mathit|operatorname\*?)\s*\{([^{}]*)\}")
_FUNCTIONS = re.compile(
    r"\\?\b(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?\b|\\?\b(?:ln|log|exp|max|min|gcd|lcm|mod|bmod)\b"
)
_GREEK = (
    r"\\(?:alpha|beta|gamma|delta|epsilon|varepsilon|theta|lambda|mu|nu|rho|sigma|tau|phi|varphi|"
    r"omega|Delta|Omega|Phi|Theta|ell)(?![A-Za-z])"
)
_INDEX = r"(?:_(?:[A-Za-z0-9]|\{[^{}]{1,20}\}|\\[a-z]+))?'{0,2}"
SYMBOL = rf"(?:[A-Za-z]|{_GREEK}){_INDEX}"
# What an answer is the value of: x, AB, Area, f(x), f(3), |A|, \vec{v}, \angle ABC, m + n.
NAMED = re.compile(
    rf"\s*(?:{SYMBOL}(?:\s*\([A-Za-z0-9](?:,\s?[A-Za-z0-9])*\))?|[A-Z]{{2,4}}|[A-Z][a-z]{{2,20}}|"
    rf"[a-z]{{4,20}}|\|\s*[A-Za-z]{{1,2}}\s*\||\\(?:vec|hat|bar|overline)\s*"
    rf"(?:\{{[A-Za-z]{{1,2}}\}}|[A-Za-z])|"
    rf"\\(?:angle|triangle)\s*[A-Z]{{1,3}}|\\text\{{[^{{}}]*\}}|[a-z](?:\s*[+-]\s*[a-z]){{1,5}})\s*"
)
# (x, y)
TUPLE_NAMED = re.compile(rf"\s*\(\s*{SYMBOL}(?:\s*,\s*{SYMBOL}){{1,5}}\s*\)\s*")
_REALS = r"(?:\\mathbb\s*\{?R\}?|\(-\\infty,\s*\+?\\infty\))"
_WITHOUT = re.compile(rf"{_REALS}\s*(?:\\(?:setminus|backslash)|-|\\)\s*\\\{{(.*)\\\}}")
_BUILDER = re.compile(
    rf"\\\{{\s*(?:\(?[a-z](?:,\s?[a-z])*\)?)(?:\s*\\in\s*{_REALS})?\s*[:|]\s*(.+)\\\}}"
)
_BASED = re.compile(r"\(?([0-9A-F]+)\)?_(?:\{([0-9]+)\}|([0-9]+))")
_DATE = re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}|[0-9]{1,2}/[0-9]{1,2}/[0-9]{4}")
_PARTS = re.compile(r"(?:^|[\s,;])(?:\\text\{)?\(([a-e]|i{1,3}|[1-5])\)\}?\s*")
_MATRIX = re.compile(
    r"(.*?)[(\[]?\s*\\begin\{((?:[pbB]|small)?)matrix\}(.*)\\end\{\2matrix\}\s*[)\]]?"
    r"|()[(\[]?\s*\\begin\{(array)\}\s*\{[lcr| ]*\}(.*)\\end\{array\}\s*[)\]]?"
)
_THOUSANDS = re.compile(r"(?<![0-9,.])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]|,[0-9])")
_RELATION = re.compile(r"\\(?:le|ge|ne|in|approx|equiv)(?![A-Za-z])|[=<>]")
_AND = r"(?<![A-Za-z\\])and(?![A-Za-z])|\\land(?![A-Za-z])"
_OR = rf"{_AND}|(?<![A-Za-z\\])or(?![A-Za-z])|\\lor(?![A-Za-z])|;|,|、|和"
_FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
_NOTHING = re.compile(r"(?:the )?empty set|no (?:real )?(?:solutions?|roots?)")
_ALL = re.compile(r"all (?:the )?reals?(?: numbers?)?")


def parse(text: str) -> Node:
    """The tree of an answer as a text; never raises, whatever the text."""
    return _parsed(text)


@functools.lru_cache(maxsize=20_000)
def _parsed(text: str) -> Node:
    return _parse(text, 0)


def _parse(text: str, depth: int) -> Node:
    text = clean(text)
    text = (text[1:].lstrip() or text) if text.startswith("+") else text
    if depth > MAX_DEPTH:
        return Node(kind="expression", text=text)
    if not text:
        return Node(kind="empty")
    if text in (r"\emptyset", r"\{\}", r"\{ \}"):
        return EMPTY
    if text == _DOTS:
        return Node(kind="dots")
    found = quantity(text)
    if found is not None:
        return Node(kind="number", **found)
    for attempt in (
        _french, _words, _labelled, _listed, _related, _signs, _matrix, _bracketed, _numeral,
        _united,
    ):  # fmt: skip
        node = attempt(text, depth)
        if node is not None:
            return node
    return Node(kind="expression", text=text)


def split(text: str, separators: str) -> list[str]:
    """The text at the separators (one regular expression) that stand outside of all brackets."""
    begin, parts = 0, []
    for start, end in _top_level(text, separators):
        parts.append(text[begin:start])
        begin = end
    parts.append(text[begin:])
    return [part.strip() for part in parts]


def _top_level(text: str, separators: str) -> list[tuple[int, int]]:
    depth, found = 0, []
    for match in _tokens(separators).finditer(text):
        if match["sep"] is not None:
            found += [match.span()] if depth == 0 else []
        elif match[0] in ("{", "\\{", "(", "[", r"\langle", r"\begin"):
            depth += 1
        elif match[0] in ("}", "\\}", ")", "]", r"\rangle", r"\end"):
            depth = max(depth - 1, 0)
    return found


@functools.cache
def _tokens(separators: str) -> re.Pattern:
    return re.compile(rf"(?P<sep>{separators})|\\[A-Za-z]+|\\.|[(){{}}\[\]]")


def _french(text: str, depth: int) -> Node | None:
    """Intervals such as ]2, 5] and ]a, b[, and their unions."""
    if not re.match(r"\]|\[[^\[\]]*,[^\[\]]*\[", text):
        return None
    members = re.split(r"\\cup(?![A-Za-z])", text)
    if len(members) > 1:
        return Node(kind="union", parts=tuple(_parse(member, depth + 1) for member in members))
    return _pair(text, depth) if re.fullmatch(r"[\[\]][^\[\]]*,[^\[\]]*[\[\]]", text) else None


def _words(text: str, depth: int) -> Node | None:
    """Words that are no mathematics; letters are no products."""
    plain = re.sub(r"\s+", " ", _TEXT.sub(r" \1 ", text)).strip(" .,;:!")
    if _DATE.fullmatch(plain) or re.fullmatch(r"[㐀-鿿]+|[A-Z]{2,}|[A-Z][a-z]", plain):
        return Node(kind="text", text=plain.casefold())
    without = _FUNCTIONS.sub(" ", plain)
    has_words = re.search(r"[^\W\d_]{3}", without) and not re.search(r"[=<>\\^_{}+*/|()]", without)
    if not has_words and not re.fullmatch(r"(?i:no|on|up|ok|am|pm)", plain):
        return None
    if re.fullmatch(r"[0-9]+[a-z]{3,4}", plain):
        return None  # 2abc is a product
    if re.search(r"[0-9]", plain) and re.search(r"\b(?:or|and)\b", plain):
        return None  # "3 or 4" is a list
    if "," in plain and len(parts := split(plain, ",")) > 1:
        return _listing(parts, depth)
    plain = re.sub(r"^(?:an?|the) ", "", plain.casefold())
    if _NOTHING.fullmatch(plain):
        return EMPTY
    if _ALL.fullmatch(plain):
        return _line()
    return Node(kind="text", text=plain)


def _line() -> Node:
    ends = tuple(Node(kind="expression", text=sign + INFINITY) for sign in ("-", ""))
    return Node(kind="tuple", text="()", parts=ends)


def _labelled(text: str, depth: int) -> Node | None:
    """`(a) 3 (b) 4`: several answers in their order."""
    labels = list(_PARTS.finditer(text))
    if len(labels) < 2 or labels[0].start() > 0 or labels[0][1] not in ("a", "i", "1"):
        return None
    ends = [label.start() for label in labels[1:]] + [len(text)]
    parts = [text[label.end() : end] for label, end in zip(labels, ends, strict=True)]
    return Node(kind="parts", parts=tuple(_parse(part, depth + 1) for part in parts))


def _listing(parts: list[str], depth: int) -> Node:
    if len(parts) > MAX_MEMBERS:
        return Node(kind="expression", text=", ".join(parts))
    members = tuple(_parse(part, depth + 1) for part in parts if clean(part))
    if any(member.kind == "dots" for member in members):
        return Node(kind="sequence", parts=members)
    flat = (member.parts if member.kind == "list" else (member,) for member in members)
    return Node(kind="list", parts=tuple(part for parts in flat for part in parts))


def _listed(text: str, depth: int) -> Node | None:
    """Several answers with commas, "and" or "or" between them."""
    loose = _TEXT.sub(lambda m: f" {m[1]} " if m[1].strip() in ("or", "and", "和") else m[0], text)
    if not re.search(r"[(\[{]", loose):  # in `x = 1,000` the comma separates nothing
        loose = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), loose)
    parts = split(loose, _OR)
    if len(parts) == 1:
        return None
    either = bool(_top_level(loose, r"(?<![A-Za-z\\])or(?![A-Za-z])|\\lor(?![A-Za-z])"))
    if len(parts) == 2 and not either:
        joined = _intersection(
            *(_parse(part, depth + 1) for part in parts), sure=bool(_top_level(loose, _AND))
        )
        if joined is not None:
            return joined
    node = _listing(parts, depth)
    if node.kind == "list" and len(node.parts) == 1:
        return node.parts[0]
    if either and all(part.kind == "tuple" and part.name for part in node.parts):
        return Node(kind="union", parts=node.parts)
    return node


def _intersection(first: Node, second: Node, *, sure: bool) -> Node | None:
    """`x >= 2 and x <= 6` as the interval [2, 6]; with a comma only where that is not empty."""
    rays = (first, second)
    if any(r.kind != "tuple" or len(r.parts) != 2 or not r.name for r in rays):
        return None
    if first.name != second.name:
        return None
    low, high = rays if _infinite(first.parts[1]) else rays[::-1]
    if not (_infinite(low.parts[1]) and _infinite(high.parts[0])):
        return None
    start, end = low.parts[0], high.parts[1]
    if not sure and not (start.kind == end.kind == "number" and start.value < end.value):
        return None
    return Node(kind="tuple", text=low.text[0] + high.text[1], parts=(start, end), name=first.name)


def _infinite(node: Node) -> bool:
    return node.kind == "expression" and INFINITY in node.text


def _related(text: str, depth: int) -> Node | None:
    """`x = 5` and chains of it, inequalities of a name as intervals, other relations."""
    places = _top_level(text, _RELATION.pattern)
    sides = split(text, _RELATION.pattern)
    if not places or not all(sides):
        return None
    signs = [text[start:end] for start, end in places]
    if len(signs) == 1 and NAMED.fullmatch(sides[0]):
        signs = ["=" if signs[0] in (r"\approx", r"\equiv") else signs[0]]
    if r"\approx" in signs:  # what is exact stands before it
        exact = places[signs.index(r"\approx")][0]
        return _parse(text[:exact], depth + 1)
    named = NAMED.fullmatch(sides[0]) or TUPLE_NAMED.fullmatch(sides[0])
    if all(re.fullmatch(r"[A-Z]", side) for side in sides):
        named = None
    if set(signs) == {"="}:
        return _equation(sides, bool(named), depth)
    if signs == [r"\in"]:
        return _parse(sides[1], depth + 1) if named else None
    if signs == [r"\ne"] and named:
        return _all_but([_parse(sides[1], depth + 1)])
    if set(signs) & {r"\ne", r"\in", "=", r"\equiv"}:
        parts = tuple(_parse(side, depth + 1) for side in sides)
        return Node(kind="relation", text=" ".join(signs), parts=parts)
    return _inequality(sides, signs, depth)


def _equation(sides: list[str], named: bool, depth: int) -> Node:
    if not named and len(sides) == 2 and re.fullmatch(SYMBOL, sides[1]):
        if not has_symbol(sides[0]):  # 7 = x
            sides, named = sides[::-1], True
    parts = tuple(_parse(side, depth + 1) for side in sides)
    if not named and not any(has_symbol(side) for side in sides):
        return Node(kind="chain", parts=parts)  # 2^3 + 3 = 11: all of them one value
    if not named:
        return Node(kind="relation", text="=", parts=parts)
    value = parts[1] if len(parts) == 2 else Node(kind="chain", parts=parts[1:])
    return Node(kind="relation", text="named", parts=(parts[0], value))


def has_symbol(text: str) -> bool:
    """Whether there is a letter that stands alone, as variables do."""
    without_commands = re.sub(r"\\[A-Za-z]+", " ", text)
    return bool(re.search(r"(?<![A-Za-z])[A-Za-z]{1,3}(?![A-Za-z])", without_commands))


def _inequality(sides: list[str], signs: list[str], depth: int) -> Node:
    """An interval where a symbol stands alone against numbers, else the relation, < or <=."""
    if len(sides) == 3 and signs[0] in (">", r"\ge"):  # 6 >= x >= 2
        sides, signs = sides[::-1], [_FLIPPED[sign] for sign in signs[::-1]]
    alone = [bool(re.fullmatch(SYMBOL, side)) for side in sides]
    if len(sides) == 2 and alone[1] and not alone[0]:  # 4 > x
        sides, signs, alone = sides[::-1], [_FLIPPED[signs[0]]], alone[::-1]
    parts = [_parse(side, depth + 1) for side in sides]
    closed = [sign in (r"\le", r"\ge") for sign in signs]
    others = [side for side, symbol in zip(sides, alone, strict=True) if not symbol]
    if alone.count(True) == 1 and not any(has_symbol(side) for side in others):
        if len(sides) == 2 and alone[0]:
            bound, first, last = parts[1], "(", ")"
            if signs[0] in (">", r"\ge"):
                first = "[" if closed[0] else "("
                ends = (bound, Node(kind="expression", text=INFINITY))
            else:
                last = "]" if closed[0] else ")"
                ends = (Node(kind="expression", text=f"-{INFINITY}"), bound)
            return Node(kind="tuple", text=first + last, parts=ends, name=sides[0])
        if len(sides) == 3 and alone[1] and all(sign in ("<", r"\le") for sign in signs):
            brackets = ("[" if closed[0] else "(") + ("]" if closed[1] else ")")
            return Node(kind="tuple", text=brackets, parts=(parts[0], parts[2]), name=sides[1])
    if len(sides) == 2 and signs[0] in (">", r"\ge"):
        parts, signs = parts[::-1], [_FLIPPED[signs[0]]]
    return Node(kind="relation", text=" ".join(signs), parts=tuple(parts))


def _all_but(points: list[Node]) -> Node | None:
    """The real numbers without some points, as the union of the intervals between."""
    if len(points) > 1:
        if any(point.kind != "number" for point in points):
            return None
        points = sorted(points, key=lambda point: point.value)
    ends = [Node(kind="expression", text=f"-{INFINITY}")]
    ends += [point for point in points for _ in range(2)]
    ends.append(Node(kind="expression", text=INFINITY))
    pairs = zip(ends[::2], ends[1::2], strict=True)
    return Node(
        kind="union", parts=tuple(Node(kind="tuple", text="()", parts=pair) for pair in pairs)
    )


def _signs(text: str, depth: int) -> Node | None:
    r"""Both values of `\pm`."""
    if not re.search(r"\\(?:pm|mp)(?![A-Za-z])", text) or depth > 3 or text.startswith(r"\{"):
        return None
    upper = re.sub(r"\\mp(?![A-Za-z])", "-", re.sub(r"\\pm(?![A-Za-z])", "+", text))
    lower = re.sub(r"\\mp(?![A-Za-z])", "+", re.sub(r"\\pm(?![A-Za-z])", "-", text))
    return Node(kind="list", parts=tuple(_parse(one, depth + 1) for one in (upper, lower)))


def _matrix(text: str, depth: int) -> Node | None:
    match = _MATRIX.fullmatch(text) if r"\begin" in text else None
    if not match:
        return None
    factor, body = (match[1], match[3]) if match[3] is not None else ("", match[6])
    if r"\begin" in body or re.search(r"[=,]", factor):
        return None
    factor = factor.strip().removesuffix(r"\cdot").strip()
    rows = [row for row in re.split(r"\\\\|\\cr\b", body) if row.strip(" \\")]
    cells = [
        [f"({factor}) \\cdot ({cell.strip()})" if factor else cell for cell in row.split("&")]
        for row in rows
    ]
    return Node(
        kind="matrix",
        parts=tuple(
            Node(kind="tuple", text="()", parts=tuple(_parse(cell, depth + 1) for cell in row))
            for row in cells
        ),
    )


def _bracketed(text: str, depth: int) -> Node | None:
    """Unions, sets, tuples and intervals; brackets around one thing are dropped."""
    if re.fullmatch(_REALS, text) and not text.startswith("("):
        return _line()
    rest = _WITHOUT.fullmatch(text)
    if rest:
        return _all_but([_parse(part, depth + 1) for part in split(rest[1], ",")])
    members = split(text, r"\\cup(?![A-Za-z])")
    if len(members) > 1 and all(members):
        return Node(kind="union", parts=tuple(_parse(member, depth + 1) for member in members))
    builder = _BUILDER.fullmatch(text)
    if builder:
        return dataclasses.replace(_parse(builder[1], depth + 1), name="")
    for opening, closing in ((r"\{", r"\}"), (r"\langle", r"\rangle")):
        if text.startswith(opening) and text.endswith(closing):
            inner = text[len(opening) : -len(closing)]
            if opening in inner or closing in inner:
                return None
            node = _listing(split(inner, ","), depth)
            if node.kind == "expression" or opening != r"\{":
                return node if node.kind == "expression" else Node(
                    kind="tuple", text="()", parts=node.parts
                )  # fmt: skip
            return Node(kind="sequence" if node.kind == "sequence" else "set", parts=node.parts)
    if re.match(r"[A-Z]\s*\(", text):  # a point P(1, 2)
        inner = text[1:].lstrip()
        return _pair(inner, depth) if _top_level(inner[1:-1], ",") else None
    return _pair(text, depth)


def _pair(text: str, depth: int) -> Node | None:
    """What stands in round or square brackets; ]a, b[ as the French write it."""
    if text[0] not in "([]" or text[-1] not in ")][" or len(text) < 3:
        return None
    french = text[0] == "]" or text[-1] == "["
    parts = _inner_parts(text[1:-1])
    if parts is None or french and len(parts) != 2:
        return None
    if len(parts) == 1:
        return _parse(text[1:-1], depth + 1) if text[0] + text[-1] == "()" else None
    if len(parts) > MAX_MEMBERS:
        return None
    brackets = {"]": "("}.get(text[0], text[0]) + {"[": ")"}.get(text[-1], text[-1])
    members = tuple(_parse(part, depth + 1) for part in parts)
    return Node(kind="tuple", text=brackets, parts=members)


def _inner_parts(inner: str) -> list[str] | None:
    """The members between brackets; None where the outer brackets do not belong to each other."""
    depth = 0
    for match in re.finditer(r"\\.|[()\[\]]", inner):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(match[0], 0)
        if depth < 0:
            return None
    return split(inner, ",|;") if depth == 0 else None


def _numeral(text: str, depth: int) -> Node | None:
    """A numeral with its base, or a ratio."""
    match = _BASED.fullmatch(text)
    if match:
        return Node(kind="based", text=match[1], value=Fraction(int(match[2] or match[3])))
    if ":" in text and re.fullmatch(r"[^A-Za-z\\]*:[^A-Za-z]*", text.replace(_DOTS, "")):
        parts = tuple(_parse(part, depth + 1) for part in split(text, ":"))
        return Node(kind="ratio", parts=parts)
    return None


def _united(text: str, depth: int) -> Node | None:
    r"""An expression with a unit after it, as in `2\pi \text{ cm}` or `(270/7)°`."""
    found = quantity(text, expression=True)
    if found is None:
        return None
    inner, unit = found
    node = _parse(inner, depth + 1)
    return dataclasses.replace(node, unit=unit) if not node.unit else None


def spell(node: Node) -> str:
    """One text for what is equal without algebra, to count equal answers by."""
    if node.kind == "number":
        return f"{node.value}%" if node.percent else f"{node.value}"
    if node.kind == "relation" and node.text == "named":
        return spell(node.parts[1])
    if node.kind == "chain":
        return spell(node.parts[-1])
    inner = [spell(part) for part in node.parts]
    if node.kind in ("list", "set"):
        return f"{{{', '.join(sorted(inner))}}}"
    if inner:
        if node.kind == "relation":
            return f" {node.text} ".join(inner)
        first, last = node.text if len(node.text) == 2 else "()"
        return f"{first}{', '.join(inner)}{last}"
    base = f"_{node.value}" if node.kind == "based" else ""
    return re.sub(r"(?<![0-9A-Za-z]) | (?![0-9A-Za-z])", "", node.text) + base
