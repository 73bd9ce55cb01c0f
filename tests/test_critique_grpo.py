"""Critique-GRPO: the golden loss, who is refined, what sampler and learner see, and refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from fakes import Draw, Texts, decode, encode_prompt, progress, rollout, said, tools_for
from test_learn import close, make_batch, run, score_of

from xrpo_jax.algorithms import base
from xrpo_jax.algorithms.critique_grpo import PromptSum, Shaped
from xrpo_jax.arrays import TokenStats
from xrpo_jax.explore import critique
from xrpo_jax.explore.collect import Explore, Shape, collect, init_ledger, remember
from xrpo_jax.explore.critique import Critique, Refine, by_rule
from xrpo_jax.log import Clock
from xrpo_jax.prompts import gold, without
from xrpo_jax.tasks import arithmetic, countdown, files, sums
from xrpo_jax.types import Draft, Kind, Turn, Verdict, text_of

BUDGET = base.Budget(group=4, max_new_tokens=4)


def learn_of(**settings):
    return base.make("critique_grpo", BUDGET, **settings).learn


# --- the loss -----------------------------------------------------------------------------------

TOY = dataclasses.replace(oracles.toy(), kind=np.array([0, 0, 0, Kind.REFINED]))


def test_golden_loss():
    """Row 4 is a refinement; no clip; the sum over all rows and tokens over 4."""
    far = {"clip_low": 0.9, "clip_high": 9.0}
    assert run(learn_of(**far), *make_batch(TOY))[0] == pytest.approx(0.26992978, abs=5e-8)
    assert oracles.critique_grpo(TOY, 4, low=0.9, high=9.0) == pytest.approx(0.26992978, abs=1e-8)


def test_a_second_prompt_halves_the_loss_whatever_its_rows():
    more = oracles.Rows(
        now=np.vstack([TOY.now, np.full((2, 4), -1.0)]),
        old=np.vstack([TOY.old, np.full((2, 4), -1.0)]),
        mask=np.vstack([TOY.mask, np.ones((2, 4))]),
        reward=np.append(TOY.reward, [1.0, 1.0]),
        correct=np.append(TOY.correct, [True, True]),
        group=np.append(TOY.group, [1, 1]),
        kind=np.append(TOY.kind, [0, Kind.REFINED]),
    )
    one, other = (run(learn_of(), *make_batch(rows)) for rows in (TOY, more))
    assert other[0] == pytest.approx(one[0] / 2, abs=1e-7)
    close(other[1][:4], one[1][:4] / 2, 1e-7)
    assert not np.any(other[1][4:6])  # equal rewards


@pytest.mark.parametrize("gamma", [0.1, 0.5])
def test_shaped_by_hand(gamma):
    """`p / (p + gamma)` and its derivative by log p, from one in a billion to certain."""
    p = np.array([[1e-9, 1e-3, gamma, 0.5, 1.0]])
    _, batch = make_batch(dataclasses.replace(oracles.toy(), mask=np.ones((4, 4))))
    batch = batch.replace(mask=jnp.ones((1, 5)))
    log_ratio = jnp.full((1, 5), 7.0)  # there is no ratio, and nothing to clip

    def objective(logp):
        stats = TokenStats(logp=logp, entropy=None)
        found, clipped = Shaped(gamma=gamma)(log_ratio, jnp.full((1, 5), -2.0), stats, batch)
        assert not np.any(jax.lax.stop_gradient(clipped))
        return jnp.sum(found), found

    (_, found), gradient = jax.value_and_grad(objective, has_aux=True)(jnp.log(p))
    np.testing.assert_allclose(found, -2 * p / (p + gamma), rtol=1e-5)
    np.testing.assert_allclose(gradient, -2 * gamma * p / (p + gamma) ** 2, rtol=1e-5)
    assert np.argmax(np.abs(gradient)) == 2


def test_only_refinements_are_shaped_and_the_baseline_is_shared():
    learn = learn_of()
    _, batch = make_batch(TOY)
    close(score_of(learn, batch).advantage[:4, 0], [0.5, -0.5, -0.5, 0.5], 0)
    far = dataclasses.replace(TOY, old=TOY.old - 3.0)  # every ratio is beyond the clip
    gradient = run(learn, *make_batch(far))[1]
    assert not np.any(gradient[0]) and gradient[3, 0] < 0
    p = np.exp(TOY.now[3, 0])
    assert gradient[3, 0] == pytest.approx(-0.5 * 0.1 * p / (p + 0.1) ** 2 / 4, rel=1e-5)


def test_the_report_is_of_refinements_alone():
    _, batch = make_batch(TOY)
    found = np.asarray(score_of(learn_of(), batch).report["refined_probability"])
    assert found[3] == pytest.approx(np.exp(-1.5)) and np.isnan(found[[0, 1, 2, 4]]).all()
    assert PromptSum(limit=4) == learn_of().weight


# --- who is refined -----------------------------------------------------------------------------


def ungraded(**more):
    failed = Verdict(status="timed_out", score=0.0)
    return dataclasses.replace(rollout(False, reward=float("nan"), **more), verdict=failed)


def asked(planner, outcomes, round=1):
    """(slot, index of the response, n) of every request."""
    state = progress(outcomes)
    return [(each.slot, each.source.index, each.n) for each in planner(state, round)]


def test_only_prompts_that_fail_throughout_are_refined():
    planner = Refine(group=4)
    first = planner(progress([(), (), ()]), 0)
    assert [(each.slot, each.n, each.source, each.draft) for each in first] == [
        (slot, 3, None, Draft.NONE) for slot in range(3)
    ]
    assert asked(planner, [(0, 3), (1, 3), (3, 3)]) == [(0, 0, 1), (0, 1, 1), (0, 2, 1)]
    assert asked(planner, [(0, 3), (1, 3), (3, 3)], round=2) == []
    assert asked(planner, [(1, 3), (3, 3)]) == []


def test_the_gate_always_refines_every_failure():
    planner = Refine(group=4, gate="always")
    assert asked(planner, [(0, 2), (2, 3), (3, 3)]) == [(0, 0, 1), (0, 1, 1), (1, 2, 1)]


@pytest.mark.parametrize(
    "number, wanted", [(1, [(0, 1)]), (2, [(0, 1), (1, 1)]), (7, [(0, 3), (1, 2), (2, 2)])]
)
def test_refinements_are_spread_over_the_failures_in_order(number, wanted):
    planner = Refine(group=4, number=number)
    assert asked(planner, [(0, 3)]) == [(0, index, n) for index, n in wanted]


def test_what_could_not_be_graded_neither_fails_nor_is_refined():
    state = progress([(0, 2), (0, 2)])
    lost = tuple(ungraded(slot=1, index=i) for i in range(2))
    rollouts = ((*state.rollouts[0], ungraded(index=2)), lost)
    state = dataclasses.replace(state, rollouts=rollouts)
    for gate in critique.GATES:
        requests = Refine(group=4, gate=gate)(state, 1)
        assert [(each.slot, each.source.index) for each in requests] == [(0, 0), (0, 1)]


def with_refinements(outcomes):
    """A prompt of two failures and refinements of the first: True, False, or None for ungraded."""
    state = progress([(0, 2)])
    source = state.rollouts[0][0]
    rows = [
        ungraded(index=2 + i) if right is None else rollout(right, index=2 + i)
        for i, right in enumerate(outcomes)
    ]
    rows = [dataclasses.replace(row, source=source, kind=Kind.REFINED) for row in rows]
    return dataclasses.replace(state, rollouts=((*state.rollouts[0], *rows),))


@pytest.mark.parametrize(
    "outcomes, kept, wanted",
    [
        ([False, True, False, True], 1, [3]),
        ([False, True, False, True], 3, [3, 5, 2]),
        ([False, False], 1, [2]),
        ([None, False], 1, [3]),
        ([None, None], 1, [2]),
        ([True], 2, [2]),
        ([], 1, []),
    ],
)
def test_correct_refinements_are_kept_first(outcomes, kept, wanted):
    state = with_refinements(outcomes)
    (group,) = Refine(group=2 + kept, kept=kept).select(state)
    assert [row.index for row in group] == [0, 1, *wanted]


def test_report():
    planner = Refine(group=3)
    assert planner.report(progress([(0, 2), (2, 2)])) == {"gated": 0.0}
    assert planner.report(with_refinements([False, None, True, True])) == {
        "gated": 1.0,
        "rescued_share": 1.0,
        "refined_accuracy": 2 / 3,
    }
    two = with_refinements([False])
    two = dataclasses.replace(two, prompts=(0, 1), rollouts=(two.rollouts[0], ()))
    assert planner.report(two) == {"gated": 0.5, "rescued_share": 0.0, "refined_accuracy": 0.0}
    assert planner.report(with_refinements([None])) == {"gated": 1.0}


# --- what is shown ------------------------------------------------------------------------------

PROMPTS = ("aa:", "bb:", "cc:")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Known(Texts):
    """Texts that tell their answers; an empty completion is no answer."""

    def rewards(self, i, completion):
        if not completion:
            return Verdict(status="unparsed", score=0.0)
        return super().rewards(i, completion)

    def gold(self, i):
        return self.answers[i]


TASK = Known(prompts=PROMPTS, answers=("A", "B", "C"))
TOOLS = tools_for(TASK, prompt_limit=120)
SHAPE = Shape(prompts=3, rows=12, prompt_length=4, seeded_length=120, max_new_tokens=8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InOrder:
    def __call__(self, value, seed, step, count):
        return np.arange(count)


def play(says, *, tools=TOOLS, shape=SHAPE, seed=0, step=0, **settings):
    """One step of the algorithm with a fake draw: batch, ledger, progress, calls."""
    budget = base.Budget(group=4, max_new_tokens=shape.max_new_tokens)
    made = base.make("critique_grpo", budget, **settings).explore
    explore = dataclasses.replace(made, curriculum=InOrder())
    draw = Draw(says=says, new=shape.max_new_tokens)
    ledger = init_ledger(explore, len(tools.task), shape.max_new_tokens)
    batch, state = collect(explore, tools, draw, None, ledger, shape, seed, step, Clock())
    after = remember(explore, ledger, state, batch, logp_of=None)
    for name, memory in ledger.items():
        for key, values in memory.items():
            assert after[name][key].shape == values.shape and after[name][key].dtype == values.dtype
    return batch, after, state, draw.calls, explore


def answers(text, prompt, index):
    """Prompt 0 fails until it is criticised, 1 is sometimes right, 2 always."""
    if critique.AGAIN in text:
        return "A" if index % 2 else "no"
    if text.endswith(critique.ASK):
        return f"think{index}"
    return ("", "B" if index else "no", "C")[prompt] if index != 1 else ("no", "B", "C")[prompt]


def test_a_step_by_rule():
    batch, _, state, calls, explore = play(answers)
    assert [len(call["row"]) for call in calls] == [9, 3]
    assert calls[1]["prompts"] == [
        f"aa:\n{critique.NOTHING} {critique.AGAIN}",
        f"aa:no\n{critique.WRONG} {critique.AGAIN}",
        f"aa:\n{critique.NOTHING} {critique.AGAIN}",
    ]
    assert calls[1]["prompt"].tolist() == [0, 0, 0] and calls[1]["index"].tolist() == [3, 4, 5]
    assert [row.source.index for row in state.rollouts[0][3:]] == [0, 1, 2]
    # Two of the three are right: the first of them is trained on, behind the initial ones.
    groups = explore.planner.select(state)
    assert [[row.index for row in group] for group in groups] == [
        [0, 1, 2, 3],
        [0, 1, 2],
        [0, 1, 2],
    ]
    assert batch.valid.sum() == 10 and len(batch.valid) == 12
    (refined,) = np.nonzero(batch.kind == Kind.REFINED)
    assert refined.tolist() == [3] and batch.group[3] == 0 and batch.reward[3] == 1
    # The learner sees the plain question, and the sampler's log-probs say nothing of it.
    assert decode(batch.prompt[3, : batch.prompt_length[3]]) == "aa:"
    assert decode(batch.tokens[3, : batch.length[3]]) == "A"
    assert np.isnan(batch.sampler_logp[3]).all()
    assert np.isfinite(batch.sampler_logp[[0, 1, 2]]).sum() == batch.mask[[0, 1, 2]].sum()
    assert explore.planner.report(state) == pytest.approx(
        {"gated": 1 / 3, "rescued_share": 1.0, "refined_accuracy": 2 / 3}
    )


def test_a_critique_may_tell_the_answer():
    _, _, _, calls, _ = play(answers, critique="verdict_and_answer", gate="always")
    shown = calls[1]["prompts"]
    assert shown[1] == "aa:no\nThat is incorrect. The correct answer is A. " + critique.AGAIN
    assert shown[3] == "bb:no\nThat is incorrect. The correct answer is B. " + critique.AGAIN
    assert shown[0].startswith(f"aa:\n{critique.NOTHING} The correct answer is A.")


def test_the_models_own_critiques_are_drafts():
    _, ledger, state, calls, explore = play(answers, critique="self", refinements=5, kept=1)
    assert [len(call["row"]) for call in calls] == [9, 3, 5]
    assert calls[1]["prompts"] == [f"aa:{text}\n{critique.ASK}" for text in ("", "no", "")]
    assert calls[2]["prompts"] == [
        f"aa:{text}\nthink{index} {critique.AGAIN}" for index, text in [(3, ""), (4, "no"), (5, "")]
    ]
    assert calls[2]["row"].tolist() == [0, 0, 1, 1, 2]
    drafts = state.drafts[0]
    assert [draft.source.index for draft in drafts] == [0, 1, 2]
    assert all(draft.draft and draft.verdict is None for draft in drafts)
    sources = [row.source for row in state.rollouts[0][3:]]
    assert [source.index for source in sources] == [3, 3, 4, 4, 5]
    assert [source.source.index for source in sources] == [0, 0, 1, 1, 2]
    assert all(row.source is None for rows in state.rollouts[1:] for row in rows)
    # Critiques cost tokens, and no rollout goes on with one.
    drawn = [row for rows in (*state.rollouts, *state.drafts) for row in rows]
    assert ledger["decoded"]["tokens"] == sum(len(row.tokens) for row in drawn) == state.decoded


def test_a_self_critique_is_no_rollout_of_a_group():
    batch, _, state, _, explore = play(answers, critique="self")
    assert {len(group) for group in explore.planner.select(state)} == {3, 4}
    texts = {decode(batch.tokens[i, : batch.length[i]]) for i in np.flatnonzero(batch.valid)}
    assert texts == {"", "no", "A", "B", "C"}


def test_rollouts_depend_on_seed_and_step_alone():
    keys = []
    for seed, step in ((0, 0), (0, 0), (0, 1), (1, 0)):
        batch, _, _, calls, _ = play(answers, seed=seed, step=step)
        keys.append([call["step_key"].tolist() for call in calls])
        assert all((call["limit"] == 8).all() for call in calls)
    assert keys[0] == keys[1] and keys[0] != keys[2] and keys[0] != keys[3]


# --- what fits ----------------------------------------------------------------------------------


def context(text, limit, status="wrong", source=None, draft=Draft.NONE, **settings):
    verdict = Verdict(status=status, score=0.0)
    row = source or dataclasses.replace(rollout(False, text=text), verdict=verdict)
    state = progress([(0, 1)])
    request = critique.Request(slot=0, n=1, source=row, draft=draft)
    return Critique(**settings)(request, state, {}, tools_for(TASK, prompt_limit=limit))


LEAST = len(f"aa:\n{critique.WRONG} {critique.AGAIN}")


def test_a_response_is_cut_from_its_end():
    for limit, kept in ((LEAST + 5, "12345"), (LEAST + 4, "1234"), (LEAST + 1, "1"), (LEAST, "")):
        found = context("12345", limit)
        assert found.kind == Kind.REFINED and text_of(found.trained) == "aa:"
        assert [turn.role for turn in found.sampled] == ["user", "assistant", "user"]
        assert found.sampled[1] == Turn(role="assistant", content=kept)
        assert len(encode_prompt(found.sampled)) <= limit


def test_where_nothing_fits_the_refinement_is_a_plain_rollout():
    found = context("12345", LEAST - 1)
    assert found.kind == Kind.PLAIN and text_of(found.sampled) == "aa:"
    assert found.sampled == found.trained  # so that the sampler's log-probs are the learner's


def test_a_long_critique_of_the_models_is_cut_after_the_response():
    response = rollout(False, text="12345")
    draft = dataclasses.replace(
        rollout(False, text="abcdefghij"), source=response, draft=True, verdict=None
    )
    whole = len(f"aa:12345\nabcdefghij {critique.AGAIN}")
    for limit, wanted in (
        (whole, "aa:12345\nabcdefghij "),
        (whole - 2, "aa:123\nabcdefghij "),
        (whole - 5, "aa:\nabcdefghij "),
        (whole - 8, "aa:\nabcdefg "),
        (whole - 15, "aa:\n "),
    ):
        found = context("", limit, source=draft, critique="self")
        assert said(found.sampled).strip() == (wanted + critique.AGAIN).replace("\n ", "\n")
        assert found.kind == Kind.REFINED
    assert context("", whole - 17, source=draft, critique="self").kind == Kind.PLAIN
    asked = context("12345", len(f"aa:12\n{critique.ASK}"), draft=Draft.ALL, critique="self")
    assert said(asked.sampled) == f"aa:12\n{critique.ASK}" and asked.trained == asked.sampled
    assert asked.kind == Kind.REFINED


def test_rows_of_refinements_that_became_plain_are_trained_as_such():
    short = dataclasses.replace(SHAPE, seeded_length=LEAST - 1)
    tools = tools_for(TASK, prompt_limit=LEAST - 1)

    def says(text, prompt, index):
        return "no" if index < 4 else "A"

    batch, _, state, _, explore = play(says, tools=tools, shape=short)
    assert {row.kind for rows in state.rollouts for row in rows} == {Kind.PLAIN}
    assert [row.index for row in explore.planner.select(state)[0]] == [0, 1, 2, 4]
    assert np.isfinite(batch.sampler_logp[3]).sum() == batch.length[3]


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"gate": "never"}, "algorithm.gate='never'; allowed: all_fail, always"),
        ({"critique": "kind"}, "algorithm.critique='kind'; allowed: verdict, verdict_and_answer"),
        ({"gamma": 0.0}, "algorithm.gamma=0.0; allowed: above 0"),
        ({"refinements": -1}, "algorithm.refinements=-1; allowed: 0 or more"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        learn_of(**settings)


@pytest.mark.parametrize("kept, group", [(0, 4), (2, 4), (1, 2), (4, 8)])
def test_k_is_less_than_n(kept, group):
    with pytest.raises(ValueError, match=f"algorithm.kept={kept}; allowed: at least 1 and less"):
        Refine(group=group, kept=kept).check(3)


def test_fewer_refinements_than_are_kept_are_refused():
    Refine(group=8, kept=3, number=3).check(3)
    with pytest.raises(ValueError, match="algorithm.refinements=2; allowed: 0 .*algorithm.kept=3"):
        Refine(group=8, kept=3, number=2).check(3)


def test_a_task_without_answers_is_refused():
    plain = tools_for(Texts(prompts=PROMPTS, answers=("A", "B", "C")))
    for kind in ("verdict", "self"):
        Critique(critique=kind).check(plain)
    refused = "algorithm.critique='verdict_and_answer'.*prompt 0; allowed: verdict, self"
    with pytest.raises(ValueError, match=refused):
        Critique(critique="verdict_and_answer").check(plain)
    some = tools_for(dataclasses.replace(TASK, answers=("A", None, "C")))
    with pytest.raises(ValueError, match="for its prompt 1;"):
        Critique(critique="verdict_and_answer").check(some)


@pytest.mark.parametrize("kind", critique.CRITIQUES)
def test_a_prompt_limit_that_no_critique_fits_is_refused(kind):
    task = dataclasses.replace(TASK, prompts=("aa:", "longer:", "cc:"))
    texts = {
        "verdict": [f"{critique.NOTHING} {critique.AGAIN}"],
        "verdict_and_answer": [f"{critique.NOTHING} {critique.RIGHT.format('B')} {critique.AGAIN}"],
        "self": [critique.ASK],
    }[kind]
    least = max(len(f"longer:\n{text}") for text in texts)
    Critique(critique=kind).check(tools_for(task, prompt_limit=least))
    with pytest.raises(ValueError, match=f"seeded_length={least - 1}; allowed: at least {least}"):
        Critique(critique=kind).check(tools_for(task, prompt_limit=least - 1))


def test_tasks_tell_their_answers(tmp_path):
    task = arithmetic.make(size=6)
    for i in range(6):
        assert task.rewards(i, f" = {gold(task, i)}").correct
    task = sums.make(size=6)
    for i in range(6):
        assert task.rewards(i, gold(task, i)).correct
    less = without(task, np.array([0, 2]), "a test")
    assert [gold(less, i) for i in range(4)] == [gold(task, i) for i in (1, 3, 4, 5)]
    assert gold(countdown.make(size=3), 0) is None
    assert gold(without(countdown.make(size=3), np.array([0]), "a test"), 0) is None
    path = tmp_path / "data.jsonl"
    path.write_text(
        "".join(
            f'{{"question": "What is {i}+1?", "answer": "\\\\boxed{{{i + 1}}}"}}\n'
            for i in range(9)
        )
    )
    task = files.make(path=str(path))
    for i in range(len(task)):
        assert "box" not in gold(task, i)
        assert task.rewards(i, rf"\boxed{{{gold(task, i)}}}").correct


def test_a_puzzle_of_the_library_tells_its_answer():
    pytest.importorskip("reasoning_gym")
    from xrpo_jax.tasks import reasoning_gym

    task = reasoning_gym.make(size=3)
    for i in range(3):
        assert task.rewards(i, f"<answer>{gold(task, i)}</answer>").correct


def test_by_rule():
    assert by_rule("wrong", None) == critique.WRONG != critique.NOTHING == by_rule("unparsed", None)
    assert by_rule("wrong", "7") == "That is incorrect. The correct answer is 7."
    assert Explore(seeder=Critique()).seeder.trains_seeded is False
