"""Every record and function type that crosses a file.

Shapes: G prompt slots in a step · N rollout rows · n = rows of one device or micro-batch ·
P prompt length · T new tokens · V vocabulary.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from flax import struct

Params = Any  # nested dict of arrays, see model/params.py
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
    """Prompts with a rule that grades answers to them; `i` counts from 0 to `len(task) - 1`."""

    levels: tuple[str, ...]

    def __len__(self) -> int: ...

    def prompt(self, i: int) -> Conversation: ...

    def level(self, i: int) -> str: ...

    def rewards(self, i: int, completion: str) -> Verdict: ...

    def answer(self, i: int, completion: str) -> str | None: ...


# --- explore: host records ---------------------------------------------------------------------


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
    reward: float  # sum of the reward terms; NaN where the verifier failed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """The step so far: prompt index by slot, and the rollouts drawn for each slot."""

    prompts: tuple[int, ...]
    rollouts: tuple[tuple[Rollout, ...], ...]
    batch: int  # prompts that a step trains on; a planner may look at more

    @property
    def total(self) -> int:
        return sum(len(rows) for rows in self.rollouts)

    def rewards(self, slot: int) -> np.ndarray:
        """Rewards of a slot's rollouts that could be graded, in the order drawn: f64[n]."""
        rewards = np.array([row.reward for row in self.rollouts[slot]], np.float64)
        return rewards[np.isfinite(rewards)]

    def failed(self, slot: int) -> bool:
        """Whether there are graded rollouts of this slot and none is correct."""
        rows = [row for row in self.rollouts[slot] if np.isfinite(row.reward)]
        return bool(rows) and not any(row.verdict.correct for row in rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tools:
    """What host parts may ask of the run: the task, the tokenizer, the prompt limit in tokens."""

    task: Task
    encode: Callable[[Conversation], list[int]]
    decode: Callable[[Any], str]
    prompt_limit: int  # tokens of a prompt with exemplars


# --- learn: device records ---------------------------------------------------------------------


@struct.dataclass
class Samples:
    """Drawn completions: tokens i32[N,T], logp f32[N,T], length i32[N], stopped bool[N]."""

    tokens: Any
    logp: Any
    length: Any
    stopped: Any


@struct.dataclass
class Batch:
    """One learner step; fields that no part asked for are None.

    Prompts and completions are apart: column t of an array [N,T] is about completion token t.
    `mask` is 1 on trained tokens.
    """

    prompt: Any  # i32[N,P] the prompt that the learner sees
    prompt_length: Any  # i32[N]
    tokens: Any  # i32[N,T] completions
    length: Any  # i32[N] tokens of the completion
    mask: Any  # f32[N,T] all zero on a padding row
    old_logp: Any  # f32[N,T] behaviour policy, trained context, the trainer's numerics
    reward: Any  # f32[N]
    correct: Any  # f32[N] 1 where the verifier said correct
    group: Any  # i32[N] prompt slot; rows of a group are compared with one another
    kind: Any  # i32[N]
    stopped: Any  # f32[N] 1 where a stop token ended the row within the limit
    valid: Any  # f32[N] 0 on padding rows
    sampler_logp: Any = None  # f32[N,T] NaN where the sampler saw another context; host only
    ref_logp: Any = None  # f32[N,T] only when a penalty asks for it


@struct.dataclass
class Scores:
    """Constants of the loss, computed once on whole groups: advantage and weight f32[N,T]."""

    advantage: Any
    weight: Any


@struct.dataclass
class TokenStats:
    """The current policy on the batch: logp f32[n,T], entropy f32[n,T]; 0 on padding."""

    logp: Any
    entropy: Any


@struct.dataclass
class TrainState:
    """Float32 master parameters and the optimizer's state; its step number is the checkpoint's."""

    params: Any
    optimizer: Any


# (params, list of prompts i32[<=P], row i[N], rng.Rows of N, limit i[N] or int) -> NumPy Samples
Draw = Callable[..., Samples]
