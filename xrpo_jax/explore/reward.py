"""Reward terms `Graded -> float`; a rollout's reward is their sum, each times its weight.

Every term is logged by its name. Accuracy, the planner, seeding and XRPO's full-reward gate use the
verdict alone, whatever the other terms say.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from xrpo_jax.types import Verdict
from xrpo_jax.verify.extract import after_thinking, boxed, tagged, well_formed

FAILED = ("timed_out", "crashed")  # of the verifier: they say nothing about the answer
STYLES = {  # what the format term asks of a completion
    "boxed": lambda text: bool(boxed(after_thinking(text) or "")),
    "answer": lambda text: bool(tagged(after_thinking(text) or "")),
    "think_answer": well_formed,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardSettings:
    """Weights of the terms of the reward beside what the algorithm asks for; 0 leaves a term out.

    `correctness` is times the algorithm's own term. `format` is for completions of `format_style`.
    `length` is for DAPO's soft overlong punishment, whose last `length_cache` tokens before the
    limit cost (0 = a fifth of the limit).
    """

    correctness: float = 1.0
    format: float = 0.0
    format_style: str = "boxed"
    length: float = 0.0
    length_cache: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Graded:
    """A completion as reward terms see it; `tokens` is its length, `limit` the longest."""

    verdict: Verdict
    text: str
    tokens: int
    limit: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Correctness:
    """`right` for a full score, `wrong` for none, in proportion between."""

    name: ClassVar[str] = "correctness"
    right: float = 1.0
    wrong: float = 0.0
    weight: float = 1.0

    def __call__(self, graded: Graded) -> float:
        return self.wrong + (self.right - self.wrong) * graded.verdict.score


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overlong:
    """DAPO's soft overlong punishment (2503.14476, eq. 13): 0 up to `limit - cache` tokens.

    From there it falls linearly to -1 at `limit`; beyond it stays -1. Lengths are in tokens.
    """

    name: ClassVar[str] = "length"
    cache: int
    weight: float = 1.0

    def __call__(self, graded: Graded) -> float:
        free = graded.limit - self.cache
        if graded.tokens <= free:
            return 0.0
        return max((free - graded.tokens) / self.cache, -1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    r"""1 for a completion of the style, else 0.

    boxed: the last `\boxed{}` after the thinking is complete and not empty · answer: the same of
    `<answer>` · think_answer: one `<think>...</think>`, then one `<answer>...</answer>`, no more.
    """

    name: ClassVar[str] = "format"
    style: str
    weight: float = 1.0

    def __call__(self, graded: Graded) -> float:
        return float(STYLES[self.style](graded.text))


def weighted(terms: tuple, settings: RewardSettings, max_new_tokens: int) -> tuple:
    """An algorithm's terms with the weights of `settings`, and the terms that these add.

    ValueError names the setting that the terms do not go with.
    """
    if settings.format_style not in STYLES:
        raise ValueError(
            f"reward.format_style={settings.format_style!r}; allowed: {', '.join(STYLES)}"
        )
    if not 0 <= settings.length_cache <= max_new_tokens:
        raise ValueError(
            f"reward.length_cache={settings.length_cache}; allowed: 0 (a fifth) to "
            f"rollout.max_new_tokens={max_new_tokens}"
        )
    names = [term.name for term in terms]
    if settings.length and Overlong.name in names:
        raise ValueError(
            f"reward.length={settings.length}; allowed: 0 with this algorithm, which has its own "
            "overlong punishment"
        )
    if not any((settings.correctness, settings.format, settings.length)):
        raise ValueError("reward.correctness=0, .format=0, .length=0; allowed: not all of them 0")
    found = [
        dataclasses.replace(term, weight=term.weight * settings.correctness)
        if term.name == Correctness.name
        else term
        for term in terms
    ]
    if settings.format:
        found.append(Format(style=settings.format_style, weight=settings.format))
    if settings.length:
        cache = settings.length_cache or max(max_new_tokens // 5, 1)
        found.append(Overlong(cache=cache, weight=settings.length))
    return tuple(found)


def reward_of(terms: tuple, graded: Graded) -> tuple[float, dict[str, float]]:
    """The weighted sum of the terms, and each term without its weight by name.

    NaN and no terms where the verifier failed: nobody learns from such a row.
    """
    if graded.verdict.status in FAILED:
        return float("nan"), {}
    values = {term.name: term(graded) for term in terms}
    return float(sum(term.weight * values[term.name] for term in terms)), values
