"""A step of exploration: rounds, coordinates, contexts, packing, and that switches are exact."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from fakes import END, Draw, decode, encode, graded, tools, tools_for
from tiny import policy
from tiny.tasks import letters

from xrpo_jax import mesh as meshes
from xrpo_jax import rng
from xrpo_jax.algorithms import base as algorithms
from xrpo_jax.explore import summary
from xrpo_jax.explore.collect import Explore, Shape, collect, init_ledger, pack, remember
from xrpo_jax.explore.planner import Fixed, Refill, Uncertainty
from xrpo_jax.explore.reward import Correctness, Overlong
from xrpo_jax.explore.seeding import Exemplars
from xrpo_jax.explore.values import Running
from xrpo_jax.log import Clock
from xrpo_jax.sampler import Sampler, make_draw
from xrpo_jax.sampling import Method
from xrpo_jax.types import Kind

PROMPTS = ("aa:", "bb:", "cc:", "dd:", "ee:", "ff:")
ANSWERS = ("A", "B", "C", "D", "E", "F")
TOOLS = tools(PROMPTS, ANSWERS, prompt_limit=16)
SHAPE = Shape(prompts=3, rows=24, prompt_length=4, seeded_length=16, max_new_tokens=8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InOrder:
    """Prompts 0, 1, 2, ... in every step."""

    def __call__(self, value, seed, step, count):
        return np.arange(count)


def xrpo(**seeder) -> Explore:
    def embed(texts):  # everything is near, nothing identical
        return np.full((len(texts), 1), 0.9, np.float32)

    return Explore(
        planner=Uncertainty(group=8, base=4),
        curriculum=InOrder(),
        seeder=Exemplars(embed=embed, capacity=4, **seeder),
    )


def play(explore, says, *, shape=SHAPE, ledger=None, seed=0, step=0, tools=TOOLS):
    """One step with a fake draw: batch, ledger, progress, the draw's calls."""
    draw = Draw(says=says, new=shape.max_new_tokens)
    if ledger is None:
        ledger = init_ledger(explore, len(tools.task), shape.max_new_tokens)
    batch, progress = collect(explore, tools, draw, None, ledger, shape, seed, step, Clock())
    ledger = remember(explore, ledger, progress, batch, logp_of=None)
    return batch, ledger, progress, draw.calls


def answers(prompt_text: str, prompt: int, index: int) -> str:
    """Prompt 0 never succeeds, 1 in every second rollout, 2 always."""
    right = (False, index % 2 == 0, True)[prompt % 3]
    return ANSWERS[prompt] if right else "no"


# --- rounds --------------------------------------------------------------------------------------


def test_three_rounds_with_coordinates_of_prompt_and_index():
    batch, _, progress, calls = play(xrpo(), answers, seed=3, step=5)
    assert [len(call["row"]) for call in calls] == [12, 6, 6]
    for call in calls:
        assert (call["step_key"] == np.array(rng.key(3, 5, "rollout"))).all()
        assert (call["limit"] == 8).all()
    prompt = np.concatenate([call["prompt"] for call in calls])
    index = np.concatenate([call["index"] for call in calls])
    for slot, rows in enumerate(progress.rollouts):
        # Numbered through the rounds: no coordinate is used twice, none is left out.
        assert sorted(index[prompt == slot]) == list(range(len(rows)))
        assert [row.index for row in rows] == list(range(len(rows)))
        assert [row.round for row in rows] == sorted(row.round for row in rows)
    assert len(progress.rollouts[1]) > len(progress.rollouts[2])  # uncertain, certain
    assert len(progress.rollouts[0]) > 4  # failed, but not left alone
    assert progress.total == batch.valid.sum() == 24


def test_rewards_are_the_sum_of_the_terms():
    explore = Explore(
        planner=Fixed(group=2),
        curriculum=InOrder(),
        rewards=(Correctness(right=1.0, wrong=-1.0), Overlong(cache=4)),
    )
    texts = {0: "A", 1: "12345678"}  # 2 tokens with the stop; 8 tokens, cut off
    _, _, progress, _ = play(
        explore, lambda text, prompt, index: texts[index], tools=tools(PROMPTS, "AAAAAA")
    )
    first, second = progress.rollouts[0]
    assert first.verdict.correct and first.reward == 1.0 and first.stopped
    assert second.reward == -2.0 and not second.stopped and len(second.tokens) == 8


@pytest.mark.parametrize(
    "tokens, reward", [(0, 0), (6, 0), (7, -0.25), (8, -0.5), (10, -1), (12, -1)]
)
def test_overlong_punishment_counts_tokens(tokens, reward):
    assert Overlong(cache=4)(graded(tokens=tokens)) == reward


# --- contexts and the ledger ---------------------------------------------------------------------


def test_a_step_reads_what_earlier_steps_wrote_never_its_own():
    explore = xrpo(shots=1)
    ledger = init_ledger(explore, 6, 8)
    _, after, progress, calls = play(explore, answers, ledger=ledger)
    # Prompt 2 succeeded in the base round; prompt 0, which failed, must not see it in this step.
    assert {row.kind for rows in progress.rollouts for row in rows} == {Kind.PLAIN}
    assert {text for call in calls for text in call["prompts"]} == {"aa:", "bb:", "cc:"}
    assert (ledger["seeder"]["prompt"] == -1).all()
    assert sorted(after["seeder"]["prompt"]) == [-1, -1, 1, 2]

    _, last, progress, calls = play(explore, answers, ledger=after, step=1)
    kinds = [{row.kind for row in rows} for rows in progress.rollouts]
    assert kinds == [{Kind.PLAIN, Kind.SEEDED}, {Kind.PLAIN}, {Kind.PLAIN}]
    assert calls[0]["prompts"] == ["aa:", "bb:", "cc:"]
    assert calls[1]["prompts"][0] == "bb:B\naa:"  # the equally near one with the lower place
    assert {row.kind for row in progress.rollouts[0][:4]} == {Kind.PLAIN}
    assert {row.kind for row in progress.rollouts[0][4:]} == {Kind.SEEDED}
    assert sorted(last["seeder"]["step"]) == [-1, -1, 1, 1]


@pytest.mark.parametrize("loss_context", ["generation", "plain"])
def test_the_learner_sees_the_trained_context(loss_context):
    explore = xrpo(shots=1, loss_context=loss_context)
    _, ledger, _, _ = play(explore, answers)
    batch, _, progress, _ = play(explore, answers, ledger=ledger, step=1)
    (seeded,) = np.nonzero(batch.kind == Kind.SEEDED)
    assert len(seeded) == len(progress.rollouts[0]) - 4
    shown = "bb:B\naa:" if loss_context == "generation" else "aa:"
    for i in seeded:
        assert decode(batch.prompt[i, : batch.prompt_length[i]]) == shown
        assert decode(batch.tokens[i, : batch.length[i]]) == "no"
        assert batch.mask[i].sum() == batch.length[i] == 3
        # Log-probs under another context say nothing of this one.
        seen = np.isfinite(batch.sampler_logp[i]).sum()
        assert seen == (3 if loss_context == "generation" else 0)
    (plain,) = np.nonzero((batch.kind == Kind.PLAIN) & (batch.valid > 0))
    assert np.isfinite(batch.sampler_logp[plain]).sum() == batch.mask[plain].sum()


def test_plain_and_seeded_rollouts_of_a_prompt_are_one_group():
    def rescued(text, prompt, index):
        return ANSWERS[prompt] if prompt or "\n" in text else "no"

    explore = xrpo(shots=1)
    _, ledger, _, _ = play(explore, rescued)
    batch, _, _, _ = play(explore, rescued, ledger=ledger, step=1)
    first = batch.group == 0
    assert set(batch.kind[first & (batch.valid > 0)]) == {Kind.PLAIN, Kind.SEEDED}
    seeded = batch.kind == Kind.SEEDED
    assert batch.correct[seeded].all() and not batch.correct[first & ~seeded].any()


# --- packing -------------------------------------------------------------------------------------


def test_a_row_is_a_prompt_and_a_completion():
    explore = Explore(planner=Fixed(group=2), curriculum=InOrder())
    says = {0: "A", 1: "wrong answer"}
    batch, _, progress, _ = play(explore, lambda text, prompt, index: says[index])
    assert batch.prompt.shape == (24, 16) and batch.tokens.shape == batch.mask.shape == (24, 8)
    assert batch.prompt[0, :3].tolist() == encode("aa:") and not batch.prompt[0, 3:].any()
    assert batch.prompt_length[:6].tolist() == [3] * 6
    assert batch.tokens[0].tolist() == [*encode("A"), END] + [0] * 6
    assert batch.length[0] == 2 and batch.mask[0].tolist() == [1] * 2 + [0] * 6
    assert batch.stopped[0] == 1 and batch.correct[0] == 1 and batch.reward[0] == 1
    # Cut off at the limit: no stop token, every token is trained on.
    assert decode(batch.tokens[1, : batch.length[1]]) == "wrong an"
    assert batch.mask[1].sum() == 8 and batch.stopped[1] == 0 and END not in batch.tokens[1]
    np.testing.assert_allclose(batch.sampler_logp[1], -0.1 * np.arange(1, 9), rtol=1e-6)
    assert np.isnan(batch.sampler_logp[0, 2:]).all()
    assert batch.group[:6].tolist() == [0, 0, 1, 1, 2, 2]
    # Six rollouts in a step of 24 rows: the rest is padding that no part may count.
    assert batch.valid.tolist() == [1] * 6 + [0] * 18
    assert not batch.mask[6:].any() and not batch.length[6:].any() and not batch.old_logp.any()


def test_rows_are_in_slot_and_index_order_whatever_round_drew_them():
    batch, _, progress, _ = play(xrpo(), answers)
    counts = [len(rows) for rows in progress.rollouts]
    assert batch.group.tolist() == np.repeat(np.arange(3), counts).tolist()
    expected = [row.text for rows in progress.rollouts for row in rows]
    found = [
        decode(tokens[:length]) for tokens, length in zip(batch.tokens, batch.length, strict=True)
    ]
    assert found == expected


def test_every_step_has_the_same_shapes():
    shapes = set()
    for step in range(3):
        draws = np.random.default_rng(step)
        batch, _, _, _ = play(
            xrpo(), lambda text, prompt, index, draws=draws: draws.choice(["A", "B", "xyz"])
        )
        shapes.add(tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(batch)))
    assert len(shapes) == 1


def test_more_rollouts_than_rows_is_an_error():
    small = dataclasses.replace(SHAPE, rows=5)
    with pytest.raises(ValueError, match="6 rollouts; the step has 5 rows"):
        play(Explore(planner=Fixed(group=2), curriculum=InOrder()), answers, shape=small)


# --- DAPO's refill -------------------------------------------------------------------------------

REFILL = Explore(planner=Refill(group=4, bound=2), curriculum=InOrder())


def test_refill_packs_mixed_groups_alone():
    mixed = {1, 3, 4}  # 0 and 2 fail; two groups are missing after the first round

    def says(text, prompt, index):
        return ANSWERS[prompt] if prompt in mixed and index == 1 else "no"

    batch, _, progress, calls = play(REFILL, says)
    assert [sorted(set(call["prompt"])) for call in calls] == [[0, 1, 2], [3, 4]]
    assert progress.total == 20 and batch.valid.sum() == 12
    assert batch.group[:12].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert decode(batch.prompt[4, :3]) == "dd:"
    assert batch.correct.sum() == 3


def test_refill_at_its_bound_trains_on_what_there_is():
    batch, _, progress, calls = play(
        REFILL, lambda text, prompt, index: "B" if prompt == 1 and index == 1 else "no"
    )
    assert len(calls) == 2 and progress.total == 20
    assert batch.valid.sum() == 4 and batch.valid[:4].all() and not batch.mask[4:].any()


def test_refill_with_nothing_mixed_gives_a_batch_of_padding():
    batch, _, _, _ = play(REFILL, lambda text, prompt, index: "no")
    assert not batch.valid.any() and not batch.mask.any()


# --- numbers for the log -------------------------------------------------------------------------


def test_summary_counts_what_happened():
    explore = xrpo(shots=1)
    _, ledger, _, _ = play(explore, answers)
    _, ledger, progress, _ = play(explore, answers, ledger=ledger, step=1)
    found = summary.summarise(explore, progress, ledger, TOOLS.task, progress.rollouts)
    rows = [row for rows in progress.rollouts for row in rows]
    seeded = [row for row in rows if row.kind == Kind.SEEDED]
    assert found["rollouts"] == 24 and found["rounds"] == 3 and found["groups"] == 3
    assert found["seeded"] == len(seeded) / 24 and found["seeded_accuracy"] == 0
    assert found["corpus"] == 2 and found["zero_variance"] == pytest.approx(2 / 3)
    assert sum(n * count for n, count in found["allocation"].items()) == 24
    first = [row.verdict.correct for row in rows if row.round == 0]
    assert found["accuracy"] == found["accuracy/only"] == np.mean(first)
    assert found["truncated"] == 0
    assert found["verdicts/correct"] + found["verdicts/wrong"] == 24
    records = summary.records(progress, TOOLS.task)
    assert len(records) == 24 and records[-1]["text"] == "C"
    assert {record["kind"] for record in records} == {"plain", "seeded"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fragile(type(TOOLS.task)):
    """Its verifier raises on the answer "boom"."""

    def rewards(self, i, completion):
        if completion == "boom":
            raise RuntimeError("verifier bug")
        return super().rewards(i, completion)


def test_a_verifier_that_fails_is_not_a_wrong_answer():
    tools_ = tools_for(Fragile(prompts=PROMPTS, answers=ANSWERS), 16)

    def says(text, prompt, index):  # 0: nothing could be graded; 1: one of eight; 2: all right
        return "boom" if prompt == 0 or (prompt == 1 and index == 0) else ANSWERS[prompt]

    explore = xrpo()
    batch, ledger, progress, _ = play(explore, says, tools=tools_)
    assert np.isnan(batch.reward[batch.group == 0]).all()
    assert np.isnan(batch.reward[batch.group == 1]).sum() == 1
    assert not progress.failed(0)  # nothing is known of it, so it does not trigger seeding
    assert not progress.failed(1) and len(progress.scores(1)) == len(progress.rollouts[1]) - 1
    assert not (batch.kind == Kind.SEEDED).any()
    found = summary.summarise(explore, progress, ledger, tools_.task, progress.rollouts)
    assert found["reward"] == found["accuracy"] == 1.0
    assert found["verdicts/crashed"] == 1 + len(progress.rollouts[0])
    records = summary.records(progress, TOOLS.task)
    json.dumps(records, allow_nan=False)
    assert "verifier bug" in records[0]["reason"]


def test_running_values_follow_what_each_prompt_achieved():
    explore = Explore(planner=Fixed(group=4), curriculum=InOrder(), values=Running(keep=0.75))
    _, first, _, _ = play(explore, answers)
    assert first["values"]["mean"].tolist() == [0.375, 0.5, 0.625, 0.5, 0.5, 0.5]
    _, second, _, _ = play(explore, lambda text, prompt, index: ANSWERS[prompt], ledger=first)
    assert second["values"]["mean"][:3].tolist() == [0.53125, 0.625, 0.71875]
    assert first["values"]["mean"][0] == 0.375  # the earlier ledger is left as it was
    assert explore.values.read(second["values"], 6)[1] == 0.625


# --- with the real sampler -----------------------------------------------------------------------

REAL_SHAPE = Shape(prompts=4, rows=32, prompt_length=6, seeded_length=6, max_new_tokens=5)
REAL_TOOLS = tools_for(letters.make(), 6, policy.encode_prompt, policy.decode)


@pytest.fixture(scope="module")
def real_draw():
    sampler = Sampler(
        model=policy.MODEL,
        method=Method(),
        dtype="float32",
        prompts=4,
        slots=12,
        lengths=(6,),
        max_new_tokens=5,
        stop_ids=policy.MODEL.eos_token_ids,
    )
    mesh = meshes.make(1)
    params = jax.device_put(policy.weights(), meshes.everywhere(mesh))
    draw = make_draw(sampler, mesh)
    return lambda _, *rest, **more: draw(params, *rest, **more)


@pytest.mark.parametrize("pair", [("xrpo", "gspo"), ("xrpo_token", "grpo")])
def test_xrpo_without_its_mechanisms_is_its_base_to_the_bit(real_draw, pair):
    budget = algorithms.Budget(group=8, max_new_tokens=5)
    off = {"planner": False, "seeding": False, "sharpening": False}
    bare, plain = algorithms.make(pair[0], budget, **off), algorithms.make(pair[1], budget)
    assert bare.learn == plain.learn
    for step in range(2):
        batches = []
        for algorithm in (bare, plain):
            explore = algorithm.explore
            ledger = init_ledger(explore, len(REAL_TOOLS.task), 5)
            batch, progress = collect(
                explore, REAL_TOOLS, real_draw, None, ledger, REAL_SHAPE, 1, step, Clock()
            )
            batches.append(batch)
        assert max(row.round for rows in progress.rollouts for row in rows) == 0
        for one, other in zip(*map(jax.tree.leaves, batches), strict=True):
            np.testing.assert_array_equal(one, other)
            assert one.dtype == other.dtype
        assert 0 < batches[0].correct.sum() < 32 and batches[0].valid.all()


def test_the_rollouts_of_a_prompt_are_those_of_the_baseline_however_many_it_gets(real_draw):
    # The planner decides how many rollouts, never which: a prompt's first four are shared.
    budget = algorithms.Budget(group=8, max_new_tokens=5)
    drawn = []
    for algorithm in (
        algorithms.make("xrpo", budget, seeding=False),
        algorithms.make("gspo", budget),
    ):
        ledger = init_ledger(algorithm.explore, len(REAL_TOOLS.task), 5)
        _, progress = collect(
            algorithm.explore, REAL_TOOLS, real_draw, None, ledger, REAL_SHAPE, 1, 0, Clock()
        )
        drawn.append([[row.tokens.tolist() for row in rows] for rows in progress.rollouts])
    counts = [len(rows) for rows in drawn[0]]
    assert len(set(counts)) > 1 and sum(counts) == 32
    for one, other in zip(*drawn, strict=True):
        both = min(len(one), len(other))
        assert one[:both] == other[:both]


def test_pack_of_no_slots_is_padding():
    explore = xrpo()
    _, _, progress, _ = play(explore, answers)
    assert not pack(progress, [], SHAPE).valid.any()


def test_accuracy_is_of_the_first_round_with_answers():
    """Later rounds go where the planner sends them, so they would not compare."""
    explore = xrpo()

    def says(text, prompt, index):  # four rollouts are drawn in the base round
        return ANSWERS[prompt] if index >= 4 else "no"

    _, ledger, progress, _ = play(explore, says)
    found = summary.summarise(explore, progress, ledger, TOOLS.task, progress.rollouts)
    assert found["accuracy"] == 0 and found["reward"] > 0
