"""Stand-ins for the model's side of exploration: hand-made rollouts, task, tokenizer, draw."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable

import numpy as np

from xrpo_jax.arrays import Path, Samples
from xrpo_jax.explore.grading import Here
from xrpo_jax.explore.reward import Graded
from xrpo_jax.types import Conversation, Kind, Progress, Rollout, Tools, Verdict, question

END = 1  # the stop token; every other token is a character's code
CORRECT = Verdict(status="correct", score=1.0)
WRONG = Verdict(status="wrong", score=0.0)


def encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def said(prompt: Conversation) -> str:
    """A conversation as plain text, a line's end after each answer."""
    return "".join(turn.content + "\n" * (turn.role != "user") for turn in prompt)


def encode_prompt(prompt: Conversation) -> list[int]:
    return encode(said(prompt))


def decode(tokens) -> str:
    return "".join(chr(token) for token in tokens if token != END)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Texts:
    """A task of given prompts; a completion is right when it is the prompt's answer."""

    prompts: tuple[str, ...]
    answers: tuple[str, ...] = ()
    levels: tuple[str, ...] = ("only",)

    def __len__(self) -> int:
        return len(self.prompts)

    def prompt(self, i: int) -> Conversation:
        return question(self.prompts[i])

    def level(self, i: int) -> str:
        return self.levels[i % len(self.levels)]

    def rewards(self, i: int, completion: str) -> Verdict:
        return CORRECT if completion == self.answers[i] else WRONG

    def answer(self, i: int, completion: str) -> str | None:
        return completion or None


def graded(verdict: Verdict = WRONG, tokens: int = 1, limit: int = 10, text: str = "x") -> Graded:
    return Graded(verdict=verdict, text=text, tokens=tokens, limit=limit)


def tools_for(task, prompt_limit: int = 1000, encode=encode_prompt, decode=decode) -> Tools:
    """Tools of a task that is graded in this process."""
    return Tools(
        task=task,
        grading=functools.partial(Here, task),
        encode=encode,
        decode=decode,
        prompt_limit=prompt_limit,
    )


def tools(prompts, answers=(), prompt_limit: int = 1000) -> Tools:
    return tools_for(Texts(prompts=tuple(prompts), answers=tuple(answers)), prompt_limit)


def rollout(
    correct: bool,
    *,
    prompt: int = 0,
    slot: int = 0,
    index: int = 0,
    kind: Kind = Kind.PLAIN,
    text: str = "x",
    stopped: bool = True,
    reward: float | None = None,
) -> Rollout:
    """One graded completion of `text`, with the stop token when `stopped`."""
    tokens = np.array(encode(text) + [END] * stopped, np.int32)
    return Rollout(
        prompt=prompt,
        slot=slot,
        index=index,
        round=0,
        kind=kind,
        sampled_prompt=np.array([7], np.int32),
        trained_prompt=np.array([7], np.int32),
        tokens=tokens,
        logp=np.full(len(tokens), -1.0, np.float32),
        stopped=stopped,
        text=text,
        verdict=CORRECT if correct else WRONG,
        reward=float(correct) if reward is None else reward,
    )


def progress(outcomes, batch: int | None = None) -> Progress:
    """Slot s is prompt s with plain rollouts of `outcomes[s]` (bools, or counts as (right, n))."""
    rows = []
    for slot, outcome in enumerate(outcomes):
        if isinstance(outcome, tuple) and outcome:
            right, number = outcome
            outcome = [True] * right + [False] * (number - right)
        rows.append(
            tuple(
                rollout(correct, prompt=slot, slot=slot, index=i)
                for i, correct in enumerate(outcome)
            )
        )
    return Progress(
        prompts=tuple(range(len(rows))),
        rollouts=tuple(rows),
        batch=len(rows) if batch is None else batch,
    )


class Cache(str):
    """The prompt's text in place of a cache on a device."""

    def delete(self) -> None:
        """What a step does with the caches of its paths when it ends."""


@dataclasses.dataclass(kw_only=True)
class Draw:
    """Draws what `says(prompt text, prompt, index)` returns, and keeps what it was asked.

    A row that is resumed says the rest of its own text, from where the path's tokens end. `ends`
    says of how many rows which end together, in their order: a list of i[M]; by default all do.
    """

    says: object
    new: int = 8
    ends: Callable = lambda size: [np.arange(size)]
    calls: list = dataclasses.field(default_factory=list)

    def __call__(self, params, prompts, row, keys, limit, keep=False, finished=None) -> Samples:
        texts = [decode(prompt) for prompt in prompts]
        nothing = np.zeros(0, np.int32)
        begins = [
            Path(
                cache=Cache(texts[place]),
                place=i,
                prompt_length=len(prompts[place]),
                tokens=nothing,
            )
            for i, place in enumerate(row)
        ]
        out = self._draw(begins, keys, limit, keep, prompts=texts, row=np.array(row))
        return self._told(out, finished)

    def resume(self, params, paths, keys, limit, keep=False, finished=None) -> Samples:
        if any(len(path.tokens) == 0 for path in paths):
            raise ValueError("a path of no tokens cannot be resumed; allowed: at least one token")
        texts = [path.cache for path in paths]
        row = np.arange(len(paths))
        out = self._draw(paths, keys, limit, keep, prompts=texts, row=row, resumed=True)
        return self._told(out, finished)

    def _told(self, out: Samples, finished) -> Samples:
        """`out`, of which none, then some rows after the other have ended."""
        nobody = [np.arange(0)]
        for rows in itertools.chain(nobody, self.ends(len(out.length))) if finished else []:
            fields = (out.tokens, out.logp, out.length, out.stopped)
            paths = None if out.paths is None else tuple(out.paths[i] for i in rows)
            finished(rows, Samples(*(field[rows] for field in fields), paths))
        return out

    def _draw(self, begins, keys, limit, keep, **call) -> Samples:
        self.calls.append(
            {
                "prompt": np.array(keys.prompt),
                "index": np.array(keys.index),
                "step_key": np.array(keys.step_key),
                "limit": limit,
                "resumed": False,
            }
            | call
        )
        size = len(begins)
        out = Samples(
            tokens=np.zeros((size, self.new), np.int32),
            logp=np.zeros((size, self.new), np.float32),
            length=np.zeros(size, np.int32),
            stopped=np.zeros(size, bool),
        )
        paths = []
        for i, most in enumerate(np.broadcast_to(limit, size).tolist()):
            begun = begins[i].tokens
            out.stopped[i] = END in begun
            tokens = []
            if not out.stopped[i]:
                text = self.says(begins[i].cache, int(keys.prompt[i]), int(keys.index[i]))
                tokens = [*encode(text[len(begun) :]), END][: min(most, self.new - len(begun))]
                out.stopped[i] = END in tokens
            out.tokens[i, : len(tokens)] = tokens
            out.logp[i, : len(tokens)] = -0.1 * (1 + len(begun) + np.arange(len(tokens)))
            out.length[i] = len(tokens)
            whole = np.append(begun, np.array(tokens, np.int32))
            paths.append(dataclasses.replace(begins[i], tokens=whole))
        return out.replace(paths=tuple(paths)) if keep else out
