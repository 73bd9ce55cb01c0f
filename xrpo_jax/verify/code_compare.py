"""Whether what a program printed or returned is what a test expects."""

from __future__ import annotations

import math
import re

TOLERANCE = 1e-6  # of numbers with a fraction: absolute, or relative to the expected one
WHOLE = re.compile(r"[+-]?[0-9]+")
NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,4})?")
BLANKS = " \t\r\f\v"


def same_output(printed: str, expected: str) -> bool:
    """Whether both have the same lines, up to blanks at the ends and the writing of numbers.

    Blank lines at the end do not count, nor how many blanks are between two words. Blanks before a
    line count where the expected one has them and holds more than numbers. A number is compared as
    a number: exactly where the expected one is whole (3.0 is 3), else within 1e-6.
    """
    ours, theirs = _lines(printed), _lines(expected)
    return len(ours) == len(theirs) and all(map(_same_line, ours, theirs))


def _lines(text: str) -> list[str]:
    return text.rstrip(BLANKS + "\n").split("\n")


def _same_line(printed: str, expected: str) -> bool:
    printed, expected = printed.rstrip(BLANKS), expected.rstrip(BLANKS)
    if printed == expected:
        return True
    ours, theirs = (re.findall(f"[^{BLANKS}]+", line) for line in (printed, expected))
    if expected[:1] in tuple(BLANKS) and not all(map(NUMBER.fullmatch, theirs)):
        if re.match(f"[{BLANKS}]*", printed)[0] != re.match(f"[{BLANKS}]*", expected)[0]:
            return False
    return len(ours) == len(theirs) and all(map(_same_word, ours, theirs))


def _same_word(printed: str, expected: str) -> bool:
    if printed == expected:
        return True
    if not (NUMBER.fullmatch(expected) and NUMBER.fullmatch(printed)):
        return False
    if WHOLE.fullmatch(expected):
        # By digits: a float would hold only the first 15 of them.
        whole, point, fraction = printed.partition(".")
        return whole == expected and bool(point) and not fraction.strip("0")
    return _close(float(printed), float(expected))


def _close(ours: float, theirs: float) -> bool:
    if math.isnan(ours) and math.isnan(theirs):
        return True
    if not (math.isfinite(ours) and math.isfinite(theirs)):
        return False
    return abs(ours - theirs) <= TOLERANCE * max(1.0, abs(theirs))


def same_value(returned: object, expected: object) -> bool:
    """Whether an encoded value (code_wire) that a call returned is the expected one.

    Types count: True is not 1, "6" is not 6. A tuple is as good as a list, since JSON has no
    tuples. Numbers with a fraction on either side are compared within 1e-6, but a whole expected
    number only with its exact value.
    """
    try:
        return _same_value(returned, expected)
    except (RecursionError, OverflowError, TypeError, ValueError, IndexError):
        return False


def _same_value(returned: object, expected: object) -> bool:
    tag = returned[0] if isinstance(returned, list) else None
    if isinstance(expected, list | tuple):
        if tag not in ("list", "tuple") or len(returned[1]) != len(expected):
            return False
        return all(map(_same_value, returned[1], expected))
    if isinstance(expected, dict):
        if tag != "dict":
            return False
        left = {_key(key): value for key, value in expected.items()}
        pairs = [(_key(_simple(key)), value) for key, value in returned[1]]
        return (
            len(pairs) == len(left)
            and {key for key, _ in pairs} == left.keys()
            and all(_same_value(value, left[key]) for key, value in pairs)
        )
    if isinstance(expected, set | frozenset):
        if tag not in ("set", "frozenset"):
            return False
        return {_key(_simple(value)) for value in returned[1]} == set(map(_key, expected))
    if isinstance(expected, bytes):
        return tag == "bytes" and returned[1] == expected.hex()
    ours = _simple(returned)
    if type(ours) in (int, float) and type(expected) in (int, float):
        return ours == expected or (type(expected) is float and _close(ours, expected))
    return type(ours) is type(expected) and ours == expected


def _simple(value: object) -> object:
    """A scalar, or a tuple of them, out of its encoding; other groups stay as they are."""
    if isinstance(value, list) and value[0] == "int":
        return int(value[1], 16)
    if isinstance(value, list) and value[0] == "float":
        return float(value[1])
    if isinstance(value, list) and value[0] == "complex":
        return complex(float(value[1]), float(value[2]))
    if isinstance(value, list) and value[0] == "tuple":
        return tuple(_simple(part) for part in value[1])
    return value


def _key(value: object) -> object:
    """A value that is equal only to one of the same type, for keys and members of sets."""
    return tuple(map(_key, value)) if type(value) is tuple else (type(value).__name__, value)
