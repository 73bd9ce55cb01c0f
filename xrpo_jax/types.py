"""Every host record and function type that crosses a file; those of the device are in arrays.py.

Nothing here imports jax: graders run in worker processes, which must start fast.
Shapes: P prompt length · T new tokens.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
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
    REFINED = 2  # an answer given after a critique of an earlier one
    UPSTREAM = 3  # the beginning of an answer, rewarded by what came of it
    DOWNSTREAM = 4  # an answer given after the beginning of another one


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
    One that knows the right answers may have `gold(i) -> str | None`, which tells one as text.
    """

    levels: tuple[str, ...]

    def __len__(self) -> int: ...

    def prompt(self, i: int) -> Conversation: ...

    def level(self, i: int) -> str: ...

    def rewards(self, i: int, completion: str) -> Verdict: ...

    def answer(self, i: int, completion: str) -> str | None: ...


# --- explore ---------------------------------------------------------------------------------


class Draft(enum.Enum):
    """Which rows of a request are drafts: not graded, for later rounds to build on."""

    NONE = "none"
    UNENDED = "unended"  # those without a stop token that may still grow
    ALL = "all"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """`n` more rollouts for the prompt in `slot`, of at most `limit` new tokens (0 = all allowed).

    `source` is an earlier rollout of this slot that the seeder may build the context on; with
    `resume` the rows go on where it was left, which must have been a draft.
    """

    slot: int
    n: int
    limit: int = 0
    source: Rollout | None = None
    resume: bool = False
    draft: Draft = Draft.NONE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """The text a rollout is drawn under and the text the learner sees before it.

    `before` and `after` are tokens around the prompt in both texts, after a token that begins every
    text of this tokenizer. `after` must be what a resumed row already has.
    """

    sampled: Conversation
    trained: Conversation
    kind: Kind = Kind.PLAIN
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollout:
    """One completion; `tokens` and `logp` end with the stop token where there was one.

    A draft has no verdict. A rollout that goes on with another one has its tokens, too, unless they
    are in the prompt.
    """

    prompt: int  # index into the task
    slot: int  # prompt slot of the step
    index: int  # number within all that was drawn for the prompt in this step
    round: int  # in which it, or the first that it goes on with, was drawn
    kind: Kind
    sampled_prompt: np.ndarray  # i32[<=P]
    trained_prompt: np.ndarray  # i32[<=P]
    tokens: np.ndarray  # i32[<=T]
    logp: np.ndarray  # f32[<=T] of the distribution sampled from
    stopped: bool  # a stop token was drawn within the limit
    text: str
    verdict: Verdict | None  # None for a draft
    reward: float  # weighted sum of the reward terms; NaN where the verifier failed
    terms: dict[str, float] = dataclasses.field(default_factory=dict)  # by name, without weights
    source: Rollout | None = None  # the request's
    resumed: bool = False  # whether it goes on with `source`
    draft: bool = False
    path: Any = None  # arrays.Path where the sampler left it, where the planner may go on

    def cut(self, length: int) -> Rollout:
        """The first `length` tokens (at least 1) as a draft that can be resumed there."""
        path = self.path
        if path is not None:
            path = dataclasses.replace(path, tokens=path.tokens[:length])
        return dataclasses.replace(
            self,
            tokens=self.tokens[:length],
            logp=self.logp[:length],
            stopped=self.stopped and length == len(self.tokens),
            verdict=None,
            reward=float("nan"),
            terms={},
            draft=True,
            path=path,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """The step so far: prompt index by slot, and the rollouts and drafts drawn for each slot."""

    prompts: tuple[int, ...]
    rollouts: tuple[tuple[Rollout, ...], ...]
    batch: int  # prompts that a step trains on; a planner may look at more
    drafts: tuple[tuple[Rollout, ...], ...] = ()  # by slot, like rollouts; () = none for any
    seed: int = 0
    step: int = 0
    max_new_tokens: int = 0
    values: Memory = dataclasses.field(default_factory=dict)  # known of all prompts before the step
    value: np.ndarray | None = None  # f64[slots] the chance of success that `values` says

    @property
    def total(self) -> int:
        return sum(len(rows) for rows in self.rollouts)

    @property
    def decoded(self) -> int:
        """Tokens that were sampled in this step: those that a row took over count once."""
        drawn = [row for rows in (*self.rollouts, *self.drafts) for row in rows]
        whole = sum(len(row.tokens) for row in drawn)
        return whole - sum(len(row.source.tokens) for row in drawn if row.resumed)

    def scores(self, slot: int) -> np.ndarray:
        """Correctness of a slot's rollouts that could be graded, in the order drawn: f64[n]."""
        rows = [row for row in self.rollouts[slot] if np.isfinite(row.reward)]
        return np.array([row.verdict.score for row in rows], np.float64)

    def failed(self, slot: int) -> bool:
        """Whether there are graded rollouts of this slot and none is correct."""
        rows = [row for row in self.rollouts[slot] if np.isfinite(row.reward)]
        return bool(rows) and not any(row.verdict.correct for row in rows)


class Grading(Protocol):
    """Completions that are graded while others are still decoded.

    It is used within a `with`, which gives up what is not graded when it is left.
    """

    hidden: float  # seconds in which something was being graded and nobody waited for it

    def __enter__(self) -> Grading: ...

    def __exit__(self, *error) -> None: ...

    def add(self, prompt: int, text: str) -> None:
        """Hand in a completion of the task's prompt; waits for no worker process."""

    def verdicts(self) -> list[Verdict]:
        """What is said of each completion, in the order added."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tools:
    """What host parts may ask of the run: the task, its grader, the tokenizer, the prompt limit."""

    task: Task
    grading: Callable[[], Grading]
    encode: Callable[[Conversation], list[int]]
    decode: Callable[[Any], str]
    prompt_limit: int  # tokens of a prompt with what a seeder adds
    begin: tuple[int, ...] = ()  # tokens that begin every text, such as BOS
