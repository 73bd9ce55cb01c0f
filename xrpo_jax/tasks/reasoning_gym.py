"""Puzzles of the library reasoning_gym: its generators make the questions, its scorers grade.

    --config.task.name=reasoning_gym --config.task.dataset=chain_sum \
    --config.task.options='{"min_terms": 3}'

A question belongs to training or to evaluation by a hash of its text, whatever seeds and sizes.
The scorers run in this process. Some of them evaluate the answer as Python code: what could run as
more than plain values or arithmetic never reaches those.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import re
from collections.abc import Callable
from typing import Any

from xrpo_jax.types import Conversation, Verdict, normal, question

INSTRUCTION = "Think step by step, and put only the final answer between <answer> and </answer>."
BLOCK = 200  # questions of one generator; each block has a seed of its own
TEST_SHARE = 64  # of 256 hash values
MAX_ANSWER = 10_000  # characters; the longest right answers are boards and matrices

_VALUES = re.compile(r"[\[\],\s0-9A-Z'\"_-]*")  # lists of numbers, capitals and texts: no calls
_ARITHMETIC = re.compile(r"(?:[-+/()\s0-9.]|\*(?!\*)){0,200}")  # no powers: they could never end
SAFE_ANSWERS = {  # by data set whose scorer evaluates the answer: what it may be given
    "binary_matrix": _VALUES,
    "countdown": _ARITHMETIC,
    "n_queens": _VALUES,
    "puzzle24": _ARITHMETIC,
    "spiral_matrix": _VALUES,
    "string_insertion": _VALUES,
}
REFUSED = {  # scorers that evaluate formulas, for which no such pattern is safe; and mixtures
    "composite": "mixes other data sets; choose one of them",
    "intermediate_integration": "its scorer runs answers as code, which needs a sandbox",
    "polynomial_multiplication": "its scorer runs answers as code, which needs a sandbox",
    "simple_integration": "its scorer runs answers as code, which needs a sandbox",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One entry of a generator with the scorer of the generator that made it."""

    entry: dict
    score: Callable[[str, dict], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReasoningGym:
    """The task: problems by index; an answer is correct from a score of `threshold` on."""

    dataset: str
    problems: tuple[Problem, ...]
    threshold: float
    instruction: str
    notes: str = ""

    @property
    def levels(self) -> tuple[str, ...]:
        return (self.dataset,)

    def __len__(self) -> int:
        return len(self.problems)

    def prompt(self, i: int) -> Conversation:
        """The library's question and the instruction."""
        return question(f"{self.problems[i].entry['question']}\n{self.instruction}".strip())

    def level(self, i: int) -> str:
        """The name of the data set."""
        return self.dataset

    def describe(self) -> str:
        """How many problems there are, in a line."""
        return self.notes

    def gold(self, i: int) -> str | None:
        """The library's own answer; None where it has none, and only its scorer can tell."""
        found = self.problems[i].entry.get("answer")
        return None if found is None else str(found)

    def answer(self, i: int, completion: str) -> str | None:
        """The answer, its white space evened out; None if there is none."""
        found = final_answer(completion)
        return None if found is None else " ".join(found.split())

    def rewards(self, i: int, completion: str) -> Verdict:
        """The library's score; what its scorer raises is raised."""
        found = final_answer(completion)
        if found is None:
            return Verdict(status="unparsed", score=0.0, reason="no final answer found")
        safe = SAFE_ANSWERS.get(self.dataset)
        if safe and not safe.fullmatch(found):
            reason = "holds what the scorer would run as code"
            return Verdict(status="wrong", score=0.0, reason=reason)
        problem = self.problems[i]
        try:
            score = float(problem.score(found, problem.entry))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError) as e:
            # What the library's scorers raise on answers of another form than theirs.
            return Verdict(status="wrong", score=0.0, reason=f"not readable ({type(e).__name__})")
        status = "correct" if score >= self.threshold else "wrong"
        return Verdict(status=status, score=score, reason=f"score {score:g}")


def final_answer(completion: str) -> str | None:
    """What the last `<answer>` holds, or else the last line; after the thinking only.

    None where there is neither, where the tag or the thinking is not closed, and when too long.
    """
    text = completion.rpartition("</think>")[2]
    start = text.rfind("<answer>")
    if "<think>" in text:
        return None
    if start >= 0:
        end = text.find("</answer>", start)
        text = text[start + len("<answer>") : end].strip() if end >= 0 else ""
    else:
        text = text.strip().rpartition("\n")[2].strip()
    return text if 0 < len(text) <= MAX_ANSWER else None


def make(
    *,
    split: str = "train",
    dataset: str = "chain_sum",
    size: int = 1000,
    seed: int = 0,
    threshold: float = 1.0,  # of the library's score, for an answer to count as correct
    options: str = "",  # settings of the generator, as JSON
    instruction: str = INSTRUCTION,  # appended to every question; "" for none
) -> ReasoningGym:
    """Up to `size` different problems; train and test share no question, whatever the seeds."""
    if split not in ("train", "test"):
        raise ValueError(f"split={split!r}; allowed: train, test")
    if not 1 <= size <= 100_000:
        raise ValueError(f"size={size}; allowed: 1 to 100000")
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold={threshold}; allowed: above 0 to 1")
    create = _generator(dataset, options)
    found: dict[str, Problem] = {}
    block = 0
    while len(found) < size:
        before = len(found)
        # The library seeds question i by seed + i, so that neighbouring seeds share questions:
        # those of the blocks are hashes.
        digest = hashlib.blake2b(f"{seed}/{block}".encode(), digest_size=4).digest()
        generator = create(int.from_bytes(digest, "big") // 2)
        for place in range(BLOCK):
            entry = generator[place]
            if len(found) < size and _split(entry["question"]) == split:
                problem = Problem(entry=entry, score=generator.score_answer)
                found.setdefault(entry["question"], problem)
            if len(found) == size:
                break
        if len(found) == before:  # a whole block without a new question: there are no more
            break
        block += 1
    if not found:
        raise ValueError(
            f"dataset={dataset!r} has too few different questions for {split}; choose another, or "
            f"other task.options (now {options!r})"
        )
    return ReasoningGym(
        dataset=dataset,
        problems=tuple(found.values()),
        threshold=threshold,
        instruction=instruction,
        notes=f"{split}: {len(found)} problems of reasoning_gym's {dataset}"
        + (f", which has no more (size={size})" if len(found) < size else ""),
    )


def _split(text: str) -> str:
    return "test" if hashlib.blake2b(normal(text).encode()).digest()[0] < TEST_SHARE else "train"


def _generator(dataset: str, options: str) -> Callable[[int], Any]:
    """The function from a seed to a generator of BLOCK questions, its settings checked."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ValueError(
            f"dataset={dataset!r} needs the library reasoning_gym: pip install reasoning_gym"
        ) from error
    names = sorted(DATASETS.keys() - REFUSED.keys())
    if dataset in REFUSED:
        raise ValueError(f"dataset={dataset!r}: {REFUSED[dataset]}; allowed: {', '.join(names)}")
    if dataset not in names:
        near = difflib.get_close_matches(dataset, names, n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"dataset={dataset!r}{hint}; allowed: {', '.join(names)}")
    kind, settings = DATASETS[dataset]
    try:
        given = json.loads(options or "{}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"options={options!r} is no JSON ({error})") from error
    known = {field.name for field in dataclasses.fields(settings)} - {"seed", "size"}
    if not isinstance(given, dict) or not given.keys() <= known:
        wrong = ", ".join(sorted(given.keys() - known)) if isinstance(given, dict) else options
        raise ValueError(
            f"options={options!r}: {wrong} is no setting of {dataset!r}; allowed: an object with "
            f"{', '.join(sorted(known))}"
        )

    def create(seed: int) -> Any:
        try:
            made = settings(**given, seed=seed, size=BLOCK)
            made.validate()
            return kind(made)
        except Exception as error:  # validation is by assertions, but wrong types raise anything
            raise ValueError(
                f"options={options!r}: {dataset!r} refuses them ({type(error).__name__}: {error})"
            ) from error

    return create
