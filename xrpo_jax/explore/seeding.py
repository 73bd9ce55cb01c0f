"""Seeders `(Request, Progress, Memory, Tools) -> Context`: the text a rollout is drawn under.

One that remembers has `init` and `observe`; a step reads what earlier steps wrote, never its own.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable

import numpy as np

from xrpo_jax.explore.embed import ngrams
from xrpo_jax.types import (
    Context,
    Conversation,
    Kind,
    Memory,
    Progress,
    Request,
    Rollout,
    Tools,
    Turn,
    normal,
)

KEEPS = ("newest", "shortest")
LOSS_CONTEXTS = ("generation", "plain")


def _plain(request: Request, progress: Progress, tools: Tools) -> Context:
    prompt = tools.task.prompt(progress.prompts[request.slot])
    return Context(sampled=prompt, trained=prompt)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoSeed:
    """Every rollout is drawn under its plain prompt."""

    seeds = False
    trains_seeded = False

    def __call__(
        self, request: Request, progress: Progress, memory: Memory, tools: Tools
    ) -> Context:
        return _plain(request, progress, tools)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exemplars:
    """XRPO's seeding: prompts that only failed see `shots` solved neighbours first (2510.06672).

    The corpus holds the policy's own full-reward, untruncated rollouts of plain prompts, one a
    problem (`keep`: the newest or the shortest), evicted by oldest update beyond `capacity`.
    Neighbours are the most similar prompts by `embed`, never the same problem or an identical text,
    with a cosine from `min_similarity` (a prompt of another kind teaches nothing and costs the
    plain rollout) to `max_similarity`; the nearest stands next to the question. `loss_context` says
    whether the learner sees the exemplars ("generation", on-policy) or the plain prompt ("plain",
    context distillation: the success is credited where it is wanted). The default is what did
    better in experiments/README.md. What is beyond trigger, corpus and number of exemplars is ours.
    """

    shots: int = 2
    capacity: int = 1024
    keep: str = "newest"
    loss_context: str = "plain"
    min_similarity: float = 0.4
    max_similarity: float = 0.95
    embed: Callable[[list[str]], np.ndarray] = ngrams
    seeds = True

    @property
    def trains_seeded(self) -> bool:
        """Whether the learner sees exemplars."""
        return self.loss_context == "generation"

    def __post_init__(self):
        for name, allowed in (("keep", KEEPS), ("loss_context", LOSS_CONTEXTS)):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"algorithm.{name}={getattr(self, name)!r}; allowed: {', '.join(allowed)}"
                )
        for name in ("shots", "capacity"):
            if getattr(self, name) < 1:
                raise ValueError(f"algorithm.{name}={getattr(self, name)}; allowed: at least 1")
        if not -1 <= self.min_similarity <= self.max_similarity <= 1:
            raise ValueError(
                f"algorithm.min_similarity={self.min_similarity}, "
                f"algorithm.max_similarity={self.max_similarity}; allowed: cosines in this order"
            )

    def init(self, max_new_tokens: int) -> Memory:
        """An empty corpus: prompt (-1 = free), completion tokens, their number, last update."""
        return {
            "prompt": np.full(self.capacity, -1, np.int64),
            "tokens": np.zeros((self.capacity, max_new_tokens), np.int32),
            "length": np.zeros(self.capacity, np.int32),
            "step": np.full(self.capacity, -1, np.int64),
        }

    def observe(self, memory: Memory, progress: Progress, step: int) -> Memory:
        """The corpus with this step's successes admitted."""
        memory = {name: values.copy() for name, values in memory.items()}
        for prompt, rows in zip(progress.prompts, progress.rollouts, strict=True):
            admitted = [
                row
                for row in rows
                if row.kind == Kind.PLAIN and row.stopped and row.verdict.correct
            ]
            if admitted:
                self._admit(memory, prompt, admitted, step)
        return memory

    def _admit(self, memory: Memory, prompt: int, rows: list[Rollout], step: int) -> None:
        newest = rows[-1]
        if self.keep == "shortest":
            newest = min(rows, key=lambda row: len(row.tokens))
        (known,) = np.nonzero(memory["prompt"] == prompt)
        if len(known):
            place = known[0]
            shorter = len(newest.tokens) <= memory["length"][place]
            if self.keep == "shortest" and not shorter:
                return
        else:
            place = int(np.argmin(memory["step"]))  # free places have step -1
        memory["prompt"][place] = prompt
        memory["tokens"][place] = 0
        memory["tokens"][place, : len(newest.tokens)] = newest.tokens
        memory["length"][place] = len(newest.tokens)
        memory["step"][place] = step

    def __call__(
        self, request: Request, progress: Progress, memory: Memory, tools: Tools
    ) -> Context:
        plain = _plain(request, progress, tools)
        if not progress.failed(request.slot):
            return plain
        places = self.retrieve(progress.prompts[request.slot], memory, tools)
        exemplars = [_exemplar(place, memory, tools) for place in places]
        seeded = _fit(exemplars, plain.sampled, tools)
        if seeded == plain.sampled:
            return plain
        trained = plain.sampled if self.loss_context == "plain" else seeded
        return Context(sampled=seeded, trained=trained, kind=Kind.SEEDED)

    def retrieve(self, prompt: int, memory: Memory, tools: Tools) -> list[int]:
        """Places in the corpus of the neighbours of `prompt`, nearest first."""
        (places,) = np.nonzero(memory["prompt"] >= 0)
        if not len(places):
            return []
        question = _asked(tools.task.prompt(prompt))
        texts, vectors = _embedded(
            self.embed, tools.task.prompt, memory["prompt"][places].tobytes()
        )
        # Not a BLAS product: waking its threads for one vector took 10 ms beside the sampler's.
        similarity = np.einsum("nd,d->n", vectors, self.embed([question])[0])
        order = np.argsort(-similarity, kind="stable")
        order = order[similarity[order] >= self.min_similarity]
        order = order[similarity[order] <= self.max_similarity]
        return list(
            itertools.islice(
                (
                    int(places[i])
                    for i in order
                    if memory["prompt"][places[i]] != prompt
                    and normal(texts[i]) != normal(question)
                ),
                self.shots,
            )
        )


@functools.lru_cache(maxsize=2)  # the corpus is the same for every request of a step
def _embedded(embed: Callable, prompt_of: Callable, prompts: bytes) -> tuple[list[str], np.ndarray]:
    """Texts and embeddings of the corpus's prompts (i64 numbers as bytes)."""
    texts = [_asked(prompt_of(int(prompt))) for prompt in np.frombuffer(prompts, np.int64)]
    return texts, embed(texts)


def _asked(prompt: Conversation) -> str:
    """The question itself, without examples or a system turn that every prompt of a task has."""
    return prompt[-1].content


def _exemplar(place: int, memory: Memory, tools: Tools) -> tuple[Conversation, str]:
    completion = memory["tokens"][place, : memory["length"][place]]
    return tools.task.prompt(int(memory["prompt"][place])), tools.decode(completion)


def _fit(
    exemplars: list[tuple[Conversation, str]], question: Conversation, tools: Tools
) -> Conversation:
    """Exemplars as earlier turns, farthest first, then the question, within the prompt limit.

    Of an exemplar only its own question and answer are shown. The farthest is left out first; the
    last one left is cut from its end.
    """

    def seeded(kept: list[tuple[Conversation, str]]) -> Conversation:
        system = tuple(turn for turn in question if turn.role == "system")
        turns = []
        for prompt, completion in reversed(kept):
            turns += [prompt[-1], Turn(role="assistant", content=completion)]
        return (*system, *turns, *(turn for turn in question if turn.role != "system"))

    def fits(kept: list[tuple[Conversation, str]]) -> bool:
        return len(tools.encode(seeded(kept))) <= tools.prompt_limit

    while len(exemplars) > 1 and not fits(exemplars):
        exemplars = exemplars[:-1]
    if not exemplars or fits(exemplars):
        return seeded(exemplars)
    prompt, completion = exemplars[0]
    low, high = 0, len(completion)  # the longest beginning that fits
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits([(prompt, completion[:middle])]) else (low, middle - 1)
    return seeded([(prompt, completion[:low])]) if low else question
