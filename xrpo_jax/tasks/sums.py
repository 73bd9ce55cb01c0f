"""Questions such as "What is 7 + 5? Answer with just the number." for models that can chat.

Three levels: `one_digit` sums and products, `two_digit` sums and differences, and `harder` ones
(two digits times one, three addends, three-digit sums). A split is decided by a hash of the
operands in order of size, so that 5 + 7 is never asked of a model that was trained on 7 + 5.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import zlib
from typing import ClassVar

from xrpo_jax.types import Conversation, Verdict, question

LEVELS = ("one_digit", "two_digit", "harder")
# Of five stable hash values a question may have, those that belong to each set.
SPLITS = {"test": (0,), "train": (1, 2, 3, 4)}
INSTRUCTION = "Answer with just the number."
# Operator, then the range of each operand; a level's kinds take turns.
KINDS = {
    "one_digit": (("+", (0, 9), (0, 9)), ("x", (0, 9), (0, 9))),
    "two_digit": (("+", (10, 99), (10, 99)), ("-", (10, 99), (10, 99))),
    "harder": (
        ("x", (10, 99), (2, 9)),
        ("+", (10, 99), (10, 99), (10, 99)),
        ("+", (100, 999), (100, 999)),
    ),
}
_NUMBER = re.compile(r"[-−]?\d[\d,]*(?:\.\d+)?")
_ATTEMPTS = 200  # in a row without a new question, after which a level is held to be used up


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One question: an operator between whole numbers."""

    level: str
    operator: str
    operands: tuple[int, ...]

    @property
    def text(self) -> str:
        asked = f" {self.operator} ".join(map(str, self.operands))
        return f"What is {asked}? {INSTRUCTION}"

    @property
    def answer(self) -> int:
        first, *rest = self.operands
        for operand in rest:
            if self.operator == "+":
                first += operand
            elif self.operator == "-":
                first -= operand
            else:
                first *= operand
        return first

    @property
    def split(self) -> int:
        """A stable hash that is the same for every order of the operands."""
        return zlib.crc32(f"{self.operator} {sorted(self.operands)}".encode()) % 5


def _draw(name: str, level: str, place: int) -> Problem:
    number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "big")
    operator, *ranges = KINDS[level][place % len(KINDS[level])]
    operands = []
    for low, high in ranges:
        number, digit = divmod(number, high - low + 1)
        operands.append(low + digit)
    if operator == "-":
        operands.sort(reverse=True)  # no negative answers
    return Problem(level=level, operator=operator, operands=tuple(operands))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sums:
    """The task: questions by index, levels in turn."""

    bounded: ClassVar[bool] = True
    problems: tuple[Problem, ...]
    levels: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.problems)

    def prompt(self, i: int) -> Conversation:
        """The question with its instruction, as the user's turn."""
        return question(self.problems[i].text)

    def level(self, i: int) -> str:
        """one_digit, two_digit or harder."""
        return self.problems[i].level

    def gold(self, i: int) -> str:
        """The right number."""
        return str(self.problems[i].answer)

    def answer(self, i: int, completion: str) -> str | None:
        """The last number after any thinking, without separators, or None."""
        said = completion.rpartition("</think>")[2]
        found = [] if "<think>" in said else _NUMBER.findall(said)
        if not found:
            return None
        number = found[-1].replace(",", "").replace("−", "-")
        sign, digits = number[: number[0] == "-"], number.lstrip("-")
        whole, _, fraction = digits.partition(".")
        # As text: int() refuses thousands of digits.
        digits = ".".join(part for part in (whole.lstrip("0") or "0", fraction.rstrip("0")) if part)
        return digits if digits == "0" else sign + digits

    def rewards(self, i: int, completion: str) -> Verdict:
        """One when the last number said is the right one."""
        found, right = self.answer(i, completion), str(self.problems[i].answer)
        if found is None:
            return Verdict(status="unparsed", score=0.0, reason="no number")
        if found == right:
            return Verdict(status="correct", score=1.0)
        return Verdict(status="wrong", score=0.0, reason=f"{found[:20]} is not {right}")


def make(*, split: str = "train", size: int = 1200, seed: int = 0, levels: str = "") -> Sums:
    """`size` different questions of a split, spread evenly over `levels` (by commas; "" = all).

    A level that has fewer questions than its share leaves the rest to the others: of one-digit
    questions seed 0 finds 166 to train on and 31 held out. Raises ValueError for unknown levels or
    splits, or a size that cannot be had.
    """
    chosen = tuple(level.strip() for level in levels.split(",")) if levels else LEVELS
    if not set(chosen) <= set(LEVELS) or len(set(chosen)) < len(chosen):
        raise ValueError(f"levels={levels!r}; allowed: some of {','.join(LEVELS)}")
    if split not in SPLITS:
        raise ValueError(f"split={split!r}; allowed: {', '.join(SPLITS)}")
    if not 1 <= size <= 20_000:
        raise ValueError(f"size={size}; allowed: 1 to 20000")
    problems: dict[str, Problem] = {}
    left, place, index = list(chosen), 0, 0
    while len(problems) < size and left:
        level = left[place % len(left)]
        place += 1
        for _ in range(_ATTEMPTS):
            problem = _draw(f"{seed}/{split}/{index}", level, index)
            index += 1
            if problem.split in SPLITS[split] and problem.text not in problems:
                problems[problem.text] = problem
                break
        else:
            left.remove(level)
    if len(problems) < size:
        raise ValueError(f"size={size}; allowed: at most {len(problems)} for levels {chosen}")
    return Sums(problems=tuple(problems.values()), levels=chosen)
