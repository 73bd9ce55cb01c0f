r"""Whether an answer equals the right one, both as trees of structure.py.

Equal are: the same exact number, however written; the same expression (by algebra.py); lists and
sets in any order; tuples, intervals and matrices member by member; `x = 5` and 5; `x < 4` and
(-oo, 4); equations that are multiples of each other; the same words.
"""

from __future__ import annotations

import dataclasses
import re
from fractions import Fraction

import mpmath

from xrpo_jax.verify import algebra, units
from xrpo_jax.verify.spelling import decimals
from xrpo_jax.verify.structure import INFINITY, Node, parse, spell
from xrpo_jax.verify.tree_value import numeric


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """How strict the comparison is.

    tolerance: relative difference of two numbers that is still equal; 0 = exact.
    decimals: a decimal of at least so many places stands for the exact value that rounds to it, as
      0.3333333333 for 1/3.
    strict: percent signs, units and the order of a list must be as in the right answer; otherwise
      8 equals 8 %, 5 equals 5 cm, and "2, 5" equals "5, 2".
    """

    tolerance: float = 0.0
    decimals: int = 10
    strict: bool = False
    algebra: bool = True  # False raises NeedsAlgebra instead of parsing LaTeX, which takes longer

    def __post_init__(self):
        if not 0 <= self.tolerance < 1:
            raise ValueError(f"tolerance={self.tolerance}; allowed: from 0 to below 1")
        if self.decimals < 1:
            raise ValueError(f"decimals={self.decimals}; allowed: at least 1")


class NeedsAlgebra(Exception):
    """Raised where only algebra could tell and the rules leave it out."""


def same(gold: Node, found: Node, rules: Rules) -> bool:
    """Whether an answer equals the right one; raises NeedsAlgebra where the rules leave it out."""
    if gold == found and gold.kind != "empty":
        return True
    if "empty" in (gold.kind, found.kind):
        return False
    if gold.kind != "relation" or not re.search("[+-]", gold.parts[0].text):
        gold = _unnamed(gold, found)  # x + y = 3 is more than 3
    found = _unnamed(found, gold)
    kinds = {gold.kind, found.kind}
    if "chain" in kinds:
        return _same_chain(gold, found, rules)
    factor = _unit_factor(gold, found, rules)
    if factor is None:
        return False
    if kinds <= {"number", "expression"}:
        return _same_value(gold, found, factor, rules)
    if kinds == {"text", "expression"}:  # abc and a b c
        text, other = (gold, found) if gold.kind == "text" else (found, gold)
        if re.fullmatch(r"[a-z]{3,4}", text.text) and re.search(r"[^A-Za-z]", other.text):
            return _equal(text.text, other.text, rules)
    if kinds == {"union"} or kinds == {"union", "list"} and _intervals(gold, found):
        return _same_members(gold, found, rules, ordered=False)
    if kinds <= {"list", "set"}:
        ordered = rules.strict and gold.kind == "list" or _names(gold) != _names(found)
        return _same_members(gold, found, rules, ordered=ordered)
    if kinds == {"list", "tuple"} and _coordinates(gold, found):
        return _same_members(gold, found, rules, ordered=True)
    if kinds <= {"parts", "list"}:
        return _same_members(gold, found, rules, ordered=True)
    if kinds == {"list", "number"}:  # 30,150 may be two numbers without a space
        gold, found = (_apart(node) if node.kind == "number" else node for node in (gold, found))
        if gold.kind == found.kind:
            return same(gold, found, rules)
    if kinds & {"list", "set"}:  # `\{5\}`, or one value in two spellings: "15/4 or 3.75"
        whole, other = (gold, found) if gold.kind in ("list", "set") else (found, gold)
        return bool(whole.parts) and all(same(part, other, rules) for part in whole.parts)
    if kinds == {"relation"}:
        return _same_relation(gold, found, rules)
    if kinds == {"matrix", "tuple"}:
        return _same_rows(gold, found, rules)
    if kinds == {"tuple"}:
        named = not gold.name or not found.name or gold.name == found.name
        return named and gold.text == found.text and _same_members(gold, found, rules, ordered=True)
    if len(kinds) == 1 and gold.kind in ("sequence", "ratio", "matrix"):
        return _same_members(gold, found, rules, ordered=True)
    if "based" in kinds:
        return _same_numeral(gold, found)
    return False


def _apart(node: Node) -> Node:
    return parse(node.text.replace(",", ", ")) if "," in node.text else node


def _intervals(gold: Node, found: Node) -> bool:
    """Whether a list, beside a union, is one of intervals: no point is at infinity."""
    parts = gold.parts + found.parts
    return all(part.kind == "tuple" and not part.name for part in parts) and any(
        part.text != "()" or any(INFINITY in end.text for end in part.parts) for part in parts
    )


def _unnamed(node: Node, other: Node) -> Node:
    """`(x, y) = (1, 2)` as `x = 1, y = 2` beside one, and 5 for `x = 5` where that has no name."""
    if node.kind != "relation" or node.text != "named":
        return node
    names, values = node.parts
    if names.kind == values.kind == "tuple" and len(names.parts) == len(values.parts):
        if other.kind == "list" or other.kind == "relation" and other.text == "named":
            pairs = zip(names.parts, values.parts, strict=True)
            return Node(
                kind="list",
                parts=tuple(Node(kind="relation", text="named", parts=pair) for pair in pairs),
            )
    return values if other.kind != "relation" else node


def _same_chain(gold: Node, found: Node, rules: Rules) -> bool:
    """`2^3 + 3 = 11` equals 11 if all of it does."""
    if gold.kind == "chain":
        return same(gold.parts[-1], found, rules)
    return all(same(gold, part, rules) for part in found.parts)


def _names(node: Node) -> tuple[str, ...]:
    """The names of `x = 1, y = 2`, none where there are not several."""
    names = tuple(part.parts[0].text for part in node.parts if part.text == "named")
    return tuple(sorted(names)) if len(set(names)) > 1 else ()


def _coordinates(gold: Node, found: Node) -> bool:
    """Whether one is `x = 1, y = 2` and the other (1, 2)."""
    named, pair = (gold, found) if gold.kind == "list" else (found, gold)
    names = [part.parts[0].text for part in named.parts if part.text == "named"]
    return len(names) == len(named.parts) > 1 and names == sorted(set(names)) and pair.text == "()"


def _same_members(gold: Node, found: Node, rules: Rules, *, ordered: bool) -> bool:
    if ordered:
        return len(gold.parts) == len(found.parts) and all(
            same(a, b, rules) for a, b in zip(gold.parts, found.parts, strict=True)
        )
    golds, others = list(dict.fromkeys(gold.parts)), list(dict.fromkeys(found.parts))
    if len(golds) != len(others):
        return False
    for one in golds:
        match = next((b for b in others if b == one), None)
        match = match or next((b for b in others if same(one, b, rules)), None)
        if match is None:
            return False
        others.remove(match)
    return True


def _same_rows(gold: Node, found: Node, rules: Rules) -> bool:
    """A matrix and `[[1, 2], [3, 4]]`, or a column and (1, 2)."""
    matrix, rows = (gold, found) if gold.kind == "matrix" else (found, gold)
    flat = [row.parts[0] for row in matrix.parts if len(row.parts) == 1]
    if len(flat) == len(matrix.parts) and rows.text == "()":
        theirs = list(rows.parts)
    else:
        flat = [cell for row in matrix.parts for cell in row.parts]
        if [len(row.parts) for row in matrix.parts] != [len(row.parts) for row in rows.parts]:
            return False
        theirs = [cell for row in rows.parts for cell in row.parts]
    if len(flat) != len(theirs):
        return False
    return all(same(a, b, rules) for a, b in zip(flat, theirs, strict=True))


_FUNCTION = re.compile(r"[A-Za-z]\s*\(\s*([a-z])\s*\)")


def _same_relation(gold: Node, found: Node, rules: Rules) -> bool:
    if gold.text == found.text == "named":
        (name, value), (other_name, other) = gold.parts, found.parts
        if _same_name(name.text, other_name.text) and same(value, other, rules):
            return True
    signs = ["=" if node.text == "named" else node.text for node in (gold, found)]
    if signs[0] != signs[1] or len(gold.parts) != len(found.parts):
        return False
    if all(same(a, b, rules) for a, b in zip(gold.parts, found.parts, strict=True)):
        return True
    if len(gold.parts) != 2 or " " in signs[0] or signs[0] == r"\in":
        return False
    (a, b), (c, d) = (tuple(_side(part) for part in node.parts) for node in (gold, found))
    if None in (a, b, c, d):
        return False
    _need_algebra(rules)
    return algebra.proportional((a, b), (c, d), positive=signs[0] not in ("=", r"\ne"))


def _same_name(one: str, other: str) -> bool:
    """The same name, or functions of one variable, one of which may be y."""
    if one == other:
        return True
    arguments = [_FUNCTION.fullmatch(name) for name in (one, other)]
    if all(arguments):
        return arguments[0][1] == arguments[1][1]
    return any(arguments) and "y" in (one, other)


def _same_numeral(gold: Node, found: Node) -> bool:
    """`52_9` and `52_9`; the answer may leave out the mark of the base."""
    if gold.kind != "based":
        return False
    if found.kind == "based":
        return gold.text == found.text and gold.value == found.value
    return found.kind == "number" and found.text == gold.text


def _unit_factor(gold: Node, found: Node, rules: Rules) -> Fraction | None:
    """What the answer's number is to be multiplied with; None where the units contradict."""
    if rules.strict and bool(gold.unit) != bool(found.unit):
        return None
    return units.factor(gold.unit, found.unit)


def _same_value(gold: Node, found: Node, factor: Fraction, rules: Rules) -> bool:
    for one, other in ((gold, found), (found, gold)):  # 5 m is 5\text{ m} where that is meant
        if one.kind == "number" and other.kind == "expression" and len(one.unit) == 1:
            match = re.fullmatch(rf"(.*[0-9}}])\s*{re.escape(one.unit)}", other.text)
            number = parse(match[1]) if match else one
            if match and number.kind == "number" and one.value == number.value:
                return True
    if gold.kind == found.kind == "number":
        return _same_number(gold, found, factor, rules)
    if rules.strict and gold.percent != found.percent:
        return False
    if factor == 1 and gold.kind == found.kind and spell(gold) == spell(found):
        return True
    a, b = _side(gold), _side(found)
    if factor != 1:
        b = b * factor if isinstance(b, Fraction) else rf"({b}) \cdot ({factor})"
    if _equal(a, b, rules):
        return True
    number = found if found.kind == "number" else gold
    if number.kind != "number" or not (rules.tolerance or _written(number, rules)):
        return False
    values = [algebra.value_of(side) for side in (a, b)]
    return None not in values and _near(*values, gold, found, rules)


def _equal(one: algebra.Side, other: algebra.Side, rules: Rules) -> bool:
    _need_algebra(rules)
    return algebra.equal(one, other)


def _need_algebra(rules: Rules) -> None:
    if not rules.algebra:
        raise NeedsAlgebra


def _side(node: Node) -> algebra.Side | None:
    """What algebra is given for a number or an expression."""
    if node.kind == "number":
        return node.value / 100 if node.percent else node.value
    return node.text if node.kind == "expression" else None


def _same_number(gold: Node, found: Node, factor: Fraction, rules: Rules) -> bool:
    value = found.value * factor
    pairs = [(gold.value, value)]
    if gold.percent != found.percent:
        if rules.strict:
            return False
        # 15 % equals 15 and 0.15: right answers leave out the sign as often as completions do.
        pairs += [(gold.value / 100, value) if gold.percent else (gold.value, value / 100)]
    return any(a == b or _near(a, b, gold, found, rules) for a, b in pairs)


def _near(a, b, gold: Node, found: Node, rules: Rules) -> bool:
    """Whether values are equal within the tolerance, or one is the other to its written places."""
    if isinstance(a, mpmath.mpc) or isinstance(b, mpmath.mpc):
        return False
    gap = abs(numeric(a) - numeric(b))
    if rules.tolerance and gap <= rules.tolerance * abs(numeric(a)):
        return True
    places = [_written(node, rules) for node in (gold, found)]
    if (places[0] > 0) == (places[1] > 0):  # neither is such a decimal, or both are: exact
        return False
    exact = found if places[0] else gold
    if exact.kind == "number" and _terminates(exact.value):
        return False
    cut_off = abs(numeric(a if places[0] else b)) <= abs(numeric(b if places[0] else a))
    return gap * 10 ** max(places) * (1 if cut_off else 2) < 1  # else rounded


def _written(node: Node, rules: Rules) -> int:
    """Places of a decimal with enough significant digits to stand for an exact value, else 0."""
    places, significant = decimals(node.text) if node.kind == "number" else (0, 0)
    return places if min(places, significant) >= rules.decimals else 0


def _terminates(value: Fraction) -> bool:
    """Whether a decimal could have been exact."""
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1
