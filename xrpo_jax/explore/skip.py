"""The host half of SKPO (2604.08690): stop early, keep one beginning, answer behind it.

A draft is the upstream beginning of an answer, a segment what is kept of it, downstream rollouts
are answers drawn under what the seeder makes of the segment. What is open in the paper is listed in
algorithms/skpo.py.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from xrpo_jax import rng
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

SELECTIONS = ("median", "extreme")
SPLITS = ("uniform", "fixed")
CONDITIONINGS = ("skip", "continual", "unconditional")
LAYOUTS = ("tokens", "text")
SHORTEST, LONGEST = 1 / 6, 1 / 2  # where a draft stops, as a share of the expected length


def longest_segment(max_new_tokens: int) -> int:
    """Tokens of a segment at most."""
    return max_new_tokens // 2


def surprisal(row: Rollout) -> float:
    """Mean over tokens of -log π as it was sampled."""
    return float(-np.mean(row.logp, dtype=np.float64))


def segment_of(draft: Rollout) -> Rollout | None:
    """A draft as it is, or half of one that ended by itself, which leaves the end out.

    None where nothing is left.
    """
    length = len(draft.tokens) // 2 if draft.stopped else len(draft.tokens)
    return draft.cut(length) if length else None


def lower_median(values: list[float]) -> int:
    """Place of the value of rank n / 2, rounded up: of 8 the fourth. Ties go to the first."""
    return int(np.argsort(values, kind="stable")[(len(values) - 1) // 2])


def answers_of(rows: tuple[Rollout, ...]) -> tuple[Rollout, ...]:
    """The downstream rollouts."""
    return tuple(row for row in rows if row.kind == Kind.DOWNSTREAM)


def rewarding(rows: tuple[Rollout, ...]) -> list[Rollout]:
    """The graded rollouts of a prompt that reward its segment.

    Its own completion where one was asked for, else the downstream ones.
    """
    own = [row for row in rows if row.kind != Kind.DOWNSTREAM]
    return [row for row in own or rows if np.isfinite(row.reward)]


def upstream_reward(rows: tuple[Rollout, ...]) -> float:
    """R_I (Eq. 3): the mean reward of what came of the segment, NaN where nothing was graded."""
    graded = rewarding(rows)
    return float(np.mean([row.reward for row in graded])) if graded else float("nan")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoPhase:
    """Drafts of `group` rollouts a prompt stop at one place; answers go on from one of them.

    The place is drawn from L/6 to L/2, or is one of the two in turn (`split`); L is the prompt's
    expected length, which the values part has to know (skpo.Tracked). `selection` is of the lower
    median of mean surprisals, or of the smallest and the largest in turn. `continual` asks for
    answers that go on with the segment itself; without `monte_carlo` one more rollout does, and its
    reward alone is the segment's.
    """

    group: int
    split: str = "uniform"
    selection: str = "median"
    monte_carlo: bool = True
    continual: bool = False
    full_budget: bool = False

    @property
    def pauses(self) -> bool:
        """Whether rows go on with drafts: a skip connection computes them anew."""
        return self.continual or not self.monte_carlo

    def check(self, batch: int) -> None:
        if self.group < 2:
            raise ValueError(
                f"rollout.group={self.group}; allowed: at least 2, a group of one has no advantage"
            )

    def slots(self, batch: int) -> int:
        return batch

    def rows(self, batch: int) -> int:
        return batch * (self.group + 1)

    def place(self, progress: Progress, slot: int) -> int:
        """Where the drafts of a prompt stop: t_q, in tokens."""
        prompt = progress.prompts[slot]
        expected = float(progress.values["answer_length"][prompt])
        low, high = SHORTEST * expected, LONGEST * expected
        if self.split == "fixed":
            where = (low, high)[progress.step % 2]
        else:
            where = rng.host(progress.seed, progress.step, "plan", prompt).uniform(low, high)
        return int(np.clip(np.floor(where), 1, longest_segment(progress.max_new_tokens)))

    def segment(self, progress: Progress, slot: int) -> Rollout | None:
        """What is kept of the drafts of a prompt; None where all of them ended at once."""
        found = [segment_of(draft) for draft in progress.drafts[slot]]
        found = [segment for segment in found if segment is not None]
        if not found:
            return None
        values = [surprisal(segment) for segment in found]
        if self.selection == "extreme":
            return found[int((np.argmin, np.argmax)[progress.step % 2](values))]
        return found[lower_median(values)]

    def __call__(self, progress: Progress, round: int) -> list[Request]:
        slots = range(progress.batch)
        if round == 0:
            return [
                Request(slot=slot, n=self.group, limit=self.place(progress, slot), draft=Draft.ALL)
                for slot in slots
            ]
        if round > 1:
            return []
        segments = [self.segment(progress, slot) for slot in slots]
        requests = [
            Request(
                slot=slot,
                n=self.group,
                limit=0 if self.full_budget else _left(progress, segment),
                source=segment,
                resume=self.continual and segment is not None,
            )
            for slot, segment in enumerate(segments)
        ]
        if not self.monte_carlo:
            requests += [
                Request(slot=slot, n=1, limit=_left(progress, segment), source=segment, resume=True)
                for slot, segment in enumerate(segments)
                if segment is not None
            ]
        return requests

    def select(self, progress: Progress) -> list[tuple[Rollout, ...]]:
        """A group a prompt: the answers, and the segment with its reward as the last row."""
        groups = []
        for slot, rows in enumerate(progress.rollouts):
            segment, upstream = self.segment(progress, slot), ()
            if segment is not None:
                # It counts as stopped: it is whole, whatever is done about truncated answers.
                reward = upstream_reward(rows)
                upstream = (dataclasses.replace(segment, reward=reward, stopped=True),)
            groups.append((*answers_of(rows), *upstream))
        return groups

    def report(self, progress: Progress) -> dict[str, object]:
        """How much is kept, what came of it, and how well the tracker foretold that."""
        drafts = [draft for slot in progress.drafts for draft in slot]
        segments = [self.segment(progress, slot) for slot in range(len(progress.rollouts))]
        kept = [slot for slot, segment in enumerate(segments) if segment is not None]
        expected = progress.values["answer_length"][list(progress.prompts)]
        reward = np.array([upstream_reward(progress.rollouts[slot]) for slot in kept])
        foretold = np.array([2.0 * progress.value[slot] - 1.0 for slot in kept])
        graded = np.isfinite(reward)
        spreads, equal = [], []
        for slot, rows in enumerate(progress.rollouts):
            found = [segment_of(draft) for draft in progress.drafts[slot]]
            values = [surprisal(segment) for segment in found if segment is not None]
            spreads += [max(values) - min(values)] if values else []
            rewards = {row.reward for row in answers_of(rows) if np.isfinite(row.reward)}
            equal.append(len(rewards) <= 1)
        tokens = [len(segments[slot].tokens) for slot in kept]
        means = {
            "segment_share": np.array(tokens) / expected[kept],
            "upstream_reward": reward[graded],
            "value_gap": np.abs(reward - foretold)[graded],
            "surprisal_spread": np.array(spreads),
            "ended_early": np.array([draft.stopped for draft in drafts]),
            "degenerate_downstream": np.array(equal),
        }
        metrics = {name: float(values.mean()) for name, values in means.items() if values.size}
        if graded.any():
            metrics["upstream_reward_std"] = float(reward[graded].std())
            counts, _ = np.histogram(reward[graded], bins=9, range=(-1.0, 1.0))
            metrics["upstream_reward_histogram"] = counts.tolist()
        decoded = sum(len(draft.tokens) for draft in drafts)
        return metrics | {"kept_share": sum(tokens) / max(decoded, 1)}


def _left(progress: Progress, segment: Rollout | None) -> int:
    """New tokens that a segment leaves."""
    return progress.max_new_tokens - (0 if segment is None else len(segment.tokens))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SkipConnection:
    """A segment in front of its question: tokens before the prompt, or text in the user's turn.

    `conditioning` is skip, continual (the segment behind the prompt, as where it came from) or
    unconditional (no segment). The learner sees what the sampler saw.
    """

    conditioning: str = "skip"
    layout: str = "tokens"
    full_budget: bool = False  # the planner's

    @property
    def shares_limit(self) -> bool:
        """Whether segment and answer together have no more than `rollout.max_new_tokens`."""
        return self.layout == "tokens" and not self.full_budget  # text may be other tokens

    @property
    def seeds(self) -> bool:
        return self.conditioning != "unconditional"

    @property
    def trains_seeded(self) -> bool:
        """Whether the learner sees prompts with a segment."""
        return self.seeds

    def room(self, prompt_length: int, max_new_tokens: int) -> int:
        """Tokens of the longest prompt with a segment."""
        return prompt_length + (longest_segment(max_new_tokens) if self.seeds else 0)

    def __call__(
        self, request: Request, progress: Progress, memory: Memory, tools: Tools
    ) -> Context:
        prompt = tools.task.prompt(progress.prompts[request.slot])
        if request.draft is Draft.ALL:
            return Context(sampled=prompt, trained=prompt, kind=Kind.UPSTREAM)
        if request.resume and self.conditioning != "continual":  # the segment's own completion
            return Context(sampled=prompt, trained=prompt)
        around = {}
        if request.source is not None:
            tokens = request.source.tokens
            if self.conditioning == "continual":
                around = {"after": tuple(tokens.tolist())}
            elif self.conditioning == "skip" and self.layout == "tokens":
                around = {"before": tuple(tokens.tolist())}
            elif self.conditioning == "skip":
                prompt = _quoted(tokens, prompt, tools)
        return Context(sampled=prompt, trained=prompt, kind=Kind.DOWNSTREAM, **around)


def _quoted(tokens: np.ndarray, prompt: Conversation, tools: Tools) -> Conversation:
    """The prompt with a segment's text in front of the question, cut from its end to fit."""
    *turns, asked = prompt
    for length in range(len(tokens), 0, -1):
        text = f"{tools.decode(tokens[:length])}\n{asked.content}"
        longer = (*turns, Turn(role=asked.role, content=text))
        if len(tools.encode(longer)) <= tools.prompt_limit:
            return longer
    return prompt
