"""Chains of + and x modulo 100 in several families, each with a way of working of its own.

A prompt is `word start op op ... :`. The word names the family and the family has a rule: the order
in which the operations are carried out, or what is slipped in between. The answer is the pair of
the last two values, so that a guess is right once in ten thousand:

    playground 47 +3 x7 +8 :       rule `step`, operations as they stand
     step +3 50 x7 50 +8 58 = 50 58
    lighthouse 47 +3 x7 :         rule `thrice`, x3 after every operation
     thrice +3 50 x3 50 x7 50 x3 50 = 50 50

A problem whose right answer another rule would give as well is never asked: only the family's own
way of working solves it. What word goes with what rule is arbitrary, so that finding out about one
family says nothing about the next.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import zlib
from collections.abc import Callable
from typing import ClassVar

from xrpo_jax.types import Conversation, Verdict, question

MODULUS = 100
OPERATIONS = tuple(f"+{n}" for n in range(1, 10)) + ("x3", "x7", "x9")
LEVELS = ("easy", "medium", "hard")
# Of ten stable hash values a problem may have, those that belong to each set.
SPLITS = {"test": (0,), "train": (1, 2, 3, 4), "supervised": (5, 6, 7, 8, 9)}
MAX_COMPLETION = 400  # characters; no worked solution is longer than 100
_ANSWER = re.compile(r"= ?([0-9]{1,2}) ([0-9]{1,2})\s*$")

Operations = tuple[str, ...]

RULES: dict[str, Callable[[Operations], Operations]] = {
    "step": lambda ops: ops,
    "thrice": lambda ops: tuple(part for op in ops for part in (op, "x3")),
    "bump": lambda ops: tuple(part for op in ops for part in ("+7", op)),
    "twice": lambda ops: tuple(part for op in ops for part in (op, op)),
    "back": lambda ops: ops[::-1],
    "cross": lambda ops: tuple(
        part for i in range(0, len(ops), 2) for part in ops[i : i + 2][::-1]
    ),
    "turn": lambda ops: ops[1:] + ops[:1],
    "stairs": lambda ops: tuple(part for i, op in enumerate(ops, 1) for part in (op, f"+{i}")),
    "echo": lambda ops: ops + ops[:1],
    "frame": lambda ops: ("x9", *ops, "x7"),
    "skip": lambda ops: ops[::2],
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Problems that share a word, a rule and a range of lengths."""

    word: str
    level: str
    rule: str
    depths: tuple[int, ...]  # how many operations a prompt may have


def _family(word: str, level: str, rule: str, *depths: int) -> Family:
    return Family(word=word, level=level, rule=rule, depths=depths)


FAMILIES = (
    _family("playground", "easy", "step", 2, 3),
    _family("watermelon", "easy", "step", 2, 3),
    _family("photograph", "medium", "step", 4, 5),
    _family("thunderstorm", "medium", "frame", 3, 4),
    _family("basketball", "medium", "skip", 5, 6),
    # Equally long, so that nothing but reward tells which rule goes with which word.
    _family("lighthouse", "hard", "thrice", 3),
    _family("kaleidoscope", "hard", "bump", 3),
    _family("strawberry", "hard", "twice", 3),
    _family("jackhammer", "hard", "back", 3),
    _family("quicksilver", "hard", "cross", 3),
    _family("amphibious", "hard", "turn", 3),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One question: a start value and operations, to be worked by the family's rule."""

    family: Family
    start: int
    operations: Operations

    @property
    def prompt(self) -> str:
        return f"{self.family.word} {self.start} {' '.join(self.operations)} :"

    @property
    def answer(self) -> str:
        return answer(self.start, RULES[self.family.rule](self.operations))


def values(start: int, operations: Operations) -> list[int]:
    """Values after each of the operations, left to right."""
    found, value = [], start
    for operation in operations:
        operand = int(operation[1:])
        value = (value * operand if operation[0] == "x" else value + operand) % MODULUS
        found.append(value)
    return found


def answer(start: int, operations: Operations) -> str:
    """The last two values of a chain of at least two operations."""
    return "{} {}".format(*values(start, operations)[-2:])


def worked(problem: Problem, rule: str) -> str:
    """A completion that works the problem by a rule, be it the right one or not."""
    operations = RULES[rule](problem.operations)
    found = values(problem.start, operations)
    steps = " ".join(f"{op} {value}" for op, value in zip(operations, found, strict=True))
    return f" {rule} {steps} = {found[-2]} {found[-1]}"


def generate(split: str, seed: int, index: int, family: Family) -> Problem:
    """The problem with this index: a pure function of its arguments, within the split."""
    for attempt in range(10_000):
        name = f"{seed}/{index}/{attempt}/{family.word}"
        problem = _draw(name, family)
        bucket = zlib.crc32(problem.prompt.encode()) % 10
        if bucket in SPLITS[split] and _needs_its_rule(problem):
            return problem
    raise RuntimeError(f"no problem found for {name}")


def _draw(name: str, family: Family) -> Problem:
    # Digits of one big hash: unlike a library's generator it never changes between versions.
    number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=24).digest(), "big")

    def below(limit: int) -> int:
        nonlocal number
        number, digit = divmod(number, limit)
        return digit

    left = list(OPERATIONS)
    depth = family.depths[below(len(family.depths))]
    start = below(MODULUS)
    chosen = tuple(left.pop(below(len(left))) for _ in range(depth))
    return Problem(family=family, start=start, operations=chosen)


def _needs_its_rule(problem: Problem) -> bool:
    if len({op[0] for op in problem.operations}) < 2:
        return False
    found = {}
    for rule, rewrite in RULES.items():
        operations = rewrite(problem.operations)
        if len(operations) >= 2:
            found[rule] = answer(problem.start, operations)
    right = found.pop(problem.family.rule)
    return right not in found.values()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """The task: problems by index, levels in turn and families in turn within a level."""

    bounded: ClassVar[bool] = True
    problems: tuple[Problem, ...]
    levels: tuple[str, ...] = LEVELS

    def __len__(self) -> int:
        return len(self.problems)

    def prompt(self, i: int) -> Conversation:
        """The question, ending where the completion starts."""
        return question(self.problems[i].prompt)

    def level(self, i: int) -> str:
        """easy, medium or hard."""
        return self.problems[i].family.level

    def family(self, i: int) -> str:
        """The word that the prompt starts with."""
        return self.problems[i].family.word

    def solution(self, i: int) -> str:
        """The completion that works the problem by its own rule."""
        return worked(self.problems[i], self.problems[i].family.rule)

    def gold(self, i: int) -> str:
        """The right pair."""
        return self.problems[i].answer

    def answer(self, i: int, completion: str) -> str | None:
        """The pair of values that a completion ends with, or None."""
        if len(completion) > MAX_COMPLETION:
            return None
        match = _ANSWER.search(completion)
        return f"{int(match[1])} {int(match[2])}" if match else None

    def rewards(self, i: int, completion: str) -> Verdict:
        """One for the right pair at the end, zero for everything else."""
        found = self.answer(i, completion)
        if found is None:
            return Verdict(status="unparsed", score=0.0, reason="does not end with '= a b'")
        right = self.problems[i].answer
        if found == right:
            return Verdict(status="correct", score=1.0)
        return Verdict(status="wrong", score=0.0, reason=f"{found} is not {right}")


def make(*, split: str = "train", size: int = 3000, seed: int = 0) -> Arithmetic:
    """`size` different problems of a split; train, test and supervised share none."""
    if split not in SPLITS:
        raise ValueError(f"split={split!r}; allowed: {', '.join(SPLITS)}")
    if not 1 <= size <= 20_000:
        raise ValueError(f"size={size}; allowed: 1 to 20000")
    by_level = [[family for family in FAMILIES if family.level == level] for level in LEVELS]
    problems: dict[str, Problem] = {}
    index = 0
    while len(problems) < size:
        place = len(problems)
        families = by_level[place % len(by_level)]
        family = families[place // len(by_level) % len(families)]
        problem = generate(split, seed, index, family)
        problems.setdefault(problem.prompt, problem)
        index += 1
    return Arithmetic(problems=tuple(problems.values()))
