"""TreePO's sampling (2508.17445): the rollouts of a prompt are the leaves of a tree of segments.

A path is a beginning: it pauses as a draft at the end of each segment, and several rows go on from
there. What is open in the paper is listed in algorithms/treepo.py.
"""

from __future__ import annotations

import collections
import dataclasses

import numpy as np

from xrpo_jax import rng
from xrpo_jax.explore.collect import lineage
from xrpo_jax.types import Draft, Progress, Request, Rollout


def waiting(rows: list[Rollout]) -> list[Rollout]:
    """The paths of a slot that nothing has gone on from yet."""
    sources = {row.source.index for row in rows if row.resumed}
    return [row for row in rows if row.draft and row.index not in sources]


def boundary(leaves: list[Rollout], draw: np.random.Generator) -> Rollout | None:
    """The end of a segment within a finished rollout, both drawn uniformly; None where none is."""
    long = [leaf for leaf in leaves if leaf.resumed]
    if not long:
        return None
    paths = lineage(long[draw.integers(len(long))])[:-1]
    return paths[draw.integers(len(paths))]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tree:
    """Exactly `group` leaves a prompt, branched from one another at ends of segments.

    `width_step` rows begin at the prompt. After each segment those that neither stopped nor reached
    `max_new_tokens` share a budget of `width_step` rows each, as far as leaves are missing. Where
    none is left and leaves are missing, up to `width_step` more rows leave a finished one at the
    end of a random segment, or begin anew where every rollout ended within its first.

    No more paths wait than leaves are missing, so each goes on, and whatever begins or leaves ends
    in as many leaves at least within `depth` rounds: there are at most `depth` times
    `group / width_step`, rounded up, of them. The caches of all paths stay on the device until the
    step ends: for each `rollout.slots` rows (or fewer) that are drawn at a time one of so many rows
    of `prompt_length` + `max_new_tokens` tokens, which is much for long answers and deep trees.
    """

    group: int
    width_step: int
    segment_length: int  # in tokens
    max_new_tokens: int
    pauses = True

    @property
    def depth(self) -> int:
        """Segments of the longest rollout."""
        return -(-self.max_new_tokens // self.segment_length)

    def check(self, batch: int) -> None:
        if self.group < 2:
            raise ValueError(
                f"rollout.group={self.group}; allowed: at least 2, a group of one has no advantage"
            )
        if not 1 <= self.width_step <= self.group:
            raise ValueError(
                f"algorithm.width_step={self.width_step}; allowed: 1 to rollout.group={self.group}"
            )

    def slots(self, batch: int) -> int:
        return batch

    def rows(self, batch: int) -> int:
        return batch * self.group

    def select(self, progress: Progress) -> list[tuple[Rollout, ...]]:
        return list(progress.rollouts)

    def __call__(self, progress: Progress, round: int) -> list[Request]:
        requests = []
        for slot in range(progress.batch):
            draw = rng.host(progress.seed, progress.step, "plan", round, slot)
            requests += self._next(slot, _drawn(progress, slot), draw)
        return requests

    def _next(self, slot: int, rows: list[Rollout], draw: np.random.Generator) -> list[Request]:
        """What goes on with the rows of a slot; the numbers of rows do not depend on `draw`."""
        leaves, paths = [row for row in rows if not row.draft], waiting(rows)
        missing = self.group - len(leaves)
        if missing < 1:
            return []
        if not paths:  # nothing has begun, or all has ended
            begin, shares = [boundary(leaves, draw)], [min(missing, self.width_step)]
        else:
            begin, budget = paths, min(missing, self.width_step * len(paths))
            shares = [budget // len(paths)] * len(paths)
            shares[-1] += budget % len(paths)
        return [
            Request(
                slot=slot,
                n=n,
                limit=self.segment_length,
                source=path,
                resume=path is not None,
                draft=Draft.UNENDED,
            )
            for path, n in zip(begin, shares, strict=True)
        ]

    def restarts(self, progress: Progress, slot: int) -> int:
        """How often no path was left while leaves were missing: the step is planned once more."""
        rows, seen, begins = _drawn(progress, slot), 0, 0
        while seen < len(rows):
            begins += not waiting(rows[:seen])
            requests = self._next(slot, rows[:seen], np.random.default_rng(0))
            seen += sum(request.n for request in requests)
        return begins - 1

    def report(self, progress: Progress) -> dict[str, float]:
        """How much of the leaves is shared, and what the trees look like.

        `reused_tokens` is 1 - decoded tokens / tokens of the leaves; `tree_depth` segments of a
        leaf; `tree_branches` rows that go on from a path; `tree_restarts` by prompt; and
        `shared_groups` the share of leaves that have more than the prompt in common with another.
        """
        leaves = [leaf for rows in progress.rollouts for leaf in rows]
        paths = [lineage(leaf)[:-1] for leaf in leaves]
        below = collections.Counter((path.slot, path.index) for line in paths for path in line)
        drafts = [row for rows in progress.drafts for row in rows]
        branches = sum(row.resumed for row in (*leaves, *drafts))
        restarts = [self.restarts(progress, slot) for slot in range(progress.batch)]
        shared = [any(below[path.slot, path.index] > 1 for path in line) for line in paths]
        return {
            "reused_tokens": 1.0 - progress.decoded / sum(len(leaf.tokens) for leaf in leaves),
            "tree_depth": float(np.mean([len(line) + 1 for line in paths])),
            "tree_branches": branches / max(len(drafts), 1),
            "tree_restarts": float(np.mean(restarts)),
            "shared_groups": float(np.mean(shared)),
        }


def _drawn(progress: Progress, slot: int) -> list[Rollout]:
    """Leaves and paths of a slot in the order in which they were drawn."""
    rows = (*progress.rollouts[slot], *progress.drafts[slot])
    return sorted(rows, key=lambda row: row.index)
