"""Countdown: reach a target with given numbers by + - * and /.

A prompt is `make 42 from 3 4 6 :` and an answer an expression such as ` ( 3 + 4 ) * 6`. The
verifier reads the expression itself, with exact fractions and without recursion, so that neither
deep nor long input can hurt it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import zlib
from fractions import Fraction
from typing import ClassVar

from xrpo_jax.types import Conversation, Verdict, question

LEVELS = ("easy", "medium", "hard")
NUMBERS = {"easy": 2, "medium": 3, "hard": 4}  # how many are given
LARGEST = {"easy": 25, "medium": 12, "hard": 12}  # of the given numbers
LARGEST_TARGET = 99
SPLITS = {"test": (0,), "train": (1, 2, 3, 4), "supervised": (5, 6, 7, 8, 9)}
MAX_CHARACTERS = 120
MAX_TOKENS = 40
_TOKEN = re.compile(r"\s*(?:([0-9]{1,3})(?![0-9])|([-+*/()]))")
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}


class Unreadable(ValueError):
    """The text is not an expression over numbers, + - * / and brackets."""


def tokenize(text: str) -> list[str]:
    """Numbers and signs of an expression; raises Unreadable."""
    if len(text) > MAX_CHARACTERS:
        raise Unreadable(f"longer than {MAX_CHARACTERS} characters")
    text, tokens, place = text.strip(), [], 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        # isascii: the class [0-9] is exact, but white space such as U+2003 should not pass.
        if not match or not match[0].isascii():
            raise Unreadable(f"unexpected {text[place : place + 8]!r}")
        tokens.append(match[1] or match[2])
        place = match.end()
    if not tokens:
        raise Unreadable("empty")
    if len(tokens) > MAX_TOKENS:
        raise Unreadable(f"more than {MAX_TOKENS} tokens")
    return tokens


def evaluate(tokens: list[str]) -> tuple[Fraction | None, list[int]]:
    """The value (None after a division by zero) and the numbers used; raises Unreadable."""
    operands: list[Fraction | None] = []
    signs: list[str] = []
    numbers: list[int] = []

    def apply() -> None:
        sign, right, left = signs.pop(), operands.pop(), operands.pop()
        operands.append(_combine(sign, left, right))

    expect_operand = True
    for token in tokens:
        if token.isdigit():
            if not expect_operand:
                raise Unreadable("two numbers without a sign between them")
            numbers.append(int(token))
            operands.append(Fraction(int(token)))
            expect_operand = False
        elif token == "(":
            if not expect_operand:
                raise Unreadable("a bracket without a sign before it")
            signs.append(token)
        elif expect_operand:
            raise Unreadable(f"{token!r} where a number should stand")
        elif token == ")":
            while signs and signs[-1] != "(":
                apply()
            if not signs:
                raise Unreadable("a bracket closes that was not opened")
            signs.pop()
        else:
            while signs and _PRECEDENCE.get(signs[-1], 0) >= _PRECEDENCE[token]:
                apply()
            signs.append(token)
            expect_operand = True
    if expect_operand:
        raise Unreadable("ends where a number should stand")
    while signs:
        if signs[-1] == "(":
            raise Unreadable("a bracket is not closed")
        apply()
    return operands[0], numbers


def _combine(sign: str, left: Fraction | None, right: Fraction | None) -> Fraction | None:
    if left is None or right is None:
        return None
    if sign == "+":
        return left + right
    if sign == "-":
        return left - right
    if sign == "*":
        return left * right
    return left / right if right else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """Numbers, a target, and one expression that reaches it with every number used once."""

    level: str
    numbers: tuple[int, ...]
    target: int
    expression: str

    @property
    def prompt(self) -> str:
        return f"make {self.target} from {' '.join(map(str, self.numbers))} :"


def generate(split: str, seed: int, index: int, level: str) -> Problem:
    """The problem with this index: a pure function of its arguments, within the split."""
    for attempt in range(10_000):
        problem = _draw(f"{seed}/{index}/{attempt}/{level}", level)
        # The hash leaves the order of the numbers out: no test problem is a shuffled training one.
        name = f"{problem.target}: {sorted(problem.numbers)}" if problem else ""
        if problem and zlib.crc32(name.encode()) % 10 in SPLITS[split]:
            return problem
    raise RuntimeError(f"no {level} problem found for index {index}")


def _draw(name: str, level: str) -> Problem | None:
    number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=24).digest(), "big")

    def below(limit: int) -> int:
        nonlocal number
        number, digit = divmod(number, limit)
        return digit

    numbers = tuple(1 + below(LARGEST[level]) for _ in range(NUMBERS[level]))
    order = list(numbers)
    text = f"{order.pop(below(len(order)))}"
    value = int(text)
    weakest = 3  # the precedence of the expression so far; 3 is a number alone
    while order:
        operand = order.pop(below(len(order)))
        sign = "+-**/"[below(5)]
        if sign == "/" and value % operand:
            return None
        value = {
            "+": value + operand,
            "-": value - operand,
            "*": value * operand,
            "/": value // operand,
        }[sign]
        if not 0 <= value <= LARGEST_TARGET:
            return None
        if weakest < _PRECEDENCE[sign]:
            text = f"( {text} )"
        text, weakest = f"{text} {sign} {operand}", _PRECEDENCE[sign]
    if value < 1:
        return None
    return Problem(level=level, numbers=numbers, target=value, expression=text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Countdown:
    """The task: problems by index, levels in turn; `use_all` asks for every number exactly once."""

    bounded: ClassVar[bool] = True
    problems: tuple[Problem, ...]
    use_all: bool = True
    levels: tuple[str, ...] = LEVELS

    def __len__(self) -> int:
        return len(self.problems)

    def prompt(self, i: int) -> Conversation:
        """The question, ending where the completion starts."""
        return question(self.problems[i].prompt)

    def level(self, i: int) -> str:
        """easy, medium or hard: two, three or four numbers."""
        return self.problems[i].level

    def solution(self, i: int) -> str:
        """A completion that reaches the target."""
        return f" {self.problems[i].expression}"

    def answer(self, i: int, completion: str) -> str | None:
        """The value and the numbers it is made of, however written, or None where there is none."""
        try:
            value, used = evaluate(tokenize(_expression(completion)))
        except Unreadable:
            return None
        return f"{value} of {' '.join(map(str, sorted(used)))}"

    def rewards(self, i: int, completion: str) -> Verdict:
        """One for an expression over the given numbers that equals the target, else zero."""
        try:
            value, used = evaluate(tokenize(_expression(completion)))
        except Unreadable as error:
            return Verdict(status="unparsed", score=0.0, reason=str(error))
        problem = self.problems[i]
        left = list(problem.numbers)
        for number in used:
            if number not in left:
                return _wrong(f"{number} is not given, or used too often")
            left.remove(number)
        if left and self.use_all:
            return _wrong(f"{left[0]} is not used")
        if value is None:
            return _wrong("divides by zero")
        if value != problem.target:
            return _wrong(f"{value} is not {problem.target}")
        return Verdict(status="correct", score=1.0)


def _expression(completion: str) -> str:
    # '3 * 4 = 12' is a common way to end: what follows the sign is not checked nor used.
    return completion[: 2 * MAX_CHARACTERS].split("=")[0]


def _wrong(reason: str) -> Verdict:
    return Verdict(status="wrong", score=0.0, reason=reason)


def make(
    *, split: str = "train", size: int = 3000, seed: int = 0, use_all: bool = True
) -> Countdown:
    """Up to `size` different problems of a split; train, test and supervised share none."""
    if split not in SPLITS:
        raise ValueError(f"split={split!r}; allowed: {', '.join(SPLITS)}")
    if not 1 <= size <= 20_000:
        raise ValueError(f"size={size}; allowed: 1 to 20000")
    problems: dict[str, Problem] = {}
    index = 0
    # There are only some thousand easy problems: what comes up again is skipped, not replaced.
    while len(problems) < size and index < 20 * size:
        problem = generate(split, seed, index, LEVELS[index % len(LEVELS)])
        problems.setdefault(problem.prompt, problem)
        index += 1
    return Countdown(problems=tuple(problems.values()), use_all=use_all)
