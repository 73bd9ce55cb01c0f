"""SPO (2509.13232): one rollout a prompt, against a tracker of the prompt's success.

A tracker replaces the group: it remembers what share of a prompt's answers was right and forgets
the faster the more the policy has moved. Advantages are whitened over the batch, and prompts that
are neither solved nor hopeless are drawn more often.

A step draws `rollout.prompts` x `rollout.group` different prompts, so that its rollouts are as many
as those of other algorithms. Prompts are prefilled and first estimated `rollout.prompts` at a time:
128 x 1 is the same training as 16 x 8 and fills the sampler's slots. `train.share` above 1 only
leaves rows empty, for no prompt has two.

The paper leaves open, with our reading: the tracker without offline samples (`offline` 0: it begins
at 1/2 and the first reward overwrites it), and its effective count, a + b (explore/values.py).
Success is what the verdict says, whatever the reward terms; with the usual ones a reward is 0 or 1.
"""

from __future__ import annotations

import dataclasses

from xrpo_jax.algorithms.base import Algorithm, Budget
from xrpo_jax.explore.collect import Explore
from xrpo_jax.explore.curriculum import Prioritized
from xrpo_jax.explore.values import Discounted
from xrpo_jax.learn.advantage import Tracker
from xrpo_jax.learn.clip import PPO
from xrpo_jax.learn.objective import Learn
from xrpo_jax.learn.weight import TokenMean
from xrpo_jax.types import Progress, Request, Rollout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Single:
    """One rollout for each of `group` times as many prompts."""

    group: int

    def check(self, batch: int) -> None:
        if batch * self.group < 2:
            raise ValueError(
                f"rollout.prompts x rollout.group = {batch * self.group}; allowed: at least 2, a "
                "batch of one row has no advantage"
            )

    def slots(self, batch: int) -> int:
        return batch * self.group

    def __call__(self, progress: Progress, round: int) -> list[Request]:
        if round > 0:
            return []
        return [Request(slot=slot, n=1) for slot in range(len(progress.prompts))]

    def rows(self, batch: int) -> int:
        return batch * self.group

    def select(self, progress: Progress) -> list[tuple[Rollout, ...]]:
        return list(progress.rollouts)


def make(
    budget: Budget,
    offline: int = 8,
    rho_low: float = 0.875,
    rho_high: float = 0.96,
    rho_half: float = 0.06,
    draw_floor: float = 0.05,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> Algorithm:
    """`offline` samples of every prompt begin the tracker; they count in decoded_tokens_total.

    `rho_low` to `rho_high` is what the tracker keeps of its counts, halved from 1 for each
    `rho_half` nats a token that the policy moved. `draw_floor` is what the weight of every prompt
    has beside `√(v (1 - v))`.
    """
    return Algorithm(
        explore=Explore(
            planner=Single(group=budget.group),
            values=Discounted(low=rho_low, high=rho_high, half=rho_half, offline=offline),
            curriculum=Prioritized(floor=draw_floor),
        ),
        learn=Learn(
            advantage=Tracker(),
            clip=PPO(low=clip_low, high=clip_high),
            weight=TokenMean(),
        ),
    )
