"""Every host record and function type that crosses a file; those of the device are in arrays.py.

Nothing here imports jax: graders run in worker processes, which must start fast.
Shapes: P prompt length · T new tokens.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

Memory = dict[str, np.ndarray]  # what one host part remembers
Ledger = dict[str, Memory]  # part name -> memory; with TrainState the whole state of a run

ROLES = ("system", "user", "assistant")
VERDICT_STATUSES = ("correct", "wrong", "unparsed", "timed_out", "crashed")


class Kind(enum.IntEnum):
    """Where a rollout came from."""

    PLAIN = 0
    SEEDED = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a verifier says of one completion: a status, a score in [0, 1] and a short reason."""

    status: str
    score: float
    reason: str = ""

    def __post_init__(self):
        if self.status not in VERDICT_STATUSES:
            raise ValueError(f"status={self.status!r}; allowed: {', '.join(VERDICT_STATUSES)}")
        if not 0 <= self.score <= 1:  # NaN too
            raise ValueError(f"score={self.score}; allowed: 0 to 1")

    @property
    def correct(self) -> bool:
        return self.status == "correct"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """What one side says: `role` is system, user or assistant."""

    role: str
    content: str

    def __post_init__(self):
        if self.role not in ROLES:
            raise ValueError(f"role={self.role!r}; allowed: {', '.join(ROLES)}")
        if not isinstance(self.content, str):
            raise ValueError(f"content of type {type(self.content).__name__}; allowed: str")


Conversation = tuple[Turn, ...]  # a prompt: it ends with the user's turn


def conversation(messages: object) -> Conversation:
    """Checked turns from a list of {"role", "content"} as data files have them.

    A content may be a list of {"type": "text", "text"} parts, which are joined. Raises ValueError
    naming what is wrong: no list, an empty one, an unknown role, a part that is no text, or another
    turn at the end than the user's: the assistant's would put an answer into the prompt.
    """
    if not isinstance(messages, list | tuple):
        raise ValueError(f"messages are a {type(messages).__name__}; allowed: a list of messages")
    if not messages:
        raise ValueError("messages are empty; allowed: at least one")
    turns = []
    for place, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ValueError(
                f"message {place} is a {type(message).__name__}; allowed: role and content"
            )
        content = message.get("content")
        if isinstance(content, list | tuple):
            texts = [part.get("text") if isinstance(part, dict) else part for part in content]
            content = "".join(texts) if all(isinstance(text, str) for text in texts) else content
        try:
            turns.append(Turn(role=message.get("role"), content=content))
        except ValueError as error:
            raise ValueError(f"message {place}: {error}") from None
    if turns[-1].role != "user":
        raise ValueError(f"the last turn is of role {turns[-1].role}; allowed: the user's")
    return tuple(turns)


def text_of(turns: Conversation) -> str:
    """What a conversation says, for comparing and embedding."""
    return "\n".join(turn.content for turn in turns)


def normal(text: str) -> str:
    """The text in lower case with single spaces: what makes two questions the same."""
    return " ".join(text.lower().split())


def question(text: str) -> Conversation:
    """The conversation in which a user says just `text`."""
    return (Turn(role="user", content=text),)


class Task(Protocol):
    """Prompts with a rule that grades answers to them; `i` counts from 0 to `len(task) - 1`.

    A task whose `rewards` and `answer` end soon, in little memory, on any text may say so with
    `bounded = True`: it is then graded within the trainer's process, others in worker processes.
    """

    levels: tuple[str, ...]

    def __len__(self) -> int: ...

    def prompt(self, i: int) -> Conversation: ...

    def level(self, i: int) -> str: ...

    def rewards(self, i: int, completion: str) -> Verdict: ...

    def answer(self, i: int, completion: str) -> str | None: ...


# --- explore ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """`n` more rollouts for the prompt in `slot`."""

    slot: int
    n: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """The text a rollout is drawn under and the text the learner sees before it."""

    sampled: Conversation
    trained: Conversation
    kind: Kind = Kind.PLAIN


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollout:
    """One graded completion; `tokens` and `logp` end with the stop token where there was one."""

    prompt: int  # index into the task
    slot: int  # prompt slot of the step
    index: int  # number within the prompt's rollouts of this step
    round: int
    kind: Kind
    sampled_prompt: np.ndarray  # i32[<=P]
    trained_prompt: np.ndarray  # i32[<=P]
    tokens: np.ndarray  # i32[<=T]
    logp: np.ndarray  # f32[<=T] of the distribution sampled from
    stopped: bool  # a stop token was drawn within the limit
    text: str
    verdict: Verdict
    reward: float  # weighted sum of the reward terms; NaN where the verifier failed
    terms: dict[str, float] = dataclasses.field(default_factory=dict)  # by name, without weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """The step so far: prompt index by slot, and the rollouts drawn for each slot."""

    prompts: tuple[int, ...]
    rollouts: tuple[tuple[Rollout, ...], ...]
    batch: int  # prompts that a step trains on; a planner may look at more

    @property
    def total(self) -> int:
        return sum(len(rows) for rows in self.rollouts)

    def scores(self, slot: int) -> np.ndarray:
        """Correctness of a slot's rollouts that could be graded, in the order drawn: f64[n]."""
        rows = [row for row in self.rollouts[slot] if np.isfinite(row.reward)]
        return np.array([row.verdict.score for row in rows], np.float64)

    def failed(self, slot: int) -> bool:
        """Whether there are graded rollouts of this slot and none is correct."""
        rows = [row for row in self.rollouts[slot] if np.isfinite(row.reward)]
        return bool(rows) and not any(row.verdict.correct for row in rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tools:
    """What host parts may ask of the run: the task, its grader, the tokenizer, the prompt limit."""

    task: Task
    grade: Callable[[Sequence[tuple[int, str]]], list[Verdict]]  # (prompt, completion) pairs
    encode: Callable[[Conversation], list[int]]
    decode: Callable[[Any], str]
    prompt_limit: int  # tokens of a prompt with exemplars
