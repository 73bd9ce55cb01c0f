"""SKPO (2604.08690): the beginning of an answer is rewarded by what its skip connection leads to.

All rollouts of a prompt stop at one place. The beginning of typical surprisal is kept and put in
front of the question, and complete answers are drawn under that text. They are trained on as a
group, and their mean reward trains the beginning itself against a tracker of the prompt's success.

The paper leaves open, with our reading: of an even number the lower median is kept; the skip text
is the segment's tokens behind the token that begins every text, then the whole prompt
(`skip_layout`); an answer has what the segment left of `rollout.max_new_tokens` (`full_budget`);
the answers' mean length without the segment places the next cut; the tracker forgets at a constant
rate (`rho_low` below `rho_high` is SPO's way, with SPO's `rho_half` of .06, for the paper's "8
steps" make any rate constant); the clip's bounds are those of the paper's two sentences (`floor`
and `cap` downstream, `clip_low` and `clip_high` upstream); both halves weigh the same
(`upstream_share`), upstream a mean within and then over segments, downstream one over all tokens of
the step; a segment that already states an answer stays.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from xrpo_jax.algorithms.base import Algorithm, Budget
from xrpo_jax.arrays import Batch
from xrpo_jax.explore.collect import Explore
from xrpo_jax.explore.curriculum import Prioritized
from xrpo_jax.explore.reward import Correctness
from xrpo_jax.explore.skip import (
    CONDITIONINGS,
    LAYOUTS,
    SELECTIONS,
    SPLITS,
    SkipConnection,
    TwoPhase,
    answers_of,
    longest_segment,
    rewarding,
)
from xrpo_jax.explore.values import Discounted, LogpOf, OldLogp, discount
from xrpo_jax.learn.advantage import GroupZ, Tracker
from xrpo_jax.learn.clip import PPO, ByKind, Scored
from xrpo_jax.learn.groups import Groups
from xrpo_jax.learn.objective import Learn
from xrpo_jax.learn.weight import SequenceMean, TokenMean
from xrpo_jax.types import Kind, Memory, Progress, Rollout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tracked:
    """SPO's tracker of what came of segments, and of how long answers are.

    What it stores, where its rate depends on it, are segments. `answer_length` is the discounted
    mean of downstream lengths, without the segment's, at the same rate, from `first_length` on.
    """

    tracker: Discounted
    first_length: int = 1024
    foretells = True

    @property
    def reads_old_logp(self) -> bool:
        """Whether `observe` reads old log-probs."""
        return self.tracker.reads_old_logp

    def init(self, num_prompts: int, max_new_tokens: int) -> Memory:
        first = min(self.first_length, max_new_tokens)
        return self.tracker.init(num_prompts, longest_segment(max_new_tokens)) | {
            "answer_length": np.full(num_prompts, float(first)),
            "answer_count": np.zeros(num_prompts),
        }

    def observe(
        self, memory: Memory, progress: Progress, old_logp: OldLogp, logp_of: LogpOf
    ) -> Memory:
        """Of each prompt `(R_I + 1) / 2`, in scores from 0 to 1 whatever other rewards there are.

        A prompt of which nothing was graded keeps what it had.
        """
        observed, rows, lengths = {}, {}, {}
        for slot, prompt in enumerate(progress.prompts):
            graded = rewarding(progress.rollouts[slot])
            if graded:
                observed[prompt] = float(np.mean([row.verdict.score for row in graded]))
                rows[prompt] = _upstream(progress.drafts[slot], old_logp)
                answers = answers_of(progress.rollouts[slot])
                lengths[prompt] = float(np.mean([len(row.tokens) for row in answers]))
        memory = self.tracker.update(memory, observed, rows, old_logp, logp_of)
        prompts = np.array(sorted(observed), np.int64)
        memory["answer_length"][prompts], memory["answer_count"][prompts] = discount(
            memory["answer_length"][prompts],
            memory["answer_count"][prompts],
            np.array([lengths[int(prompt)] for prompt in prompts]),
            memory["rho"][prompts],
        )
        return memory

    def read(self, memory: Memory, num_prompts: int) -> np.ndarray:
        return self.tracker.read(memory, num_prompts)

    def report(self, memory: Memory) -> dict[str, float]:
        visited = memory["answer_count"] > 0
        lengths = memory["answer_length"][visited]
        metrics = self.tracker.report(memory)
        return metrics | ({"answer_length": float(lengths.mean())} if lengths.size else {})


def _upstream(drafts: tuple[Rollout, ...], old_logp: OldLogp) -> Rollout:
    """The segment that was trained on; where there was none any draft, which is not stored."""
    for draft in drafts:
        logp = old_logp.get((draft.slot, draft.index))
        if logp is not None:
            return draft.cut(len(logp))
    return drafts[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Apart:
    """Segments against the prompt's tracker, whitened over those of the step; answers in groups."""

    upstream: Tracker = Tracker(right=1.0, wrong=-1.0, ddof=0)
    downstream: GroupZ = GroupZ()

    def __call__(self, batch: Batch, groups: Groups) -> jax.Array:
        segments = batch.kind == Kind.UPSTREAM
        return jnp.where(
            segments,
            self.upstream(batch, groups.only(segments)),
            self.downstream(batch, groups.only(~segments)),
        )

    def report(self, batch: Batch, groups: Groups) -> dict[str, jax.Array]:
        """Reward of a segment minus what the tracker foretold, before whitening."""
        gap = self.upstream.difference(batch)
        return {"tracker_gap": jnp.where(batch.kind == Kind.UPSTREAM, gap, jnp.nan)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """`upstream` of the loss is a mean over segments (Eq. 6), the rest one over tokens (Eq. 5).

    Without trained tokens of one kind its share is missing, and the other's stays as it is.
    """

    upstream: float = 0.5

    def __call__(self, batch: Batch, groups: Groups) -> jax.Array:
        segments = (batch.kind == Kind.UPSTREAM)[:, None]
        above = batch.replace(mask=jnp.where(segments, batch.mask, 0.0))
        below = batch.replace(mask=jnp.where(segments, 0.0, batch.mask))
        return self.upstream * SequenceMean()(above, groups) + (1.0 - self.upstream) * TokenMean()(
            below, groups
        )


def make(
    budget: Budget,
    conditioning: str = "skip",
    skip_layout: str = "tokens",
    split: str = "uniform",
    selection: str = "median",
    monte_carlo: bool = True,
    full_budget: bool = False,
    first_length: int = 1024,
    rho_low: float = 0.96,
    rho_high: float = 0.96,
    rho_half: float = 0.06,
    upstream_share: float = 0.5,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    floor: float = 0.8,
    cap: float = 1.28,
) -> Algorithm:
    """`conditioning`, `monte_carlo`, `split` and `selection` are the ablations of Table 2.

    They are w/o Skip (continual), w/o MC Estimation (False: one rollout that goes on with the
    segment rewards it), Split@Fixed (fixed) and Selection:Extreme (extreme). `full_budget` lets an
    answer have all new tokens beside the segment's. `first_length` (at most
    `rollout.max_new_tokens`) is the expected length of answers before there are any.
    """
    for name, value, allowed in (
        ("conditioning", conditioning, CONDITIONINGS),
        ("skip_layout", skip_layout, LAYOUTS),
        ("split", split, SPLITS),
        ("selection", selection, SELECTIONS),
    ):
        if value not in allowed:
            raise ValueError(f"algorithm.{name}={value!r}; allowed: {', '.join(allowed)}")
    if budget.max_new_tokens < 2:
        raise ValueError(
            f"rollout.max_new_tokens={budget.max_new_tokens}; allowed: at least 2, a segment has up"
            " to half of them"
        )
    if skip_layout != "tokens" and conditioning != "skip":
        raise ValueError(
            f"algorithm.skip_layout={skip_layout!r}; allowed: tokens with "
            f"algorithm.conditioning={conditioning!r}, which shows no segment beside the prompt"
        )
    if conditioning == "continual" and not monte_carlo:
        raise ValueError(
            "algorithm.monte_carlo=False; allowed: True with algorithm.conditioning='continual', "
            "whose answers are completions of the segment already"
        )
    if conditioning == "continual" and full_budget:
        raise ValueError(
            "algorithm.full_budget=True; allowed: False with algorithm.conditioning='continual', "
            "whose answers share the cache with the segment"
        )
    if first_length < 1:
        raise ValueError(f"algorithm.first_length={first_length}; allowed: at least 1")
    if upstream_share > 1:
        raise ValueError(f"algorithm.upstream_share={upstream_share}; allowed: 0 to 1")
    if floor > cap or not cap:
        raise ValueError(
            f"algorithm.floor={floor}, algorithm.cap={cap}; allowed: in this order, the cap above 0"
        )
    return Algorithm(
        explore=Explore(
            planner=TwoPhase(
                group=budget.group,
                split=split,
                selection=selection,
                monte_carlo=monte_carlo,
                continual=conditioning == "continual",
                full_budget=full_budget,
            ),
            values=Tracked(
                tracker=Discounted(low=rho_low, high=rho_high, half=rho_half),
                first_length=first_length,
            ),
            curriculum=Prioritized(floor=0.05),
            seeder=SkipConnection(
                conditioning=conditioning, layout=skip_layout, full_budget=full_budget
            ),
            rewards=(Correctness(right=1.0, wrong=-1.0),),
        ),
        learn=Learn(
            advantage=Apart(),
            clip=ByKind(
                kind=Kind.UPSTREAM,
                yes=PPO(low=clip_low, high=clip_high),
                no=Scored(floor=floor, cap=cap),
            ),
            weight=Share(upstream=upstream_share),
            whole_groups=True,
        ),
    )
