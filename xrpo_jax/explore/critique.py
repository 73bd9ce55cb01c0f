"""The host half of Critique-GRPO (2506.03106): answer again what failed, after a critique of it.

A response is an initial rollout, a refinement an answer to the same question drawn after a response
and a critique. Critiques are by rule, or drafts of the model's own. What is open in the paper is
listed in algorithms/critique_grpo.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from xrpo_jax.prompts import gold
from xrpo_jax.types import (
    Context,
    Conversation,
    Draft,
    Kind,
    Memory,
    Progress,
    Request,
    Rollout,
    Tools,
    Turn,
)

GATES = ("all_fail", "always")
CRITIQUES = ("verdict", "verdict_and_answer", "self")
# What stands in the user's turn after a response.
WRONG = "That is incorrect."
NOTHING = "No final answer was found."
RIGHT = "The correct answer is {}."
ASK = "Find the mistakes in that answer, step by step."
AGAIN = "Please answer again."


def initial(rows: tuple[Rollout, ...]) -> tuple[Rollout, ...]:
    """The rollouts of a prompt that refine nothing."""
    return tuple(row for row in rows if row.source is None)


def refinements(rows: tuple[Rollout, ...]) -> tuple[Rollout, ...]:
    """The others, in the order drawn."""
    return tuple(row for row in rows if row.source is not None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refine:
    """`group - kept` initial rollouts a prompt, then refinements of failed ones.

    The gate lets through prompts whose initial rollouts all failed ("all_fail") or at least one of
    them ("always"), of those that could be graded. A prompt gets `number` refinements, spread over
    its failures in order (0 = one for each), of which `kept` are trained on, correct ones first;
    the others cost tokens and nothing else. With `critiques` each response to refine gets a draft
    first.
    """

    group: int
    kept: int = 1
    number: int = 0
    gate: str = "all_fail"
    critiques: bool = False

    def check(self, batch: int) -> None:
        if not 1 <= self.kept < self.group - self.kept:
            raise ValueError(
                f"algorithm.kept={self.kept}; allowed: at least 1 and less than half of "
                f"rollout.group={self.group}, the rest being initial rollouts"
            )
        if self.number and self.number < self.kept:
            raise ValueError(
                f"algorithm.refinements={self.number}; allowed: 0 (one for each failed rollout) or "
                f"at least algorithm.kept={self.kept}"
            )

    def slots(self, batch: int) -> int:
        return batch

    def rows(self, batch: int) -> int:
        return batch * self.group

    def refined(self, progress: Progress, slot: int) -> list[tuple[Rollout, int]]:
        """The responses of a prompt to refine, each with its number of refinements."""
        rows = [row for row in initial(progress.rollouts[slot]) if np.isfinite(row.reward)]
        failed = [row for row in rows if not row.verdict.correct]
        if not failed or (self.gate == "all_fail" and len(failed) < len(rows)):
            return []
        share, more = divmod(self.number or len(failed), len(failed))
        counts = [share + (place < more) for place in range(len(failed))]
        return [(row, n) for row, n in zip(failed, counts, strict=True) if n]

    def __call__(self, progress: Progress, round: int) -> list[Request]:
        slots = range(progress.batch)
        if round == 0:
            return [Request(slot=slot, n=self.group - self.kept) for slot in slots]
        last = 1 + self.critiques
        if round > last:
            return []
        requests = []
        for slot in slots:
            drafts = progress.drafts[slot] if self.critiques else ()
            critiques = {draft.source.index: draft for draft in drafts}
            for row, n in self.refined(progress, slot):
                if round < last:
                    request = Request(slot=slot, n=1, source=row, draft=Draft.ALL)
                else:
                    request = Request(slot=slot, n=n, source=critiques.get(row.index, row))
                requests.append(request)
        return requests

    def select(self, progress: Progress) -> list[tuple[Rollout, ...]]:
        """A group a prompt: its initial rollouts, then the refinements that are kept."""

        def rank(row: Rollout) -> tuple[bool, bool]:  # what could not be graded teaches nothing
            return not row.verdict.correct, not np.isfinite(row.reward)

        return [
            (*initial(rows), *sorted(refinements(rows), key=rank)[: self.kept])
            for rows in progress.rollouts
        ]

    def report(self, progress: Progress) -> dict[str, float]:
        """How many prompts were refined, and what came of it."""
        groups = [refinements(rows) for rows in progress.rollouts]
        through = [rows for rows in groups if rows]
        metrics = {"gated": len(through) / max(len(groups), 1)}
        right = [
            [row.verdict.correct for row in rows if np.isfinite(row.reward)] for rows in through
        ]
        if any(right):
            metrics["rescued_share"] = float(np.mean([any(each) for each in right]))
            metrics["refined_accuracy"] = float(np.mean([one for each in right for one in each]))
        return metrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class Critique:
    """Question, response, then critique and instruction; the learner sees the question alone.

    By rule a critique says that the response is wrong ("verdict"), and what is right
    ("verdict_and_answer"); "self" takes the model's. A response is cut from its end until the
    prompt fits, then a critique of the model's; where nothing fits, the refinement is one more
    plain rollout.
    """

    critique: str = "verdict"
    seeds = True
    trains_seeded = False

    def check(self, tools: Tools) -> None:
        """ValueError where the task or the prompt limit does not allow for such critiques."""
        task = tools.task
        answers = {}
        if self.critique == "verdict_and_answer":
            answers = {i: gold(task, i) for i in range(len(task))}
        for i, answer in answers.items():
            if answer is None:
                raise ValueError(
                    f"algorithm.critique={self.critique!r} tells the right answer, which the task "
                    f"does not have for its prompt {i}; allowed: verdict, self"
                )
        longest = max(range(len(task)), key=lambda i: len(tools.encode(task.prompt(i))))
        said = [ASK, _again("")]
        if self.critique != "self":
            answer = answers.get(longest)
            said = [_again(by_rule(status, answer)) for status in ("wrong", "unparsed")]
        prompt = task.prompt(longest)
        least = max(len(tools.encode(_shown(prompt, "", text))) for text in said)
        if least > tools.prompt_limit:
            raise ValueError(
                f"rollout.seeded_length={tools.prompt_limit}; allowed: at least {least}, which the "
                f"longest prompt takes with algorithm.critique={self.critique!r}, and more for the "
                "response that is refined"
            )

    def __call__(
        self, request: Request, progress: Progress, memory: Memory, tools: Tools
    ) -> Context:
        number = progress.prompts[request.slot]
        prompt, source = tools.task.prompt(number), request.source
        plain = Context(sampled=prompt, trained=prompt)
        if source is None:
            return plain
        if request.draft is Draft.ALL:
            asked = _fit(lambda text: _shown(prompt, text, ASK), source.text, tools) or prompt
            return Context(sampled=asked, trained=asked, kind=Kind.REFINED)
        if source.draft:
            response, said = source.source, source.text
        else:
            answer = gold(tools.task, number) if self.critique == "verdict_and_answer" else None
            response, said = source, by_rule(source.verdict.status, answer)
        shown = _fit(lambda text: _shown(prompt, text, _again(said)), response.text, tools)
        if shown is None and source.draft:
            shown = _fit(lambda text: _shown(prompt, "", _again(text)), said, tools)
        if shown is None:
            return plain
        return Context(sampled=shown, trained=prompt, kind=Kind.REFINED)


def by_rule(status: str, answer: str | None) -> str:
    """The critique of a response whose verdict is `status`, with the right answer unless None."""
    verdict = NOTHING if status == "unparsed" else WRONG
    return verdict if answer is None else f"{verdict} {RIGHT.format(answer)}"


def _again(critique: str) -> str:
    return f"{critique} {AGAIN}".strip()


def _shown(prompt: Conversation, response: str, said: str) -> Conversation:
    """The prompt, the response as the assistant's turn, and what the user says to it."""
    return (*prompt, Turn(role="assistant", content=response), Turn(role="user", content=said))


def _fit(turns: Callable[[str], Conversation], text: str, tools: Tools) -> Conversation | None:
    """`turns` of the longest beginning of `text` that fits; None where not even "" does."""

    def fits(length: int) -> bool:
        return len(tools.encode(turns(text[:length]))) <= tools.prompt_limit

    if not fits(0):
        return None
    low, high = 0, len(text)
    if fits(high):
        return turns(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return turns(text[:low])
