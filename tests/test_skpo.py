"""SKPO: golden numbers, both phases through `collect`, its memory and its loss."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from fakes import END, Draw, Texts, decode, encode, encode_prompt, rollout, tools_for
from test_collect import REAL_SHAPE, REAL_TOOLS, InOrder
from test_learn import RAGGED, groups_of, make_batch, run, score_of
from tiny import policy

from xrpo_jax import build, checkpoint
from xrpo_jax import config as settings
from xrpo_jax import mesh as meshes
from xrpo_jax.algorithms import base
from xrpo_jax.algorithms.skpo import Apart, Share
from xrpo_jax.arrays import TrainState
from xrpo_jax.explore import skip, summary
from xrpo_jax.explore.collect import Shape, collect, init_ledger, remember
from xrpo_jax.learn import keep
from xrpo_jax.log import Clock
from xrpo_jax.sampler import Sampler, make_draw
from xrpo_jax.sampling import Method
from xrpo_jax.types import Draft, Kind, Progress, Request, Tools, Turn

NEW = 12
PROMPTS, ANSWERS = ("aa:", "bb:", "cc:"), ("A", "B", "C")
TASK = Texts(prompts=PROMPTS, answers=ANSWERS)
BEGIN = 7  # what begins every text of this tokenizer


def encode_begun(prompt) -> list[int]:
    return [BEGIN, *encode_prompt(prompt)]


def tools_of(task=TASK, limit=20) -> Tools:
    return dataclasses.replace(tools_for(task, limit, encode=encode_begun), begin=(BEGIN,))


def skpo(group=4, new=NEW, **settings):
    """The algorithm, on prompts in order."""
    made = base.make("skpo", base.Budget(group=group, max_new_tokens=new), **settings)
    explore = dataclasses.replace(made.explore, curriculum=InOrder())
    return dataclasses.replace(made, explore=explore)


def shape_of(prompts=2, group=4, new=NEW) -> Shape:
    return Shape(
        prompts=prompts,
        rows=prompts * (group + 1),
        prompt_length=4,
        seeded_length=4 + new // 2,
        max_new_tokens=new,
    )


@dataclasses.dataclass
class Drawing(Draw):
    """The fake draw with a log-prob for each row: row `index` says less likely tokens."""

    levels: tuple = (0.0,)

    def _draw(self, begins, keys, limit, keep, **call):
        out = super()._draw(begins, keys, limit, keep, **call)
        for i in range(len(out.length)):
            index = int(np.asarray(keys.index)[i])
            level = self.levels[index % len(self.levels)]
            out.logp[i, : out.length[i]] = -level - 0.1 * np.arange(out.length[i])
        return out


def play(algorithm, says, *, shape=None, ledger=None, seed=0, step=0, tools=None, levels=(0.0,)):
    """One step: batch, ledger, progress, the draw's calls."""
    explore, shape, tools = algorithm.explore, shape or shape_of(), tools or tools_of()
    draw = Drawing(says=says, new=shape.max_new_tokens, levels=levels)
    if ledger is None:
        ledger = init_ledger(explore, len(tools.task), shape.max_new_tokens)
    batch, progress = collect(explore, tools, draw, None, ledger, shape, seed, step, Clock())
    batch = batch.replace(old_logp=-np.float32(batch.mask))
    return batch, remember(explore, ledger, progress, batch, told), progress, draw.calls


def told(texts):
    """The policy has moved by 1/10 a token since -1 was stored."""
    return [np.full(len(tokens), -1.1, np.float32) for _, tokens in texts]


def long_then_right(text, prompt, index):
    """Drafts are 12 letters without an end; downstream every second rollout is right."""
    if index < 4:
        return "abcdefghijkl"
    return ANSWERS[prompt] if index % 2 else "no"


def with_length(ledger, expected):
    """The ledger that expects answers of so many tokens."""
    values = dict(ledger["values"])
    values["answer_length"] = np.full_like(values["answer_length"], expected)
    return ledger | {"values": values}


def begun(algorithm, expected, prompts=3, new=NEW):
    return with_length(init_ledger(algorithm.explore, prompts, new), expected)


# --- golden numbers and the cut ------------------------------------------------------------------


def test_golden_selection():
    values = [0.31, 0.52, 0.18, 0.77, 0.44, 0.29, 0.61, 0.38]
    assert np.median(values) == pytest.approx(0.41)
    assert skip.lower_median(values) == 7


@pytest.mark.parametrize(
    "values, place",
    [([5.0], 0), ([2.0, 1.0], 1), ([3.0, 1.0, 2.0], 2), ([1.0, 1.0, 1.0, 1.0], 1)],
)
def test_lower_median_of_few_and_of_equal_ones(values, place):
    assert skip.lower_median(values) == place


def test_golden_failure_of_a_whole_group():
    """All wrong and nothing foretold: no downstream advantage, raw upstream advantage -1."""
    rows = dataclasses.replace(
        RAGGED,
        reward=np.full(RAGGED.number, -1.0),
        baseline=np.full(RAGGED.number, 0.5),
        correct=np.zeros(RAGGED.number, bool),
    )
    _, batch = make_batch(rows)
    batch, part = jax.tree.map(jnp.asarray, batch), Apart()
    assert not np.any(part(batch, groups_of(batch)))
    gap = np.asarray(part.report(batch, groups_of(batch))["tracker_gap"])[: RAGGED.number]
    np.testing.assert_array_equal(gap[RAGGED.kind == Kind.UPSTREAM], -1.0)
    assert np.isnan(gap[RAGGED.kind != Kind.UPSTREAM]).all()


def draft_of(text, stopped):
    made = rollout(False, text=text, stopped=stopped)
    return dataclasses.replace(made, verdict=None, draft=True, kind=Kind.UPSTREAM)


@pytest.mark.parametrize(
    "text, stopped, kept",
    [
        ("abcd", False, "abcd"),
        ("abcdefg", True, "abcd"),  # 8 tokens with the end
        ("abcdef", True, "abc"),  # 7
        ("a", True, "a"),
        ("a", False, "a"),
    ],
)
def test_a_draft_that_ended_is_cut_at_half_of_its_length(text, stopped, kept):
    segment = skip.segment_of(draft_of(text, stopped))
    assert decode(segment.tokens) == kept and END not in segment.tokens
    assert len(segment.logp) == len(kept) and not segment.stopped and segment.draft


def test_a_draft_of_only_an_end_leaves_nothing():
    assert skip.segment_of(draft_of("", True)) is None


# --- both phases ---------------------------------------------------------------------------------


def test_two_phases():
    algorithm = skpo()
    batch, ledger, progress, (drafts, answers) = play(
        algorithm, long_then_right, ledger=begun(skpo(), 8.0), levels=(0.4, 0.1, 0.3, 0.2)
    )
    stop = drafts["limit"][::4]
    assert drafts["prompts"] == ["\x07aa:", "\x07bb:"] and list(drafts["index"]) == [*range(4)] * 2
    assert ((1 <= stop) & (stop <= 4)).all() and (drafts["limit"] == np.repeat(stop, 4)).all()
    # By surprisal drafts are in the order 1, 3, 2, 0: the lower median is the second of them.
    shown = ["\x07" + "abcd"[:length] + PROMPTS[i] for i, length in enumerate(stop)]
    assert answers["prompts"] == shown  # behind the token that begins a text
    assert list(answers["index"]) == [4, 5, 6, 7] * 2
    assert (answers["limit"] == np.repeat(NEW - stop, 4)).all()

    assert [len(rows) for rows in progress.drafts] == [4, 4]
    for slot, group in enumerate(algorithm.explore.planner.select(progress)):
        *rest, upstream = group
        assert [row.kind for row in rest] == [Kind.DOWNSTREAM] * 4
        assert [row.reward for row in rest] == [-1.0, 1.0, -1.0, 1.0]
        assert upstream.kind == Kind.UPSTREAM and upstream.index == 3 and upstream.reward == 0.0
        assert decode(upstream.tokens) == "abcd"[: stop[slot]]
        assert decode(upstream.trained_prompt) == "\x07" + PROMPTS[slot]
    # Rows of the learner: downstream ones under the skip text, the segment under the question.
    assert batch.group.tolist() == [0] * 5 + [1] * 5 and batch.valid.all()
    assert batch.kind.tolist() == ([Kind.DOWNSTREAM] * 4 + [Kind.UPSTREAM]) * 2
    assert batch.prompt_length.tolist() == [4 + stop[0]] * 4 + [4] + [4 + stop[1]] * 4 + [4]
    assert batch.length[[4, 9]].tolist() == stop.tolist()
    assert batch.baseline.tolist() == [0.5] * 10
    assert batch.stopped.all()  # whatever train.mask_truncated drops, not the segments
    assert (batch.mask.sum(axis=1) == batch.length).all()
    np.testing.assert_array_equal(np.isfinite(batch.sampler_logp), batch.mask > 0)

    values = ledger["values"]
    assert values["value"].tolist() == [0.5, 0.5, 0.5] and values["count"].tolist() == [1, 1, 0]
    # "A" and its end, or "no" and its end; the third prompt was not drawn.
    assert values["answer_length"].tolist() == [2.5, 2.5, 8.0]
    assert values["answer_count"].tolist() == [1, 1, 0]
    assert int(ledger["decoded"]["tokens"]) == drafts["limit"].sum() + 2 * (3 + 2 + 3 + 2)


def test_text_in_the_users_turn():
    algorithm = skpo(skip_layout="text")
    _, _, _, calls = play(algorithm, long_then_right, ledger=begun(algorithm, 6.0))
    stop = calls[0]["limit"][::4]
    shown = ["\x07" + "abc"[:length] + "\n" + PROMPTS[i] for i, length in enumerate(stop)]
    assert calls[1]["prompts"] == shown


def test_a_text_that_is_too_long_loses_its_end():
    prompt = (Turn(role="system", content="s"), Turn(role="user", content="?"))
    tokens = np.array(encode("abcdef"))
    for limit, text in ((11, "abcdef\n?"), (8, "abc\n?"), (6, "a\n?"), (5, "?")):
        system, user = skip._quoted(tokens, prompt, tools_of(limit=limit))
        assert system == prompt[0] and user.content == text


def test_continual_answers_go_on_with_the_segment():
    algorithm = skpo(conditioning="continual")
    assert algorithm.explore.planner.pauses and algorithm.explore.seeder.seeds

    def says(text, prompt, index):  # what is resumed says the rest
        return "abcdefghijkl" if index < 4 else "abcdEFGH"

    batch, _, progress, calls = play(algorithm, says, ledger=begun(algorithm, 8.0))
    stop = calls[0]["limit"][::4]
    assert calls[1]["resumed"] and not calls[0]["resumed"]
    for slot, rows in enumerate(progress.rollouts):
        segment = "abcd"[: stop[slot]]
        for row in rows:
            assert row.kind == Kind.DOWNSTREAM and not row.resumed
            assert decode(row.trained_prompt) == "\x07" + PROMPTS[slot] + segment
            assert decode(row.tokens) == "abcdEFGH"[len(segment) :]
            assert row.text == "abcdEFGH"  # what is graded: the answer with its beginning
    assert progress.decoded == 4 * stop.sum() + sum(4 * (9 - length) for length in stop)
    assert batch.kind.tolist() == ([Kind.DOWNSTREAM] * 4 + [Kind.UPSTREAM]) * 2


def test_unconditional_answers_do_not_see_the_segment():
    algorithm = skpo(conditioning="unconditional")
    seeder, planner = algorithm.explore.seeder, algorithm.explore.planner
    assert not (seeder.seeds or seeder.trains_seeded or planner.pauses)
    assert seeder.room(16, 12) == 16 and skip.SkipConnection().room(16, 13) == 22
    batch, _, progress, calls = play(algorithm, long_then_right)
    assert calls[1]["prompts"] == ["\x07aa:", "\x07bb:"]
    assert batch.kind.tolist() == ([Kind.DOWNSTREAM] * 4 + [Kind.UPSTREAM]) * 2


def test_without_monte_carlo_the_segments_own_completion_rewards_it():
    algorithm = skpo(monte_carlo=False)
    assert algorithm.explore.planner.pauses

    def says(text, prompt, index):  # rollout 8 goes on with the segment, of prompt 1 rightly
        if index < 4:
            return "B" * 12
        return "B" * 4 if index == 8 else ANSWERS[prompt]

    task = Texts(prompts=PROMPTS, answers=("A", "BBBB", "C"))
    batch, ledger, progress, calls = play(
        algorithm, says, ledger=begun(algorithm, 6.0), tools=tools_of(task)
    )
    stop = calls[0]["limit"][::4]
    assert calls[2]["resumed"] and list(calls[2]["index"]) == [8, 8]
    assert (calls[2]["limit"] == NEW - stop).all()
    for slot, rows in enumerate(progress.rollouts):
        *answers, own = rows
        assert own.kind == Kind.PLAIN and own.resumed and decode(own.tokens) == "BBBB"
        *rest, upstream = algorithm.explore.planner.select(progress)[slot]
        assert rest == answers and upstream.reward == (-1.0, 1.0)[slot]
    # Slot 0's answers are right and its own completion is not, slot 1's the other way round.
    assert batch.reward.tolist() == [1, 1, 1, 1, -1, -1, -1, -1, -1, 1]
    assert ledger["values"]["value"].tolist() == [0.0, 1.0, 0.5]
    assert ledger["values"]["answer_length"].tolist() == [2, 2, 6]
    assert progress.decoded == 4 * stop.sum() + 2 * 4 * 2 + sum(5 - length for length in stop)


def test_all_new_tokens_for_an_answer():
    algorithm = skpo(full_budget=True)
    _, _, progress, calls = play(algorithm, lambda *_: "x" * NEW)
    assert (calls[1]["limit"] == NEW).all()
    assert {len(row.tokens) for row in progress.rollouts[0]} == {NEW}


# --- degenerate steps ----------------------------------------------------------------------------


@pytest.mark.parametrize("monte_carlo", [True, False])
def test_drafts_that_all_end_at_once(monte_carlo):
    """The answers are drawn from the plain question, there is no segment to train."""
    algorithm = skpo(monte_carlo=monte_carlo, rho_low=0.875)

    def says(text, prompt, index):
        if index < 4:
            return "" if prompt == 0 else "abcdefghijkl"
        return ANSWERS[prompt]

    ledger = begun(algorithm, 8.0)
    for step in range(2):
        batch, ledger, progress, calls = play(algorithm, says, ledger=ledger, step=step)
        assert calls[1]["prompts"][0] == "\x07aa:" and not calls[1]["resumed"]
        assert batch.kind.tolist() == [Kind.DOWNSTREAM] * 8 + [Kind.UPSTREAM, 0]
        assert batch.valid.tolist() == [1] * 9 + [0]
        assert algorithm.explore.planner.report(progress)["ended_early"] == 0.5
    values = ledger["values"]
    assert values["count"].tolist() == [1.96, pytest.approx(1.875, abs=0.09), 0]
    assert values["length"].tolist()[0] == 0 and values["length"][1] > 0  # no answer is stored


def test_no_segment_at_all():
    algorithm = skpo()
    batch, ledger, progress, _ = play(
        algorithm, lambda text, prompt, index: "" if index < 4 else "A", ledger=begun(skpo(), 8.0)
    )
    assert batch.valid.sum() == 8 and (batch.kind == Kind.DOWNSTREAM).sum() == 8
    found = algorithm.explore.planner.report(progress)
    assert found == {"ended_early": 1.0, "degenerate_downstream": 1.0, "kept_share": 0.0}
    assert ledger["values"]["value"].tolist() == [1.0, 0.0, 0.5]


def test_drafts_that_end_at_once_are_not_selectable():
    algorithm = skpo()

    def says(text, prompt, index):
        return "abcdefghijkl" if index == 2 else "A" if index >= 4 else ""

    batch, _, progress, _ = play(algorithm, says, ledger=begun(algorithm, 12.0))
    upstream = [group[-1] for group in algorithm.explore.planner.select(progress)]
    assert [row.index for row in upstream] == [2, 2]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fragile(Texts):
    """Its verifier raises on "boom"."""

    def rewards(self, i, completion):
        if completion == "boom":
            raise RuntimeError("verifier bug")
        return super().rewards(i, completion)


def test_answers_that_could_not_be_graded():
    """They leave R_I, the tracker and the group; where none is left nothing is learnt or known."""
    algorithm = skpo()

    def says(text, prompt, index):
        if index < 4:
            return "abcdefghijkl"
        return "boom" if prompt == 0 or index == 4 else ANSWERS[prompt] if index == 5 else "no"

    tools = tools_of(Fragile(prompts=PROMPTS, answers=ANSWERS))
    batch, ledger, progress, _ = play(algorithm, says, tools=tools, ledger=begun(algorithm, 12.0))
    assert np.isnan(batch.reward[:5]).all() and batch.reward[9] == pytest.approx(-1 / 3)
    assert ledger["values"]["value"].tolist() == pytest.approx([0.5, 1 / 3, 0.5])
    assert ledger["values"]["answer_length"].tolist() == [12, (5 + 2 + 3 + 3) / 4, 12]
    found = algorithm.explore.planner.report(progress)
    assert found["upstream_reward"] == pytest.approx(-1 / 3) and all(
        np.isfinite(value).all() for value in found.values()
    )
    scores = score_of(algorithm.learn, batch.replace(prompt=None, prompt_length=None))
    assert not np.any(scores.advantage[:5]) and np.isfinite(scores.advantage).all()
    assert np.count_nonzero(scores.advantage[5:9, 0]) == 3
    assert not np.any(scores.advantage[9])  # one segment alone is the batch's mean


# --- where a draft stops, and which is kept ------------------------------------------------------


def progress_at(planner_step=0, seed=0, prompts=(0,), expected=12.0, new=100):
    return Progress(
        prompts=prompts,
        rollouts=((),) * len(prompts),
        drafts=((),) * len(prompts),
        batch=len(prompts),
        seed=seed,
        step=planner_step,
        max_new_tokens=new,
        values={"answer_length": np.full(500, expected)},
        value=np.full(len(prompts), 0.5),
    )


def test_the_place_is_uniform_between_a_sixth_and_a_half():
    planner = skip.TwoPhase(group=4)
    at = progress_at(prompts=tuple(range(500)), expected=60.0)
    places = [planner.place(at, slot) for slot in range(500)]
    counts = np.bincount(places, minlength=31)
    assert counts[:10].sum() == 0 and set(places) == set(range(10, 30))
    assert counts[10:30].min() > 10 and counts[10:30].max() < 45


def test_the_place_depends_on_seed_step_and_prompt_alone():
    planner = skip.TwoPhase(group=4)
    whole = progress_at(prompts=(5, 9, 2), expected=90.0)
    moved = progress_at(prompts=(2, 7, 5, 1), expected=90.0)
    assert planner.place(whole, 0) == planner.place(moved, 2)
    assert planner.place(whole, 2) == planner.place(moved, 0)
    others = [
        planner.place(progress_at(step, seed, (5,), 90.0), 0)
        for step in range(5)
        for seed in (0, 1)
    ]
    assert len(set(others)) > 5


@pytest.mark.parametrize(
    "expected, new, places", [(1.0, 100, {1}), (500.0, 20, {10}), (500.0, 2, {1}), (7.9, 3, {1})]
)
def test_the_place_is_clamped(expected, new, places):
    planner = skip.TwoPhase(group=4)
    found = {planner.place(progress_at(step, 0, (0,), expected, new), 0) for step in range(20)}
    assert found == places


def test_a_fixed_split_alternates():
    planner = skip.TwoPhase(group=4, split="fixed")
    assert [planner.place(progress_at(step, 0, (0,), 62.0), 0) for step in range(4)] == [
        10, 31, 10, 31,
    ]  # fmt: skip


def drafts_of(levels):
    rows = []
    for index, level in enumerate(levels):
        row = dataclasses.replace(draft_of("ab", False), index=index)
        rows.append(dataclasses.replace(row, logp=-np.full(2, level, np.float32)))
    return tuple(rows)


@pytest.mark.parametrize("selection, chosen", [("median", [7, 7, 7]), ("extreme", [2, 3, 2])])
def test_selection(selection, chosen):
    levels = (0.31, 0.52, 0.18, 0.77, 0.44, 0.29, 0.61, 0.38)
    planner = skip.TwoPhase(group=8, selection=selection)
    found = []
    for step in range(3):
        at = dataclasses.replace(progress_at(step), drafts=(drafts_of(levels),))
        found.append(planner.segment(at, 0).index)
    assert found == chosen


def test_surprisal_is_of_what_is_kept():
    """A draft that ended is judged by its first half: its unlikely end is gone."""
    ended = draft_of("abc", True)
    ended = dataclasses.replace(ended, logp=np.float32([-0.1, -0.1, -9, -9]), index=0)
    other = dataclasses.replace(drafts_of([0.2])[0], index=1)
    at = dataclasses.replace(progress_at(), drafts=((ended, other),))
    assert skip.TwoPhase(group=2).segment(at, 0).index == 0


# --- memory --------------------------------------------------------------------------------------


def test_the_expected_length_begins_at_its_setting_and_at_most_at_the_limit():
    for first, expected in ((1024, NEW), (6, 6)):
        memory = skpo(first_length=first).explore.values.init(2, NEW)
        assert memory["answer_length"].tolist() == [expected] * 2


def test_golden_memory_over_steps():
    """R_I = 0, then 1 at the second visit: V and L by the same recursion."""
    algorithm = skpo()
    _, ledger, _, _ = play(algorithm, long_then_right)
    _, ledger, _, _ = play(
        algorithm,
        lambda text, prompt, index: "abcdefghijkl" if index < 4 else ANSWERS[prompt],
        ledger=ledger,
        step=1,
    )
    eta = 1 / 1.96
    values = ledger["values"]
    np.testing.assert_allclose(values["value"], [0.5 + 0.5 * eta] * 2 + [0.5], rtol=1e-12)
    np.testing.assert_allclose(values["answer_length"], [2.5 - 0.5 * eta] * 2 + [NEW], rtol=1e-12)
    assert values["answer_count"].tolist() == [1.96, 1.96, 0]


def test_segments_are_stored_where_the_rate_depends_on_them():
    algorithm = skpo(rho_low=0.875, rho_half=1.0)
    _, first, progress, calls = play(algorithm, long_then_right)
    stop = calls[0]["limit"][::4]
    values = first["values"]
    assert values["tokens"].shape == (3, NEW // 2)
    assert values["length"].tolist() == [*stop, 0]
    assert decode(values["tokens"][0, : stop[0]]) == "abcdef"[: stop[0]]
    assert values["logp"][0, : stop[0]].tolist() == [-1.0] * stop[0]
    _, second, _, _ = play(algorithm, long_then_right, ledger=first, step=1)
    rho = 2 ** (-0.1 / 1.0)
    np.testing.assert_allclose(second["values"]["rho"], [rho, rho, np.nan], rtol=1e-6)
    np.testing.assert_allclose(second["values"]["answer_count"], [rho + 1, rho + 1, 0], rtol=1e-6)


def test_of_a_draft_that_ended_its_half_is_stored():
    algorithm = skpo(rho_low=0.875)
    ledger = begun(algorithm, 12.0)
    batch, after, _, _ = play(
        algorithm, lambda text, prompt, index: "a" if index < 4 else "A", ledger=ledger
    )
    assert batch.length[[4, 9]].tolist() == [1, 1]
    assert after["values"]["length"].tolist() == [1, 1, 0]
    assert after["values"]["tokens"][0].tolist() == [97] + [0] * 5


def test_a_saved_ledger_draws_on_as_if_it_had_not_been(tmp_path):
    made = base.make("skpo", base.Budget(group=4, max_new_tokens=NEW), rho_low=0.875)
    task = Texts(prompts=tuple(f"{i:02d}:" for i in range(9)), answers=tuple("ABCDEFGHI"))
    tools, shape = tools_of(task), shape_of(prompts=3)

    def says(text, prompt, index):
        right = (prompt + index) % (2 + prompt % 3) == 0
        return "abcdefghijkl" if index < 4 else task.answers[prompt] if right else "no"

    start, ledger = init_ledger(made.explore, 9, NEW), None
    ledger = start
    for step in range(4):
        _, ledger, _, _ = play(made, says, shape=shape, ledger=ledger, step=step, tools=tools)
    for one, other in zip(*map(jax.tree.leaves, (start, ledger)), strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype

    state = jax.device_put(
        TrainState(params={"w": np.zeros(2, np.float32)}, optimizer={}),
        meshes.everywhere(meshes.make(1)),
    )
    manager = checkpoint.open_manager(tmp_path, 1)
    checkpoint.save(manager, 4, state, ledger)
    _, loaded, _ = checkpoint.restore(manager, 4, checkpoint.shapes(state), start)
    manager.close()
    drawn = set()
    for step in range(4, 9):
        one, other = (
            play(made, says, shape=shape, ledger=known, step=step, tools=tools)
            for known in (ledger, loaded)
        )
        assert one[2].prompts == other[2].prompts and len(set(one[2].prompts)) == 3
        for before, after in zip(one[3], other[3], strict=True):
            assert before["prompts"] == after["prompts"]
            np.testing.assert_array_equal(before["limit"], after["limit"])
        for before, after in zip(*map(jax.tree.leaves, (one[1], other[1])), strict=True):
            np.testing.assert_array_equal(before, after)
        ledger, loaded = one[1], other[1]
        drawn.add(one[2].prompts)
    assert len(drawn) > 1


# --- what is logged ------------------------------------------------------------------------------


def test_metrics():
    algorithm = skpo()
    ledger = begun(algorithm, 8.0)
    ledger["values"]["value"][:2] = 0.75, 0.5

    def says(text, prompt, index):
        if index < 4:
            return "ab" if index == 0 else "abcdefghijkl"
        return ANSWERS[prompt] if prompt or index == 4 else "no"

    ledger = with_length(ledger, 24.0)
    _, after, progress, calls = play(algorithm, says, ledger=ledger, levels=(0.5, 0.0, 0.9, 0.8))
    stop = calls[0]["limit"][::4]
    assert (stop >= 4).all()  # the first draft, with its end, is shorter
    found = algorithm.explore.planner.report(progress)
    assert found["segment_share"] == pytest.approx(
        np.mean([len(g[-1].tokens) for g in algorithm.explore.planner.select(progress)]) / 24
    )
    # Surprisals .5 (cut to one token), and 0, .9, .8 plus .05 a token more: the second of four.
    assert [g[-1].index for g in algorithm.explore.planner.select(progress)] == [0, 0]
    assert found["segment_share"] == 1 / 24
    assert found["kept_share"] == 2 / (2 * 3 + 3 * stop.sum())
    assert found["ended_early"] == 0.25 and found["degenerate_downstream"] == 0.5
    assert found["upstream_reward"] == 0.25 and found["upstream_reward_std"] == 0.75
    assert found["value_gap"] == np.mean([1.0, 1.0])
    assert found["surprisal_spread"] == pytest.approx(0.9, rel=1e-5)

    groups = algorithm.explore.planner.select(progress)
    logged = summary.summarise(algorithm.explore, progress, after, TASK, groups)
    assert logged["rollouts"] == 8 and logged["drafts"] == 8 and logged["trained_rows"] == 10
    assert logged["rounds"] == 2 and logged["value_rho"] == pytest.approx(0.96)
    assert logged["rescued_prompts"] == 0 and logged["seeded"] == 0
    assert logged["answer_length"] == pytest.approx((np.mean([2, 3, 3, 3]) + 2) / 2)
    kinds = {record["kind"] for record in summary.records(progress, TASK)}
    assert kinds == {"upstream", "downstream"}


# --- the loss ------------------------------------------------------------------------------------


def test_answers_alone_have_cispos_loss():
    """Without segments, and the whole weight on answers: CISPO's golden number."""
    rows = dataclasses.replace(oracles.toy(), baseline=np.full(4, 0.5))
    made = base.make(
        "skpo", base.Budget(group=4, max_new_tokens=4), floor=0.0, cap=1.2, upstream_share=0.0
    )
    assert run(made.learn, *make_batch(rows))[0] == pytest.approx(-0.04058673, abs=5e-8)
    assert oracles.skpo(rows, share=0.0, floor=0.0, cap=1.2) == pytest.approx(-0.04058673, abs=1e-8)


def test_golden_weights_of_both_halves():
    _, batch = make_batch(RAGGED)
    batch = jax.tree.map(jnp.asarray, batch)
    upstream = np.zeros(len(batch.kind), bool)
    upstream[: RAGGED.number] = RAGGED.kind == Kind.UPSTREAM
    weight = np.asarray(Share(upstream=0.3)(batch, groups_of(batch)))
    per_row = weight.sum(axis=1)
    np.testing.assert_allclose(per_row[upstream], 0.3 / upstream.sum(), rtol=1e-5)
    rest = ~upstream & (np.asarray(batch.valid) > 0)
    tokens = np.asarray(batch.mask).sum(axis=1)
    np.testing.assert_allclose(per_row[rest], 0.7 * tokens[rest] / tokens[rest].sum(), rtol=1e-5)


@pytest.mark.parametrize("missing", ["upstream", "downstream"])
def test_a_half_without_tokens_is_missing(missing):
    """The other keeps its weight, and nothing is NaN."""
    upstream = RAGGED.kind == Kind.UPSTREAM
    kept = ~upstream if missing == "upstream" else upstream
    rows = dataclasses.replace(RAGGED, kept=kept)
    stats, batch = make_batch(RAGGED)
    batch.mask[: RAGGED.number][~kept] = 0.0
    learn = skpo().learn
    value, gradient, _ = run(learn, stats, batch)
    assert value == pytest.approx(oracles.skpo(rows), rel=1e-5)
    assert float(score_of(learn, batch).weight.sum()) == pytest.approx(0.5, abs=1e-6)
    assert np.isfinite(gradient).all() and np.abs(gradient).max() > 1e-3


def test_segments_and_answers_do_not_enter_each_others_statistics():
    _, batch = make_batch(RAGGED)
    plain = score_of(skpo().learn, batch).advantage
    upstream = np.flatnonzero(batch.kind == Kind.UPSTREAM)
    moved = batch.reward.copy()
    moved[upstream[0]] += 3.0
    changed = score_of(skpo().learn, batch.replace(reward=moved)).advantage
    rest = np.setdiff1d(np.arange(RAGGED.number), upstream)
    np.testing.assert_array_equal(plain[rest], changed[rest])
    assert np.any(plain[upstream] != changed[upstream])
    moved = batch.reward.copy()
    moved[0] += 3.0
    changed = score_of(skpo().learn, batch.replace(reward=moved)).advantage
    np.testing.assert_array_equal(plain[upstream], changed[upstream])


def test_truncated_answers_can_be_left_out_and_segments_stay():
    made = base.keeping(skpo(), stopped=True, mixed=False)
    assert made.learn.keep == (keep.Stopped(),) and made.learn.whole_groups
    batch, _, _, _ = play(made, lambda *_: "x" * NEW)
    scores = score_of(made.learn, batch.replace(prompt=None, prompt_length=None))
    weights = np.asarray(scores.weight).sum(axis=1)
    assert not np.any(weights[batch.kind == Kind.DOWNSTREAM])
    assert weights[batch.kind == Kind.UPSTREAM].tolist() == [0.25, 0.25]


# --- with the real sampler -----------------------------------------------------------------------


def real_draw(slots, pauses_length):
    sampler = Sampler(
        model=policy.MODEL,
        method=Method(),
        dtype="float32",
        prompts=4,
        slots=slots,
        lengths=(6, pauses_length),
        max_new_tokens=5,
        stop_ids=policy.MODEL.eos_token_ids,
    )
    return make_draw(sampler, meshes.make(1))


@pytest.mark.parametrize("conditioning", ["skip", "continual"])
def test_rollouts_do_not_depend_on_slots(conditioning):
    made = skpo(group=4, new=5, conditioning=conditioning)
    shape = dataclasses.replace(REAL_SHAPE, rows=20, seeded_length=8)
    params = jax.device_put(policy.weights(), meshes.everywhere(meshes.make(1)))
    found = []
    for slots in (3, 16):
        ledger = with_length(init_ledger(made.explore, len(REAL_TOOLS.task), 5), 5.0)
        tools = dataclasses.replace(REAL_TOOLS, prompt_limit=8)
        batch, progress = collect(
            made.explore, tools, real_draw(slots, 8), params, ledger, shape, 1, 0, Clock()
        )
        rows = [row for slot in (*progress.drafts, *progress.rollouts) for row in slot]
        found.append(
            [(row.index, row.trained_prompt.tolist(), row.tokens.tolist()) for row in rows]
        )
    assert found[0] == found[1] and len({tuple(row[2]) for row in found[0]}) > 5
    longer = [len(row.trained_prompt) for rows in progress.rollouts for row in rows]
    assert max(longer) > 4 and batch.valid.sum() > 16


# --- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, message",
    [
        ({"conditioning": "x"}, "conditioning='x'; allowed: skip, continual, unconditional"),
        ({"skip_layout": "x"}, "skip_layout='x'; allowed: tokens, text"),
        ({"split": "x"}, "split='x'; allowed: uniform, fixed"),
        ({"selection": "x"}, "selection='x'; allowed: median, extreme"),
        ({"skip_layout": "text", "conditioning": "continual"}, "allowed: tokens with"),
        ({"monte_carlo": False, "conditioning": "continual"}, "allowed: True with"),
        ({"full_budget": True, "conditioning": "continual"}, "allowed: False with"),
        ({"first_length": 0}, "first_length=0; allowed: at least 1"),
        ({"upstream_share": 1.5}, "upstream_share=1.5; allowed: 0 to 1"),
        ({"floor": 1.3}, "floor=1.3, algorithm.cap=1.28; allowed: in this order"),
        ({"floor": 0.0, "cap": 0.0}, "the cap above 0"),
        (
            {"rho_low": 0.97},
            "rho_low=0.97, algorithm.rho_high=0.96; allowed: 0 to 1, in this order",
        ),
    ],
)
def test_settings_are_checked(given, message):
    with pytest.raises(ValueError, match=message):
        skpo(**given)


def test_sizes_are_checked():
    with pytest.raises(ValueError, match="max_new_tokens=1; allowed: at least 2"):
        skpo(new=1)
    with pytest.raises(ValueError, match="rollout.group=1; allowed: at least 2"):
        skpo(group=1).explore.planner.check(4)
    assert skpo(group=8).explore.planner.rows(4) == 36


def test_drafts_are_all_drafts():
    requests = skip.TwoPhase(group=4)(progress_at(prompts=(1, 2)), 0)
    assert [type(request) for request in requests] == [Request] * 2
    assert {request.draft for request in requests} == {Draft.ALL}
    assert skip.TwoPhase(group=4)(progress_at(), 2) == []


@pytest.mark.parametrize(
    "given, fits",
    [({}, True), ({"full_budget": True}, False), ({"skip_layout": "text"}, False)],
    ids=str,
)
def test_segment_and_answer_share_the_models_context(given, fits):
    """The paper's 1,024 and 3,072 tokens in a context of 4,096."""
    config = settings.default()
    config.algorithm.name = "skpo"
    config.algorithm.update(given)
    config.task.name = "arithmetic"
    config.rollout.update(prompt_length=1024, seeded_length=2560, max_new_tokens=3072)
    parsed = settings.parse(config)
    shape = Shape(prompts=4, rows=36, prompt_length=1024, seeded_length=2560, max_new_tokens=3072)
    model = types.SimpleNamespace(max_position_embeddings=4096, vocab_size=9)
    words = types.SimpleNamespace(vocab_size=9)
    if fits:
        build._check_fit(parsed, shape, model, words, 1)
    else:
        with pytest.raises(ValueError, match="= 5632 tokens; allowed: at most the model's context"):
            build._check_fit(parsed, shape, model, words, 1)


def test_equal_answers_leave_their_segment_where_equal_rewards_are_dropped():
    """The segment's own reward makes no group mixed, either."""
    kind = np.array([Kind.DOWNSTREAM] * 2 + [Kind.UPSTREAM]) * np.ones((2, 1), int)
    reward = np.array([[1.0, 1, 1], [1, -1, 0]])
    rows = oracles.Rows(
        now=-np.ones((6, 2)),
        old=-np.ones((6, 2)),
        mask=np.ones((6, 2)),
        reward=reward.reshape(-1),
        correct=reward.reshape(-1) > 0,
        group=np.repeat([0, 1], 3),
        kind=kind.reshape(-1),
    )
    _, batch = make_batch(rows)
    kept = np.asarray(keep.Mixed()(batch, groups_of(batch)))[:6]
    assert kept.tolist() == [0, 0, 1, 1, 1, 1]
    batch.reward[2] = -1.0
    assert np.asarray(keep.Mixed()(batch, groups_of(batch)))[:6].tolist() == [0, 0, 1, 1, 1, 1]
