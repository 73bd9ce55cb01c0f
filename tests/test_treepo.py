"""TreePO: golden numbers, trees through `collect` with a fake draw and the real one, its loss."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from fakes import END, Draw, Texts, decode, encode, rollout, tools_for
from hypothesis import given, settings
from hypothesis import strategies as st
from test_collect import Fragile, InOrder
from test_learn import RAGGED, TOY, learn_of, make_batch, run, score_of
from tiny import policy
from tiny.tasks import letters

from xrpo_jax import mesh as meshes
from xrpo_jax import rng
from xrpo_jax.algorithms import base
from xrpo_jax.algorithms.treepo import Ancestors, Whitened, by_size
from xrpo_jax.explore import tree
from xrpo_jax.explore.collect import Shape, collect, init_ledger, lineage, pack, remember
from xrpo_jax.explore.planner import Fixed
from xrpo_jax.learn.advantage import GroupMean
from xrpo_jax.log import Clock, Compiles
from xrpo_jax.policy import Policy, token_stats
from xrpo_jax.sampler import Sampler, make_draw
from xrpo_jax.sampling import Method
from xrpo_jax.types import Draft, Kind, Progress

LONG = "abcdefghijklmnop"
TASK = Texts(prompts=("aa:", "bb:", "cc:"), answers=("A", "B", "C"))


def treepo(group=8, new=8, **switches):
    """The algorithm's host half, on prompts in order."""
    made = base.make("treepo", base.Budget(group=group, max_new_tokens=new), **switches)
    return dataclasses.replace(made.explore, curriculum=InOrder())


def shape_of(explore, prompts=1, new=8):
    planner = explore.planner
    return Shape(
        prompts=prompts,
        rows=planner.rows(prompts),
        prompt_length=4,
        seeded_length=4,
        max_new_tokens=new,
        depth=getattr(planner, "depth", 1),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watched:
    """A planner that keeps the requests of every round."""

    of: tree.Tree
    asked: list

    def __getattr__(self, name):
        return getattr(self.of, name)

    def __call__(self, progress, round):
        assert round < 100
        requests = self.of(progress, round)
        self.asked.append(requests)
        return requests


def play(explore, says, *, prompts=1, new=8, seed=0, step=0, tools=None):
    """One step: batch, progress, requests by round."""
    tools = tools or tools_for(TASK)
    watched = dataclasses.replace(explore, planner=Watched(of=explore.planner, asked=[]))
    ledger, shape = init_ledger(watched, len(tools.task), new), shape_of(explore, prompts, new)
    draw = Draw(says=says, new=new)
    batch, progress = collect(watched, tools, draw, None, ledger, shape, seed, step, Clock())
    ledger = remember(watched, ledger, progress, batch, logp_of=None)
    assert ledger["decoded"]["tokens"] == progress.decoded
    return batch, progress, watched.planner.asked


def by_index(*texts, rest=LONG):
    """Row i says the i-th text, others `rest`."""
    return lambda text, prompt, index: texts[index] if index < len(texts) else rest


def sources(progress, slot=0):
    """The index of what each row goes on with, -1 where it began at the prompt."""
    rows = sorted((*progress.rollouts[slot], *progress.drafts[slot]), key=lambda row: row.index)
    return [row.source.index if row.resumed else -1 for row in rows]


def counts(asked):
    """Rows of each request, by round."""
    return [[request.n for request in requests] for requests in asked]


# --- the tree -----------------------------------------------------------------------------------


def test_a_tree_of_paths_that_never_stop():
    explore = treepo(group=8, new=8)
    assert explore.planner.segment_length == 2 and explore.planner.depth == 4
    batch, progress, asked = play(explore, by_index())
    assert counts(asked) == [[2], [2, 2], [2, 2, 2, 2], [1] * 8, []]
    for request in itertools.chain(*asked):
        assert request.limit == 2 and request.draft is Draft.UNENDED
        assert request.resume == (request.source is not None)
    assert [row.index for row in progress.rollouts[0]] == list(range(14, 22))
    assert sources(progress) == [-1, -1, 0, 0, 1, 1, *[i for i in range(2, 6) for _ in range(2)],
                                 *range(6, 14)]  # fmt: skip
    for leaf in progress.rollouts[0]:
        assert decode(leaf.tokens) == LONG[:8] and leaf.kind == Kind.PLAIN and not leaf.stopped
        assert [len(node.tokens) for node in lineage(leaf)] == [2, 4, 6, 8]
    assert batch.ancestors.T.tolist() == [
        [0] * 8,
        [0] * 4 + [1] * 4,
        [0, 0, 1, 1, 2, 2, 3, 3],
        list(range(8)),
    ]
    assert batch.group.tolist() == [0] * 8 and batch.valid.all()
    report = explore.planner.report(progress)
    assert report == {
        "reused_tokens": 1 - (4 + 8 + 16 + 16) / 64,
        "tree_depth": 4.0,
        "tree_branches": (2 + 2 + 2 * 2 + 8 + 4) / 14,
        "tree_restarts": 0.0,
        "shared_groups": 1.0,
    }


def test_the_budget_is_split_evenly_and_the_last_path_has_the_rest():
    explore = treepo(group=7, new=8)
    _, progress, asked = play(explore, by_index())
    assert counts(asked) == [[2], [2, 2], [1, 1, 1, 4], [1] * 7, []]
    # One of three paths is done by then: two are left with 6 rollouts, of which they get 4.
    explore = treepo(group=7, new=8, width_step=3)
    _, progress, asked = play(explore, by_index("", rest=LONG))
    assert counts(asked) == [[3], [3, 3], [1] * 6, [1] * 6, []]
    explore = treepo(group=5, new=8, width_step=3)
    _, progress, asked = play(explore, by_index("", rest=LONG))
    assert counts(asked) == [[3], [2, 2], [1] * 4, [1] * 4, []]


def test_where_all_stop_at_once_the_tree_begins_anew():
    for group, rounds in ((2, [[2]]), (5, [[2], [2], [1]]), (8, [[2]] * 4)):
        explore = treepo(group=group)
        batch, progress, asked = play(explore, lambda *_: "A")
        assert counts(asked) == [*rounds, []]
        assert all(request.source is None for request in itertools.chain(*asked))
        assert len(progress.rollouts[0]) == group and not progress.drafts[0]
        assert batch.ancestors[:, 1].tolist() == list(range(group))
        assert explore.planner.report(progress) == {
            "reused_tokens": 0.0,
            "tree_depth": 1.0,
            "tree_branches": 0.0,
            "tree_restarts": len(rounds) - 1,
            "shared_groups": 0.0,
        }


def test_a_finished_rollout_is_cut_at_a_boundary():
    """Row 1 goes on; what goes on from it ends at once, so that it is gone on from again."""
    explore = treepo(group=6)
    _, progress, asked = play(explore, by_index("", rest="abc"))
    assert counts(asked) == [[2], [2], [2], [1], []]
    assert sources(progress) == [-1, -1, 1, 1, 1, 1, 1]
    assert all(request.resume for requests in asked[1:] for request in requests)
    report = explore.planner.report(progress)
    assert report["tree_restarts"] == 2 and report["tree_branches"] == 5
    assert report["tree_depth"] == (1 + 5 * 2) / 6 and report["shared_groups"] == 5 / 6
    # "" is one token, "abc" and its end four, of which two are decoded once.
    assert report["reused_tokens"] == pytest.approx(1 - (1 + 2 + 5 * 2) / (1 + 5 * 4))


def test_the_cut_is_drawn_uniformly_of_the_rollouts_and_then_of_their_boundaries():
    def draft(index, text, source=None):
        made = rollout(False, index=index, text=text, stopped=False)
        made = dataclasses.replace(made, draft=True, verdict=None)
        return dataclasses.replace(made, source=source, resumed=source is not None)

    def leaf(index, source=None):
        made = rollout(False, index=index)
        return dataclasses.replace(made, source=source, resumed=source is not None)

    first = draft(0, "ab")
    second = draft(2, "abcd", first)
    third = draft(4, "abcdef", second)
    leaves = [leaf(1), leaf(3, first), leaf(5, third)]
    progress = Progress(
        prompts=(0,), rollouts=(tuple(leaves),), drafts=((first, second, third),), batch=1
    )
    planner, found = treepo(group=6).planner, []
    for seed in range(400):
        (request,) = planner(dataclasses.replace(progress, seed=seed, step=3), 4)
        assert request.n == 2 and request.resume
        found.append(request.source.index)
    # Leaf 3 has one boundary, leaf 5 has three, leaf 1 none.
    share = np.bincount(found, minlength=5) / 400
    assert share[[1, 3]].tolist() == [0, 0]
    np.testing.assert_allclose(share[[0, 2, 4]], [1 / 2 + 1 / 6, 1 / 6, 1 / 6], atol=0.07)
    for more in ({"step": 4}, {}):
        again = dataclasses.replace(progress, **({"step": 3} | more))
        chosen = [
            planner(dataclasses.replace(again, seed=seed), 4)[0].source.index for seed in range(400)
        ]
        assert (chosen == found) == (not more)
    rounds = [planner(dataclasses.replace(progress, step=3), r)[0].source.index for r in range(40)]
    assert len(set(rounds)) > 1
    full = dataclasses.replace(progress, rollouts=((*leaves, *[leaf(6 + i) for i in range(3)]),))
    assert not planner(full, 4)
    assert planner(dataclasses.replace(progress, rollouts=((leaves[0],),), drafts=((),)), 1)[0] == (
        dataclasses.replace(request, n=2, source=None, resume=False)
    )


@settings(max_examples=150, deadline=None)
@given(
    group=st.integers(2, 12),
    width_step=st.integers(1, 6),
    segment=st.integers(1, 7),
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=40),
    seed=st.integers(0, 99),
)
def test_any_lengths_give_exactly_the_leaves(group, width_step, segment, lengths, seed):
    width_step = min(width_step, group)
    explore = treepo(group=group, width_step=width_step, segment_length=segment)
    planner = explore.planner

    def says(text, prompt, index):
        return LONG[: lengths[(7 * prompt + index) % len(lengths)]]

    batch, progress, asked = play(explore, says, prompts=2, seed=seed)
    assert asked.pop() == [] and all(asked)
    assert len(asked) <= planner.depth * -(-group // width_step)
    assert batch.valid.all() and len(batch.valid) == 2 * group
    for slot in range(2):
        leaves, drafts = progress.rollouts[slot], progress.drafts[slot]
        assert len(leaves) == group and len(sources(progress, slot)) == len(leaves) + len(drafts)
        # Every path was gone on from, and holds whole segments; what goes on begins like it.
        assert {draft.index for draft in drafts} == set(sources(progress, slot)) - {-1}
        assert all(len(draft.tokens) % segment == 0 for draft in drafts)
        for row in (*leaves, *drafts):
            before = len(row.source.tokens) if row.resumed else 0
            assert 0 < len(row.tokens) - before <= segment
            assert not row.resumed or row.tokens[:before].tolist() == row.source.tokens.tolist()
        for leaf in leaves:
            assert leaf.stopped == (leaf.tokens[-1] == END) and leaf.verdict is not None
            assert leaf.stopped or len(leaf.tokens) == 8
            assert len(lineage(leaf)) <= planner.depth
        # Round by round the budget is what the paper says.
        rows, seen, begins = tree._drawn(progress, slot), 0, 0
        for requests in asked:
            n = [request.n for request in requests if request.slot == slot]
            missing = group - sum(not row.draft for row in rows[:seen])
            paths = len(tree.waiting(rows[:seen]))
            begins += not paths and missing > 0
            assert paths <= missing
            assert sum(n) == min(missing, width_step * max(paths, 1)) and all(n)
            assert len(n) == (paths or missing > 0)
            seen += sum(n)
        assert planner.restarts(progress, slot) == begins - 1
    # Rows share a number exactly where they share so many segments.
    lines = [[(leaf.slot, node.index) for node in lineage(leaf)] for leaf in sum(
        progress.rollouts, ())]  # fmt: skip
    for i, j in itertools.combinations(range(2 * group), 2):
        same = batch.ancestors[i] == batch.ancestors[j]
        assert same[0] == (lines[i][0][0] == lines[j][0][0])
        for depth in range(1, planner.depth):
            assert same[depth] == (depth <= min(len(lines[i]), len(lines[j]))
                                   and lines[i][depth - 1] == lines[j][depth - 1])  # fmt: skip
    report = planner.report(progress)
    shared = [(batch.ancestors[:, 1:] == row[1:]).sum(axis=0).max(initial=1) > 1
              for row in batch.ancestors]  # fmt: skip
    assert report["shared_groups"] == pytest.approx(np.mean(shared))
    assert 0 <= report["reused_tokens"] < 1


def test_a_step_is_a_function_of_seed_and_step():
    explore = treepo(group=8, new=8, width_step=2, segment_length=1)

    def says(text, prompt, index):
        return LONG[: (3 * index) % 6]

    def trees(**coordinates):
        _, progress, _ = play(explore, says, prompts=3, **coordinates)
        return [sources(progress, slot) for slot in range(3)]

    assert trees(seed=1, step=2) == trees(seed=1, step=2)
    others = [trees(seed=1, step=3), trees(seed=2, step=2)]
    assert all(trees(seed=1, step=2) != other for other in others)
    found = trees(seed=1, step=2)
    assert found[0] != found[1]  # says is the same for all prompts: each has a draw of its own


# --- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "new, segment, depth", [(24, 6, 4), (5, 2, 3), (6, 2, 3), (2, 1, 2), (7168, 1792, 4)]
)
def test_a_segment_is_a_quarter_of_the_tokens(new, segment, depth):
    planner = treepo(new=new).planner
    assert (planner.segment_length, planner.depth) == (segment, depth)


def test_the_papers_tree():
    planner = treepo(group=16, new=7168, segment_length=512).planner
    assert planner.depth == 14 and planner.rows(3) == 48 and planner.slots(3) == 3


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"depth_average": "mean"}, "algorithm.depth_average='mean'; allowed: plain, size"),
        ({"depth_average": "size", "subgroups": False}, "plain without algorithm.subgroups"),
        ({"depth_average": "size", "branching": False}, "plain without algorithm.branching"),
        ({"segment_length": 4, "branching": False}, "segment_length=4; allowed: 0 without"),
        ({"segment_length": 8}, "algorithm.segment_length=8.*below rollout.max_new_tokens=8"),
        ({"new": 1}, "algorithm.segment_length=0.*below rollout.max_new_tokens=1"),
    ],
)
def test_settings_that_make_no_sense(wrong, message):
    with pytest.raises(ValueError, match=message):
        treepo(**wrong)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"group": 1}, "rollout.group=1; allowed: at least 2"),
        ({"width_step": 0}, "algorithm.width_step=0; allowed: 1 to rollout.group=8"),
        ({"width_step": 9}, "algorithm.width_step=9; allowed: 1 to rollout.group=8"),
    ],
)
def test_a_tree_that_cannot_grow(wrong, message):
    with pytest.raises(ValueError, match=message):
        treepo(**wrong).planner.check(4)


def test_switches_choose_parts():
    advantage = learn_of("treepo").advantage
    assert advantage == Whitened(of=Ancestors())
    assert learn_of("treepo", depth_average="size").advantage.of == Ancestors(average=by_size)
    assert learn_of("treepo", whiten=False).advantage == Ancestors()
    assert learn_of("treepo", subgroups=False).advantage == Whitened(of=GroupMean())
    assert treepo(branching=False).planner == Fixed(group=8)
    one, other = learn_of("treepo", branching=False), learn_of("treepo", subgroups=False)
    assert one == other


# --- advantages ----------------------------------------------------------------------------------

LEAVES = {"a": "1-0/2-0", "b": "1-0/2-0", "c": "1-0/2-1", "d": "1-1/2-2", "e": "1-1/2-3"}
LEAVES |= {"f": "1-1/2-3"}
GOLDEN = {
    "plain": [0.555556, -0.444444, -0.416667, 0.416667, 0.444444, -0.555556],
    "size": [0.545455, -0.454545, -0.444444, 0.444444, 0.454545, -0.545455],
    "white": [1.117399, -0.893919, -0.838049, 0.838049, 0.893919, -1.117399],
}


def golden_progress():
    """The specification's six leaves as rollouts of two segments of one token, and one with END."""
    drafts = {}
    for place in LEAVES.values():
        parts, source = place.split("/"), None
        for depth in range(1, 3):
            name = "/".join(parts[:depth])
            made = rollout(False, index=len(drafts), text="x" * depth, stopped=False)
            made = dataclasses.replace(made, draft=True, verdict=None, reward=np.nan)
            made = dataclasses.replace(made, source=source, resumed=source is not None)
            source = drafts.setdefault(name, made)
    rows = []
    for i, (name, place) in enumerate(LEAVES.items()):
        made = rollout(name in "ade", index=10 + i, text="x")
        rows.append(dataclasses.replace(made, source=drafts[place], resumed=True))
    return Progress(
        prompts=(0,), rollouts=(tuple(rows),), drafts=(tuple(drafts.values()),), batch=1
    )


def golden_rows(**changes):
    progress = golden_progress()
    shape = Shape(prompts=1, rows=6, prompt_length=1, seeded_length=1, max_new_tokens=2, depth=4)
    batch = pack(progress, list(progress.rollouts), shape)
    assert batch.reward.tolist() == [1, 0, 0, 1, 1, 0] and (batch.mask == 1).all()
    rows = oracles.Rows(
        now=np.zeros((6, 2)),
        old=np.zeros((6, 2)),
        mask=batch.mask,
        reward=batch.reward.astype(np.float64),
        group=batch.group,
        correct=batch.reward > 0,
        ancestors=batch.ancestors,
    )
    return dataclasses.replace(rows, **changes)


def advantage_of(rows, order=None, **switches):
    """By the library, f[N] in the order of `rows`."""
    _, batch = make_batch(rows, order=order)
    found = np.asarray(score_of(learn_of("treepo", **switches), batch).advantage[:, 0])
    return found[: rows.number] if order is None else found[order]


@pytest.mark.parametrize(
    "name, switches",
    [
        ("plain", {"whiten": False}),
        ("size", {"whiten": False, "depth_average": "size"}),
        ("white", {}),
    ],
)
def test_golden_advantages(name, switches):
    rows = golden_rows()
    assert rows.ancestors.shape == (6, 4)
    np.testing.assert_allclose(advantage_of(rows, **switches), GOLDEN[name], atol=1e-6)
    np.testing.assert_allclose(oracles.treepo_advantage(rows, **switches), GOLDEN[name], atol=6e-7)


VARIANTS = [
    {"subgroups": subgroups, "whiten": whiten, "depth_average": average}
    for subgroups, whiten in itertools.product([True, False], repeat=2)
    for average in (["plain", "size"] if subgroups else ["plain"])
]


@pytest.mark.parametrize("switches", VARIANTS, ids=str)
def test_rows_that_could_not_be_graded_count_nowhere(switches):
    """Not as a reward, a group's member, or a token; a group of two is then one of one."""
    reward = RAGGED.reward.copy()
    reward[[0, 4, 9]] = [np.nan, np.inf, np.nan]
    rows = dataclasses.replace(RAGGED, reward=reward)
    found = advantage_of(rows, **switches)
    wanted = oracles.treepo_advantage(rows, **switches)
    np.testing.assert_allclose(found, wanted, atol=2e-6)
    assert not np.any(found[[0, 4, 9]]) and np.abs(found).max() > 0.1
    kept = np.isfinite(reward)
    alone = dataclasses.replace(
        rows, **{name: getattr(rows, name)[kept] for name in (
            "now", "old", "mask", "reward", "group", "correct", "reference", "entropy",
            "old_entropy", "reference_entropy", "baseline", "ancestors", "kind")}
    )  # fmt: skip
    np.testing.assert_allclose(found[kept], advantage_of(alone, **switches), atol=2e-6)


def test_where_no_row_could_be_graded():
    rows = dataclasses.replace(RAGGED, reward=np.full(RAGGED.number, np.nan))
    for switches in VARIANTS:
        assert not np.any(advantage_of(rows, **switches))


@pytest.mark.parametrize("value", [0.1, 1 / 3, -0.9, 12345.678])
def test_equal_rewards_give_exactly_zero(value):
    rows = dataclasses.replace(RAGGED, reward=np.full(RAGGED.number, value))
    for switches in VARIANTS:
        assert not np.any(advantage_of(rows, **switches))


def test_whitened_over_tokens():
    """Mean 0 and variance 1 (ddof 1) over tokens, whatever their number in a row."""
    for switches in ({}, {"subgroups": False}, {"depth_average": "size"}):
        found = advantage_of(RAGGED, **switches)
        tokens = np.repeat(found.astype(np.float64), RAGGED.mask.sum(axis=1).astype(int))
        assert tokens.mean() == pytest.approx(0, abs=1e-6)
        assert tokens.std(ddof=1) == pytest.approx(1, abs=1e-6)
        assert abs(found.mean()) > 1e-3


def test_a_single_token_has_no_spread():
    mask = np.zeros_like(RAGGED.mask)
    mask[0, 5] = 1
    assert not np.any(advantage_of(dataclasses.replace(RAGGED, mask=mask)))


def test_ancestors_matter():
    moved = RAGGED.ancestors.copy()
    moved[[0, 3], 1:] = moved[[3, 0], 1:]  # a success and a failure of the first prompt swap
    rows = dataclasses.replace(RAGGED, reward=np.where(np.arange(13) == 0, 0.0, RAGGED.reward))
    other = dataclasses.replace(rows, ancestors=moved)
    assert np.abs(advantage_of(rows) - advantage_of(other)).max() > 0.05
    same = [advantage_of(each, subgroups=False) for each in (rows, other)]
    np.testing.assert_array_equal(*same)


def test_numbers_and_order_of_rows_do_not_matter():
    renumbered = RAGGED.ancestors.copy()
    for column in range(1, renumbered.shape[1]):
        renumbered[:, column] = (5 * renumbered[:, column] + 3) % 13
    order = np.random.default_rng(0).permutation(16)[:13]
    rows = dataclasses.replace(RAGGED, ancestors=renumbered)
    np.testing.assert_allclose(advantage_of(rows, order), advantage_of(RAGGED), atol=1e-6)


def test_without_its_mechanisms_it_is_dapos_loss_on_other_advantages():
    """The toy's advantages are ±.5 in place of ±.866, in which the loss is linear."""
    toy = dataclasses.replace(TOY, ancestors=np.zeros((4, 1), int))
    plain = run(learn_of("treepo", subgroups=False, whiten=False), *make_batch(toy))[0]
    assert plain == pytest.approx(0.16699734 * 0.5 / 0.866023904, abs=5e-8)


# --- with the real sampler -----------------------------------------------------------------------

NEW, GROUP = 12, 8
REAL_TOOLS = tools_for(letters.make(), 8, policy.encode_prompt, policy.decode)


@pytest.fixture(scope="module")
def params():
    return jax.device_put(policy.weights(), meshes.everywhere(meshes.make(1)))


@pytest.fixture(scope="module")
def draws():
    """Draws by their number of slots."""

    def make(slots):
        sampler = Sampler(
            model=policy.MODEL,
            method=Method(),
            dtype="float32",
            prompts=4,
            slots=slots,
            lengths=(8,),
            max_new_tokens=NEW,
            stop_ids=policy.MODEL.eos_token_ids,
        )
        return make_draw(sampler, meshes.make(1))

    return {slots: make(slots) for slots in (12, 5)}


def real_step(draw, params, *, seed=1, step=0, **switches):
    explore = base.make(
        "treepo", base.Budget(group=GROUP, max_new_tokens=NEW), segment_length=3, **switches
    ).explore
    shape = dataclasses.replace(shape_of(explore, 4, NEW), prompt_length=8, seeded_length=8)
    ledger = init_ledger(explore, len(REAL_TOOLS.task), NEW)
    return collect(explore, REAL_TOOLS, draw, params, ledger, shape, seed, step, Clock())


def test_every_leaf_has_the_log_probs_of_that_leaf_alone(draws, params):
    """All tokens before a branch were decoded once; the trainer's forward pass reads whole rows."""
    batch, progress = real_step(draws[12], params)
    leaves = [leaf for rows in progress.rollouts for leaf in rows]
    assert len(leaves) == 4 * GROUP
    # The round is that in which the tree, or what began anew, was begun: accuracy counts round 0.
    assert all(leaf.round == lineage(leaf)[0].round for leaf in leaves)
    assert any(leaf.resumed and leaf.round == 0 for leaf in leaves)
    depths = [len(lineage(leaf)) for leaf in leaves]
    assert {1, 2, 4} <= set(depths)  # some have stopped at once, some went to the limit
    stats = token_stats(
        Policy(model=policy.MODEL),
        params,
        jnp.asarray(batch.prompt),
        jnp.asarray(batch.prompt_length),
        jnp.asarray(batch.tokens),
        jnp.asarray(batch.length),
    )
    np.testing.assert_allclose(
        np.where(batch.mask > 0, batch.sampler_logp, 0.0), stats.logp, atol=1e-5
    )
    for leaf in leaves:
        nodes = lineage(leaf)
        for before, node in itertools.pairwise(nodes):
            assert node.tokens[: len(before.tokens)].tolist() == before.tokens.tolist()
            np.testing.assert_array_equal(node.logp[: len(before.tokens)], before.logp)
    # Siblings go their own ways.
    assert len({leaf.tokens.tobytes() for leaf in leaves}) > GROUP
    nodes = {(leaf.slot, node.index): node for leaf in leaves for node in lineage(leaf)}
    own = [len(n.tokens) - (len(n.source.tokens) if n.resumed else 0) for n in nodes.values()]
    assert progress.decoded == sum(own) < sum(len(leaf.tokens) for leaf in leaves)
    assert len(nodes) == len(leaves) + sum(map(len, progress.drafts))


def test_slots_do_not_matter(draws, params):
    (one, first), (other, second) = (real_step(draws[slots], params) for slots in (12, 5))
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        if left.dtype == np.float32:
            np.testing.assert_allclose(left, right, atol=1e-5)
        else:
            np.testing.assert_array_equal(left, right)
    assert [sources(first, s) for s in range(4)] == [sources(second, s) for s in range(4)]


def test_nothing_compiles_after_warm_up(draws, params):
    draw = draws[12]
    keys = rng.Rows(step_key=rng.key(0, 0, "rollout"), prompt=np.zeros(1, int), index=np.zeros(1))
    both = dataclasses.replace(keys, prompt=np.zeros(2, int), index=np.zeros(2))
    paths = [  # as build.warm_up does
        draw(params, [np.ones(8, np.int32)], np.zeros(1, int), keys, 1, keep=True).paths[0]
        for _ in range(2)
    ]
    draw.resume(params, paths, both, 1, keep=True)
    compiles = Compiles()
    restarts = []
    for step in range(1, 5):
        _, progress = real_step(draw, params, step=step)
        explore = treepo(group=GROUP, new=NEW, segment_length=3)
        restarts.append(explore.planner.report(progress)["tree_restarts"])
    compiles.close()
    assert compiles.count == 0 and sum(restarts) > 0


def test_an_answer_that_cannot_be_graded_is_a_leaf():
    explore = treepo(group=4)
    task = Fragile(prompts=TASK.prompts, answers=TASK.answers)
    batch, progress, _ = play(explore, by_index("A", rest="boom"), tools=tools_for(task))
    assert len(progress.rollouts[0]) == 4
    assert batch.reward[0] == 1 and np.isnan(batch.reward[1:]).all()
    learn = base.make("treepo", base.Budget(group=4, max_new_tokens=8)).learn
    assert not np.any(score_of(learn, batch).advantage)


def test_text_of_a_leaf_is_whole():
    explore = treepo(group=2)
    _, progress, _ = play(explore, by_index(rest="abcdeA"))
    assert {leaf.text for leaf in progress.rollouts[0]} == {"abcdeA"}
    assert progress.rollouts[0][0].tokens.tolist() == [*encode("abcdeA"), END]


def test_the_caches_of_a_step_end_with_it(draws, params):
    _, progress = real_step(draws[12], params)
    paths = [row.path for rows in (*progress.rollouts, *progress.drafts) for row in rows]
    leaves = jax.tree.leaves([path.cache for path in paths])
    assert leaves and all(leaf.is_deleted() for leaf in leaves)
