"""Critique-GRPO (2506.03106): failed answers are criticised, answered again, and learned from.

Initial rollouts and the refinements that are kept share one mean baseline. Refinements were drawn
under a prompt that the policy will not see: under the plain question they are learned by
`p / (p + gamma)`, which moves unlikely tokens most, without a clip. As in Dr.GRPO there is no
standard deviation, no division by the answer's length, and no KL.

The paper leaves open, with our reading: how many refinements a prompt gets (`refinements`: one for
each failed answer), the clip of the initial rollouts (`clip_low`, `clip_high`: .2), the words of
the critiques (explore/critique.py), and how the model's own critiques are asked for
(`critique="self"`: it is not told that the answer is wrong). Refinements that are not kept cost
decoded tokens all the same: a step's `decoded_tokens` is up to twice that of its rollouts.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from xrpo_jax.algorithms.base import Algorithm, Budget
from xrpo_jax.arrays import Batch, TokenStats
from xrpo_jax.explore.collect import Explore
from xrpo_jax.explore.critique import CRITIQUES, GATES, Critique, Refine
from xrpo_jax.learn.advantage import GroupMean
from xrpo_jax.learn.clip import PPO, ByKind, Surrogate
from xrpo_jax.learn.groups import Groups
from xrpo_jax.learn.objective import Learn
from xrpo_jax.types import Kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shaped:
    """`p / (p + gamma) A`, p the policy's probability of the token; nothing is clipped.

    The gradient's factor `gamma p / (p + gamma)²` is largest where p is gamma.
    """

    gamma: float = 0.1

    def __call__(
        self, log_ratio: jax.Array, advantage: jax.Array, stats: TokenStats, batch: Batch
    ) -> Surrogate:
        logp = jnp.where(batch.mask > 0, stats.logp, 0.0)
        share = jax.nn.sigmoid(logp - math.log(self.gamma))  # p / (p + gamma), whatever p
        return share * advantage, jnp.zeros_like(advantage)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptSum:
    """Sum over all tokens of a prompt's rows, over the constant `limit`; prompts weigh the same.

    The weights sum to the tokens of a prompt over the limit, by the paper's intent.
    """

    limit: int
    reads_old_logp = True  # for the report

    def __call__(self, batch: Batch, groups: Groups) -> jax.Array:
        present = (jnp.sum(batch.mask, axis=1) > 0).astype(jnp.float32)
        size = jnp.maximum(groups.total(present), 1.0)
        prompts = jnp.maximum(groups.everything(present / size), 1.0)
        return batch.mask / (self.limit * prompts)

    def report(self, batch: Batch, groups: Groups) -> dict[str, jax.Array]:
        """How likely the tokens of a refinement are under the plain question, before the step."""
        length = jnp.sum(batch.mask, axis=1)
        likely = jnp.sum(jnp.where(batch.mask > 0, jnp.exp(batch.old_logp), 0.0), axis=1)
        refined = (batch.kind == Kind.REFINED) & (length > 0)
        mean = likely / jnp.maximum(length, 1.0)
        return {"refined_probability": jnp.where(refined, mean, jnp.nan)}


def make(
    budget: Budget,
    gate: str = "all_fail",
    critique: str = "verdict",
    refinements: int = 0,
    kept: int = 1,
    gamma: float = 0.1,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Algorithm:
    """`kept` of `rollout.group` rollouts are refinements, where the gate asks for any.

    `gate` always refines every prompt with a failed rollout. `critique` verdict_and_answer needs a
    task that knows its answers. `refinements` a prompt: 0 is one for each failed rollout.
    """
    for name, value, allowed in (("gate", gate, GATES), ("critique", critique, CRITIQUES)):
        if value not in allowed:
            raise ValueError(f"algorithm.{name}={value!r}; allowed: {', '.join(allowed)}")
    if gamma <= 0:
        raise ValueError(f"algorithm.gamma={gamma}; allowed: above 0")
    return Algorithm(
        explore=Explore(
            planner=Refine(
                group=budget.group,
                kept=kept,
                number=refinements,
                gate=gate,
                critiques=critique == "self",
            ),
            seeder=Critique(critique=critique),
        ),
        learn=Learn(
            advantage=GroupMean(),
            clip=ByKind(
                kind=Kind.REFINED,
                yes=Shaped(gamma=gamma),
                no=PPO(low=clip_low, high=clip_high),
            ),
            weight=PromptSum(limit=budget.max_new_tokens),
        ),
    )
