"""The parts of the learn half against literals of the specification and the NumPy oracles.

Losses are compared on one padded shape, so that an algorithm compiles once for all of its tests.
"""

import dataclasses
import functools
import json
import math
import pathlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from fakes import graded

from xrpo_jax.algorithms import base
from xrpo_jax.algorithms.treepo import Whitened
from xrpo_jax.arrays import Batch, TokenStats
from xrpo_jax.evaluate import pass_at_k
from xrpo_jax.explore.reward import Overlong
from xrpo_jax.learn import advantage, clip, keep, penalty, ratio, shaping, weight
from xrpo_jax.learn.groups import Groups
from xrpo_jax.learn.objective import Learn, loss, score
from xrpo_jax.types import Kind

NAMES = base.names()
BUDGET = base.Budget(group=4, max_new_tokens=7)
SLOTS, COLUMNS, GROUPS = 16, 16, 5
RAGGED = oracles.ragged()
# Any finite number may lie under the mask, and what the policy computes there may be NaN.
GARBAGE = 1e4


# --- helpers ------------------------------------------------------------------------------------


def learn_of(name, **settings):
    return base.make(name, BUDGET, **settings).learn


def oracle_of(name, **settings):
    """The oracle's loss of an algorithm, a function of Rows."""
    if name in ("drgrpo", "critique_grpo"):
        settings["limit"] = BUDGET.max_new_tokens
    return partial(oracles.LOSSES[name], **settings)


def make_batch(rows, slots=SLOTS, columns=COLUMNS, *, order=None, shift=0, garbage=0.0):
    """`rows` (Rows) as (TokenStats f32[slots,columns], Batch).

    Row i lies in slot `order[i]`, `shift` columns to the right; the rest is padding that holds
    `garbage`.
    """
    order = np.arange(rows.number) if order is None else np.asarray(order)
    width = rows.mask.shape[1]

    def wide(values, fill):
        if values is None:
            return None
        out = np.full((slots, columns), fill, np.float32)
        inside = out[:, shift : shift + width]
        inside[order] = np.where(rows.mask > 0, values, fill)
        return out

    def flat(values, fill, dtype=np.float32):
        out = np.full(slots, fill, dtype)
        out[order] = values
        return out

    def tall(values):
        out = np.zeros((slots, values.shape[1]), np.int32)
        out[order] = values
        return out

    batch = Batch(
        prompt=None,
        prompt_length=None,
        tokens=np.zeros((slots, columns), np.int32),
        length=flat(columns, 0, np.int32),
        mask=wide(rows.mask, 0.0),
        old_logp=wide(rows.old, garbage),
        reward=flat(rows.reward, garbage),
        correct=flat(rows.correct, 0.0),
        group=flat(rows.group, 0, np.int32),
        kind=flat(Kind.PLAIN if rows.kind is None else rows.kind, 0, np.int32),
        stopped=flat(1.0, 0.0),
        valid=flat(1.0, 0.0),
        baseline=None if rows.baseline is None else flat(rows.baseline, garbage),
        ancestors=None if rows.ancestors is None else tall(rows.ancestors),
        ref_logp=wide(rows.reference, garbage),
        old_entropy=wide(rows.old_entropy, garbage),
        ref_entropy=wide(rows.reference_entropy, garbage),
    )
    entropy = np.zeros_like(rows.now) if rows.entropy is None else rows.entropy
    entropy = wide(entropy, np.nan if garbage else 0.0)
    return TokenStats(logp=wide(rows.now, np.nan if garbage else 0.0), entropy=entropy), batch


def groups_of(batch, number=GROUPS):
    return Groups(jnp.asarray(batch.group), jnp.asarray(batch.valid), number)


def score_of(learn, batch):
    """Scores of whole groups. Not jitted: operations of one shape are shared by all algorithms."""
    batch = jax.tree.map(jnp.asarray, batch)
    return score(learn, batch, groups_of(batch))


def loss_of(learn, stats, batch, scores):
    """(loss, sums for the log), gradient by the log-probs."""
    stats, batch, scores = jax.tree.map(jnp.asarray, (stats, batch, scores))

    def by_logp(logp):
        return loss(learn, stats.replace(logp=logp), batch, scores)

    return jax.value_and_grad(by_logp, has_aux=True)(stats.logp)


@functools.cache
def compiled_loss(ratio, clip, penalties):
    """`loss_of` for the parts that the loss reads, compiled once for all that have them."""
    return jax.jit(partial(loss_of, Learn(ratio=ratio, clip=clip, penalties=penalties)))


def run(learn, stats, batch):
    """Loss, gradient by the log-probs, sums for the log."""
    (value, sums), gradient = loss_of(learn, stats, batch, score_of(learn, batch))
    return float(value), np.asarray(gradient), {name: float(sums[name]) for name in sums}


def by_logits(learn, logits, tokens, rows):
    """Loss and gradient by the logits [n,s,v] of a policy that has some for every token."""
    n, s = tokens.shape
    _, batch = make_batch(rows)
    scores = score_of(learn, batch)
    cut = (slice(n), slice(s))
    batch, scores = jax.tree.map(lambda leaf: jnp.asarray(leaf)[cut[: leaf.ndim]], (batch, scores))

    def total(logits):
        logp = jax.nn.log_softmax(logits)
        drawn = jnp.take_along_axis(logp, jnp.asarray(tokens)[..., None], axis=-1)[..., 0]
        stats = TokenStats(logp=drawn, entropy=-jnp.sum(jnp.exp(logp) * logp, axis=-1))
        return loss(learn, stats, batch, scores)[0]

    return jax.value_and_grad(total)(jnp.asarray(logits, jnp.float32))


def close(actual, wanted, atol=2e-6, rtol=0.0):
    np.testing.assert_allclose(np.asarray(actual), wanted, atol=atol, rtol=rtol)


def padded(values):
    """`values` f[n] or [n,s] with zero rows and columns up to `SLOTS` and `COLUMNS`."""
    values = np.asarray(values)
    sizes = (SLOTS, COLUMNS)[: values.ndim]
    more = [(0, max(size - have, 0)) for size, have in zip(sizes, values.shape, strict=True)]
    return jnp.asarray(np.pad(values, more))


def small_batch(mask, **fields):
    """A batch of one group, padded, from its mask and what else matters."""
    mask = np.asarray(mask, np.float32)
    ones = np.ones(len(mask), np.float32)
    known = {
        "prompt": None,
        "prompt_length": None,
        "tokens": None,
        "length": None,
        "mask": mask,
        "old_logp": np.zeros_like(mask),
        "reward": ones,
        "correct": ones,
        "group": np.zeros(len(mask), np.int32),
        "kind": None,
        "stopped": ones,
        "valid": ones,
    }
    return Batch(**jax.tree.map(padded, known | fields))


def advantages(part, reward, group=None):
    """The advantage f32[n] of a part for rewards alone."""
    reward = np.asarray(reward, np.float32)
    group = np.zeros(len(reward), np.int32) if group is None else np.asarray(group, np.int32)
    batch = small_batch(np.ones((len(reward), 1)), group=group, reward=reward)
    groups = groups_of(batch, max(GROUPS, int(group.max()) + 1))
    return np.asarray(part(batch, groups))[: len(reward)]


# --- golden numbers -----------------------------------------------------------------------------

TOY = oracles.toy()
GOLDEN_LOSSES = [
    ("grpo", {}, -0.02821046),
    ("dapo", {}, 0.16699734),
    ("drgrpo", {}, 0.06342892),
    ("gspo", {}, 0.00413556),
    ("gspo", {"clip_low": 0.2, "clip_high": 0.2}, -0.06949718),
    ("gspo_token", {}, 0.00413556),
    ("cispo", {"cap": 1.2}, -0.04058673),
    ("grpo_entropy", {"coefficient": 0.0}, -0.02821046),
    ("tepo", {"beta": 0.0, "token_level": False}, 0.00413556),
    ("reco", {"response": False, "token": False}, -0.02821046),
]


@pytest.mark.parametrize("name, settings, golden", GOLDEN_LOSSES)
def test_golden_loss(name, settings, golden):
    learn = base.make(name, base.Budget(group=4, max_new_tokens=4), **settings).learn
    assert run(learn, *make_batch(TOY))[0] == pytest.approx(golden, abs=5e-8)
    settings = {key.removeprefix("clip_"): value for key, value in settings.items()}
    settings |= {"limit": 4} if name == "drgrpo" else {}
    assert oracles.LOSSES[name](TOY, **settings) == pytest.approx(golden, abs=1e-8)


def test_golden_advantages():
    close(advantages(advantage.GroupZ(), TOY.reward), 0.866023904 * np.array([1, -1, -1, 1]), 1e-7)
    close(advantages(advantage.GroupMean(), TOY.reward), [0.5, -0.5, -0.5, 0.5], 0)
    close(advantages(advantage.LeaveOneOut(), TOY.reward), np.array([2, -2, -2, 2]) / 3, 1e-7)


@pytest.mark.parametrize("part", [ratio.Sequence(), ratio.SequenceToken()])
def test_golden_sequence_ratios(part):
    stats, batch = jax.tree.map(jnp.asarray, make_batch(TOY))
    ratios = np.exp(part(stats, batch))
    golden = [1.06893911, 0.92774349, 1.02020134, 1.22140276]
    for row, value in enumerate(golden):
        close(ratios[row][batch.mask[row] > 0], value, 2e-7)
    close(oracles.sequence_ratio(TOY), golden, 5e-9)


def test_golden_novelty():
    """xrpo.md section 3; the level of a row is the mean over its tokens, whatever their number."""
    level = np.array([-0.30, -0.45, -0.35, -0.90, -0.40])
    mask = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0], [1, 1, 1]], np.float64)
    spread = np.array([[0.1, -0.1, 9], [0, 9, 9], [0.2, -0.1, -0.1], [-0.3, 0.3, 9], [0, 0, 0]])
    reward = np.array([1.0, 1, 0, 1, 0])
    old = level[:, None] + spread
    rows = oracles.Rows(
        now=old, old=old, mask=mask, reward=reward, correct=reward == 1, group=np.zeros(5, int)
    )
    golden = [0.7303, 0.7303, -1.0954, 1.0954, -1.0954]
    _, batch = make_batch(rows)
    close(score_of(learn_of("xrpo"), batch).advantage[:5, 0], golden, 6e-5)
    plain = oracles.group_z(reward, rows.group)
    close(plain, [0.7303, 0.7303, -1.0954, 0.7303, -1.0954], 6e-5)
    close(oracles.novelty(plain, rows), golden, 6e-5)


def test_novelty_below_its_cap_and_among_correct_rows():
    """A bonus that the cap does not cut, by hand: 2.5 (1 - exp(-.05)); and the `correct` switch."""
    old = np.array([[-1.0], [-1.1], [-1.05]])
    reward = np.array([1.0, 1.0, 0.0])
    rows = oracles.Rows(
        now=old, old=old, mask=np.ones((3, 1)), reward=reward, correct=reward == 1,
        group=np.zeros(3, int),
    )  # fmt: skip
    base_advantage = 0.5773503 / (1 + 1.7320508e-6)
    bonus = 2.5 * (1 - math.exp(-0.05))
    assert bonus < 0.5 * base_advantage
    for average in ("group", "correct"):  # both means are -1.05
        _, batch = make_batch(rows)
        found = score_of(learn_of("xrpo", novelty_average=average), batch).advantage[:3, 0]
        close(found, [base_advantage, base_advantage + bonus, -2 * base_advantage], 2e-6)
    moved = dataclasses.replace(rows, old=np.array([[-1.0], [-1.1], [-0.5]]))
    _, batch = make_batch(moved)
    found = score_of(learn_of("xrpo", novelty_average="correct"), batch).advantage[1, 0]
    close(found, base_advantage + bonus, 2e-6)
    found = score_of(learn_of("xrpo"), batch).advantage[:2, 0]
    close(found, oracles.novelty(oracles.group_z(reward, moved.group), moved)[:2])


def test_soft_overlong_punishment():
    """DAPO's equation 13 in tokens, with the paper's lengths and small ones by hand."""
    paper = Overlong(cache=4096)
    for tokens, punishment in [(1, 0), (16384, 0), (18432, -0.5), (20480, -1), (30000, -1)]:
        assert paper(graded(tokens=tokens, limit=20480)) == pytest.approx(punishment)
    assert [Overlong(cache=4)(graded(tokens=tokens)) for tokens in range(5, 12)] == pytest.approx(
        [0, 0, -0.25, -0.5, -0.75, -1, -1]
    )


# --- every part against its oracle ---------------------------------------------------------------


@pytest.mark.parametrize(
    "part, oracle",
    [
        (advantage.GroupZ(), oracles.group_z),
        (advantage.GroupZ(ddof=0, eps=1e-4), partial(oracles.group_z, ddof=0, eps=1e-4)),
        (advantage.GroupMean(), oracles.group_mean),
        (advantage.LeaveOneOut(), oracles.leave_one_out),
    ],
)
def test_advantages(part, oracle):
    reward, group = RAGGED.reward, RAGGED.group
    close(advantages(part, reward, group), oracle(reward, group))


@pytest.mark.parametrize(
    "part", [advantage.GroupZ(), advantage.GroupMean(), advantage.LeaveOneOut()]
)
def test_equal_rewards_and_groups_of_one_give_exactly_zero(part):
    """Rounding of a mean of equal rewards must never become an advantage."""
    reward, group = [], []
    for value in (0.1, 0.7, 1 / 3, -0.9, 1e-6, 12345.678):
        for size in (1, 2, 3, 5, 6, 7, 9, 10, 11, 100):
            reward += [value] * size
            group += [max(group, default=-1) + 1] * size
    assert not np.any(advantages(part, reward, group))


@pytest.mark.parametrize(
    "part", [advantage.GroupZ(), advantage.GroupMean(), advantage.LeaveOneOut()]
)
def test_a_reward_that_is_not_finite_leaves_its_group(part):
    rewards = [np.nan, 1, 0, 0, np.nan, np.inf, 1]
    found = advantages(part, rewards, [0, 0, 0, 0, 1, 1, 1])
    assert found[0] == 0 and not np.any(found[4:])
    close(found[1:4], advantages(part, [1, 0, 0]), 1e-7)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators_on_a_softmax(estimator):
    """Value and gradient in expectation over tokens of the policy, summed over the vocabulary.

    k1 has the exact value and no gradient, k2 the exact gradient and a biased value, k3 the exact
    value and the gradient of KL(reference || policy).
    """
    generator = np.random.default_rng(1)
    logits, other = generator.standard_normal((2, 6))
    ids = np.arange(6)

    def expected(policy, part):
        """The expectation by tokens that were drawn, so their probabilities are constants."""
        logp, reference = jax.nn.log_softmax(policy), jax.nn.log_softmax(jnp.asarray(other))
        chance = jax.lax.stop_gradient(jnp.exp(logp))
        batch = Batch(
            prompt=None, prompt_length=None, tokens=None, length=None,
            mask=jnp.ones((1, 6)), old_logp=None, reward=None,
            correct=None, group=None, kind=None, stopped=None, valid=None,
            ref_logp=reference[ids][None],
        )  # fmt: skip
        token_loss = part(TokenStats(logp=logp[ids][None], entropy=None), batch, None)
        return jnp.sum(chance * token_loss[0])

    part = penalty.ReferenceKL(beta=1.0, estimator=penalty.ESTIMATORS[estimator])
    value, gradient = jax.jit(jax.value_and_grad(partial(expected, part=part)))(jnp.asarray(logits))
    exact = oracles.exact_kl(logits, other)

    def by_logits(divergence):
        step = 1e-6 * np.eye(6)
        return [(divergence(logits + e) - divergence(logits - e)) / 2e-6 for e in step]

    forward = by_logits(lambda policy: oracles.exact_kl(policy, other))
    backward = by_logits(lambda policy: oracles.exact_kl(other, policy))
    assert np.abs(np.subtract(forward, backward)).max() > 0.05  # the test can tell them apart
    if estimator == "k1":
        assert value == pytest.approx(exact, rel=1e-5)
        close(gradient, np.zeros(6), 1e-7)
    elif estimator == "k2":
        assert abs(value - exact) > 0.01
        close(gradient, forward)
    else:
        assert value == pytest.approx(exact, rel=1e-5)
        close(gradient, backward)


def test_k3_is_never_negative():
    d = jnp.concatenate([jnp.linspace(-3e-4, 3e-4, 20001), jnp.linspace(-25.0, 19.0, 20001)])
    assert float(jnp.min(jax.jit(penalty.k3)(d))) >= 0


def test_dual_clip_by_hand():
    """A ratio of 5 on A = -1 costs 5 under PPO and 3 under the dual clip; A = 1 is the same."""
    log_ratio = jnp.log(jnp.array([[5.0, 5.0, 0.5]]))
    adv = jnp.array([[-1.0, 1.0, -1.0]])
    objective, clipped = clip.Dual(bound=3.0)(log_ratio, adv, None, None)
    close(objective, [[-3.0, 1.2, -0.8]])
    close(clipped, [[1, 1, 1]])
    objective, clipped = clip.PPO()(log_ratio, adv, None, None)
    close(objective, [[-5.0, 1.2, -0.8]])
    close(clipped, [[0, 1, 1]])


WEIGHTS = [
    (weight.TokenMean(), oracles.token_mean),
    (weight.SequenceMean(), oracles.sequence_mean),
    (weight.ConstantLength(limit=9), partial(oracles.constant_length, limit=9)),
    (weight.PromptMean(), oracles.prompt_mean),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Given:
    """A clip part whose token loss is minus the log-prob: aggregation without a policy loss."""

    def __call__(self, log_ratio, advantage, stats, batch):
        return stats.logp, jnp.zeros_like(stats.logp)


@pytest.mark.parametrize("part, oracle", WEIGHTS)
@pytest.mark.parametrize("dropped", [(), (0, 4, 8), tuple(range(13))])
def test_aggregations(part, oracle, dropped):
    """Also where whole rows have no token of the loss, a whole prompt (row 8), or all rows."""
    mask = RAGGED.mask.copy()
    mask[list(dropped)] = 0
    rows = dataclasses.replace(RAGGED, mask=mask)
    value, gradient, _ = run(Learn(clip=Given(), weight=part), *make_batch(rows, garbage=GARBAGE))
    losses = [{t: -rows.now[i, t] for t in rows.tokens(i)} for i in range(rows.number)]
    assert value == pytest.approx(oracle(losses, rows.group), rel=1e-5)
    if not isinstance(part, weight.ConstantLength):
        total = 0.0 if len(dropped) == 13 else 1.0
        assert -gradient.sum() == pytest.approx(total, abs=1e-6)


# --- every algorithm ----------------------------------------------------------------------------

VARIANTS = [(name, {}, {}) for name in NAMES] + [
    ("grpo", {"beta": 0.04}, {"beta": 0.04}),
    ("grpo", {"beta": 0.3, "kl_estimator": "k2"}, {"beta": 0.3, "estimator": oracles.k2}),
    ("grpo", {"beta": 0.3, "kl_estimator": "k1"}, {"beta": 0.3, "estimator": oracles.k1}),
    ("grpo", {"dual_clip": 1.5}, {"bound": 1.5}),
    ("cispo", {"cap": 1.1}, {"cap": 1.1}),
    ("xrpo", {"novelty_average": "correct"}, {"average": "correct"}),
    ("xrpo_token", {"novelty_weight": 0.5, "novelty_cap": 2.0}, {"weight": 0.5, "cap": 2.0}),
    ("grpo_entropy", {"coefficient": 0.5}, {"coefficient": 0.5}),
    ("expo", {"beta": 0.5}, {"beta": 0.5}),
    (
        "expo",
        {"beta": 0.5, "beta_rule": "akl_matched_const"},
        {"beta": 0.5, "beta_rule": "akl_matched_const"},
    ),
    (
        "expo",
        {"beta": 0.5, "beta_rule": "constant", "token_mean": False},
        {"beta": 0.5, "beta_rule": "constant", "tokens": False},
    ),
    ("expo", {"beta": 0.0, "clip_high": 0.28}, {"beta": 0.0, "high": 0.28}),
    ("tepo", {"clip_low": 0.2, "clip_high": 0.28}, {"low": 0.2, "high": 0.28}),
    ("tepo", {"entropy_drop": "ref", "beta": 0.3}, {"entropy_drop": "ref", "beta": 0.3}),
    ("tepo", {"entropy_drop": "predicted"}, {"entropy_drop": "predicted"}),
    ("tepo", {"entropy_band": 0.5}, {"entropy_band": 0.5}),
    ("tepo", {"sequence_ratio": False}, {"by_sequence": False}),
    (
        "tepo",
        {"sequence_ratio": False, "token_clip_low": 0.1, "token_clip_high": 0.05},
        {"by_sequence": False, "token_low": 0.1, "token_high": 0.05},
    ),
    ("tepo", {"masked": False}, {"masked": False}),
    (
        "tepo",
        {"masked": False, "entropy_drop": "ref"},
        {"masked": False, "entropy_drop": "ref"},
    ),
    ("tepo", {"beta": 0.0}, {"beta": 0.0}),
    ("tepo", {"token_level": False}, {"token_level": False}),
    ("reco", {"clip_low": 0.1, "clip_high": 0.3}, {"low": 0.1, "high": 0.3}),
    ("reco", {"clip_mode": "ppo_on_rvar"}, {"clip_mode": "ppo_on_rvar"}),
    ("reco", {"clip_mode": "clamp_only"}, {"clip_mode": "clamp_only"}),
    ("reco", {"response_cap": 2.0}, {"cap": 2.0}),
    ("reco", {"response": False}, {"response": False}),
    ("reco", {"token": False}, {"token": False}),
    ("reco", {"token": False, "token_level": True}, {"token": False, "token_level": True}),
    ("reco", {"response": False, "token_level": True}, {"response": False, "token_level": True}),
    ("reco", {"mean_weights": True}, {"mean_weights": True}),
    ("reco", {"positive_only": True}, {"positive_only": True}),
    (
        "reco",
        {"mean_weights": True, "positive_only": True},
        {"mean_weights": True, "positive_only": True},
    ),
    ("reco", {"absolute": True}, {"absolute": True}),
    (
        "reco",
        {"absolute": True, "clip_mode": "clamp_only"},
        {"absolute": True, "clip_mode": "clamp_only"},
    ),
    ("reco", {"token_level": True}, {"token_level": True}),
    ("reco", {"beta": 0.3}, {"beta": 0.3}),
    ("critique_grpo", {"gamma": 0.5}, {"gamma": 0.5}),
    ("critique_grpo", {"clip_low": 0.1, "clip_high": 0.3}, {"low": 0.1, "high": 0.3}),
    ("spo", {"clip_low": 0.1, "clip_high": 0.3}, {"low": 0.1, "high": 0.3}),
    ("skpo", {"upstream_share": 0.2}, {"share": 0.2}),
    ("skpo", {"clip_low": 0.1, "clip_high": 0.3}, {"low": 0.1, "high": 0.3}),
    ("skpo", {"floor": 0.9, "cap": 1.1}, {"floor": 0.9, "cap": 1.1}),
    ("treepo", {"clip_low": 0.1, "clip_high": 0.3}, {"low": 0.1, "high": 0.3}),
    ("treepo", {"depth_average": "size"}, {"depth_average": "size"}),
    ("treepo", {"subgroups": False}, {"subgroups": False}),
    ("treepo", {"branching": False}, {"subgroups": False}),
    ("treepo", {"whiten": False}, {"whiten": False}),
    ("treepo", {"subgroups": False, "whiten": False}, {"subgroups": False, "whiten": False}),
]
IDS = ["-".join([name, *settings]) for name, settings, _ in VARIANTS]


@pytest.mark.parametrize("name, settings, oracle_settings", VARIANTS, ids=IDS)
def test_loss_and_gradient_are_the_oracles(name, settings, oracle_settings):
    oracle = oracle_of(name, **oracle_settings)
    stats, batch = make_batch(RAGGED)
    value, gradient, sums = run(learn_of(name, **settings), stats, batch)
    assert value == pytest.approx(oracle(RAGGED), rel=1e-5, abs=1e-6)
    wanted = np.zeros((SLOTS, COLUMNS))
    wanted[: RAGGED.number, : RAGGED.mask.shape[1]] = oracles.gradient(oracle, RAGGED)
    assert np.abs(wanted).max() > 0.01
    close(gradient, wanted)
    assert sums["tokens"] == RAGGED.mask.sum()


@pytest.mark.parametrize("name", NAMES)
def test_micro_batches_add_up(name):
    """Loss and gradient of 1 x 16, 2 x 8, 4 x 4 and 16 x 1 rows; scores are those of the whole."""
    learn = learn_of(name)
    stats, batch = make_batch(RAGGED, order=np.random.default_rng(2).permutation(SLOTS)[:13])
    scores = score_of(learn, batch)
    compiled = compiled_loss(learn.ratio, learn.clip, learn.penalties)
    (whole, _), gradient = compiled(stats, batch, scores)
    for size in (8, 4, 1):
        total, parts = 0.0, np.zeros_like(gradient)
        for start in range(0, SLOTS, size):
            chosen = np.arange(start, start + size)

            def take(leaf, chosen=chosen):
                out = np.zeros_like(leaf)
                out[: len(chosen)] = np.asarray(leaf)[chosen]
                return out

            part = jax.tree.map(take, (stats, batch, scores))
            (value, _), piece = compiled(*part)
            total += float(value)
            parts[chosen] += np.asarray(piece)[:size]
        assert total == pytest.approx(float(whole), abs=1e-6)
        close(parts, gradient, 1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_order_and_padding_change_nothing(name):
    """Rows in another order, columns padded left and right, garbage under every mask."""
    learn = learn_of(name)
    value, gradient, sums = run(learn, *make_batch(RAGGED))
    order = np.random.default_rng(3).permutation(SLOTS)[: RAGGED.number]
    for shift, garbage in [(0, 0.0), (4, 0.0), (2, GARBAGE)]:
        stats, batch = make_batch(RAGGED, order=order, shift=shift, garbage=garbage)
        moved, by_logp, moved_sums = run(learn, stats, batch)
        assert moved == pytest.approx(value, abs=1e-6)
        back = by_logp[order][:, shift : shift + RAGGED.mask.shape[1]]
        close(back, gradient[: RAGGED.number, : RAGGED.mask.shape[1]], 1e-7)
        assert np.count_nonzero(by_logp) == np.count_nonzero(gradient)
        for key in sums:
            assert moved_sums[key] == pytest.approx(sums[key], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_all_masked_is_zero(name):
    """With NaN below the mask, and with no real row at all."""
    masked = dataclasses.replace(RAGGED, mask=np.zeros_like(RAGGED.mask))
    stats, batch = make_batch(masked, garbage=GARBAGE)
    for valid in (batch.valid, np.zeros_like(batch.valid)):
        batch = batch.replace(valid=valid)
        scores = score_of(learn_of(name), batch)
        assert not np.any(scores.weight)
        assert np.all(np.isfinite(scores.advantage))
        value, gradient, sums = run(learn_of(name), stats, batch)
        assert value == 0 and not np.any(gradient)
        assert all(value == 0 for value in sums.values())


@pytest.mark.parametrize("name", NAMES)
def test_scores_are_constants(name):
    """Advantages read old log-probs (novelty) and rewards, and pass no gradient to either."""

    def total(old_logp, reward, batch):
        scores = score(
            learn_of(name), batch.replace(old_logp=old_logp, reward=reward), groups_of(batch)
        )
        return jnp.sum(scores.advantage * scores.weight)

    _, batch = make_batch(RAGGED)
    batch = jax.tree.map(jnp.asarray, batch)
    by_old, by_reward = jax.grad(total, argnums=(0, 1))(batch.old_logp, batch.reward, batch)
    assert not np.any(by_old) and not np.any(by_reward)


@pytest.mark.parametrize("name", NAMES)
def test_extreme_log_ratios_stay_finite(name):
    """Differences of +-1000 on single tokens and on whole rows, whatever the advantage's sign."""
    for difference in (1e3, -1e3):
        single = RAGGED.now.copy()
        single[np.arange(RAGGED.number), RAGGED.mask.argmax(axis=1)] += difference
        for now in (single, RAGGED.now + difference * RAGGED.mask):
            rows = dataclasses.replace(RAGGED, now=now)
            value, gradient, sums = run(learn_of(name), *make_batch(rows))
            assert math.isfinite(value) and np.all(np.isfinite(gradient))
            assert all(np.isfinite(value) for value in sums.values())
        # An old policy that gave a whole row next to nothing is novel without bounds.
        old = RAGGED.old.copy()
        old[3] += difference
        _, batch = make_batch(dataclasses.replace(RAGGED, old=old))
        scores = score_of(learn_of(name), batch)
        assert np.all(np.isfinite(scores.advantage))
        if name == "xrpo":
            zero = score_of(learn_of(name, novelty_weight=0.0), batch)
            np.testing.assert_array_equal(
                zero.advantage, score_of(learn_of("gspo"), batch).advantage
            )


def test_sequence_token_has_the_value_of_sequence():
    """To the bit also where the token's own difference is large beside the row's."""
    stats, batch = make_batch(RAGGED)
    far = np.where(batch.mask > 0, stats.logp + 40 * (np.arange(COLUMNS) % 2) - 20, 0.0)
    stats = stats.replace(logp=jnp.asarray(far))
    batch = jax.tree.map(jnp.asarray, batch)
    one, other = jax.jit(lambda s, b: (ratio.Sequence()(s, b), ratio.SequenceToken()(s, b)))(
        stats, batch
    )
    np.testing.assert_array_equal(
        np.where(batch.mask > 0, one, 0), np.where(batch.mask > 0, other, 0)
    )


# --- switches that are off ----------------------------------------------------------------------


def same_bits(one, other):
    """Jitted, as the learner is: a compiler might join what single operations keep apart."""
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(left, right)


def test_beta_zero_is_no_kl():
    assert learn_of("grpo", beta=0.0) == learn_of("grpo")
    assert not learn_of("grpo").needs_reference and learn_of("grpo", beta=0.1).needs_reference
    plain = learn_of("grpo")
    zero = dataclasses.replace(plain, penalties=(penalty.ReferenceKL(beta=0.0),))
    stats, batch = make_batch(RAGGED)
    scores = score_of(plain, batch)
    same_bits(*(jax.jit(partial(loss_of, learn))(stats, batch, scores) for learn in (plain, zero)))


@pytest.mark.parametrize("name, under", [("xrpo", "gspo"), ("xrpo_token", "grpo")])
def test_xrpo_without_its_mechanisms_is_its_base(name, under):
    off = base.make(name, BUDGET, planner=False, seeding=False, sharpening=False).learn
    assert off == learn_of(under)
    zero = learn_of(name, novelty_weight=0.0)
    assert dataclasses.replace(zero, shaping=()) == learn_of(under)  # they share the loss
    _, batch = make_batch(RAGGED)
    same_bits(*(jax.jit(partial(score_of, learn))(batch) for learn in (zero, off)))
    sharpened = score_of(learn_of(name), batch).advantage
    assert not np.array_equal(sharpened, score_of(off, batch).advantage)


def test_novelty_refuses_an_unknown_average():
    with pytest.raises(ValueError, match="average='prompt'; allowed: group, correct"):
        shaping.Novelty(average="prompt")


# --- rows that are left out ---------------------------------------------------------------------


def kept_rows(part):
    """A batch with truncated and seeded rows, and which of them the part should keep, by hand."""
    stats, batch = make_batch(dataclasses.replace(RAGGED, kind=None))
    kept = np.ones(RAGGED.number, bool)
    if isinstance(part, keep.Stopped):
        kept[[1, 5, 8, 9]] = False
        batch.stopped[[1, 5, 8, 9]] = 0
        return stats, batch, RAGGED, kept
    if isinstance(part, keep.Mixed):
        kept[5:9] = False  # the equal rewards and the group of one
        return stats, batch, RAGGED, kept
    # Group 0: only seeded row 3 is correct, so its plain failures 1, 2, 4 go, and 0 as well.
    # Group 3: plain row 10 is correct, so its plain failure 9 stays although seeded row 12 is too.
    correct = np.isin(np.arange(RAGGED.number), [3, 8, 10, 12])
    batch.correct[: RAGGED.number] = correct
    batch.kind[[3, 4, 12]] = Kind.SEEDED
    kept[[0, 1, 2]] = False  # row 4 failed too, but it is seeded
    return stats, batch, dataclasses.replace(RAGGED, correct=correct), kept


@pytest.mark.parametrize(
    "part",
    [keep.Stopped(), keep.Mixed(), keep.WithoutPlainFailures()],
    ids=lambda p: type(p).__name__,
)
@pytest.mark.parametrize("name", ["grpo", "dapo", "drgrpo", "xrpo"])
def test_rows_left_out_leave_numerator_and_denominator(part, name):
    """They still count in their group's statistics."""
    stats, batch, rows, kept = kept_rows(part)
    assert 0 < kept.sum() < rows.number
    learn = dataclasses.replace(learn_of(name), keep=(part,))
    value, gradient, _ = run(learn, stats, batch)
    wanted = oracle_of(name)(dataclasses.replace(rows, kept=kept))
    assert value == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    assert abs(wanted - oracle_of(name)(rows)) > 1e-4
    assert not np.any(gradient[: rows.number][~kept])
    scores = score_of(learn, batch)
    if not isinstance(learn.weight, weight.ConstantLength):
        assert float(np.sum(scores.weight)) == pytest.approx(1.0, abs=1e-6)
    whole = score_of(learn_of(name), batch).advantage
    np.testing.assert_array_equal(scores.advantage, whole)


def test_keeping_switches_compose():
    learn = base.keeping(
        base.make("xrpo", BUDGET, mask_plain_failures=True), stopped=True, mixed=True
    )
    assert learn.learn.keep == (keep.WithoutPlainFailures(), keep.Stopped(), keep.Mixed())
    same = base.keeping(base.make("dapo", BUDGET), stopped=False, mixed=False)
    assert same == base.make("dapo", BUDGET)


# --- faults met in public -----------------------------------------------------------------------

CASES = pathlib.Path(__file__).parents[2] / "shared" / "cases" / "numerics.jsonl"
ELSEWHERE = {  # operations that are tested in another file, or that this project does not have
    "logprob": "test_policy",
    "entropy": "test_policy",
    "onpolicy_ratio": "test_policy",
    "check_rewards": "a verdict always has a score",
    "combine_rewards": "reward terms are added on the host, a verdict always has a score",
    "scatter_reward": "advantages belong to rows",
    "is_weight": "no correction for the sampler yet",
}
CONVENTIONS = {  # cases whose expected answer is a convention that differs here
    "nu-009": "a reward that is not finite leaves its group; verdicts are checked on the host",
    "nu-013": "an empty batch has loss 0 and is counted",
    "nu-024": "a NaN log-prob makes the update non-finite, which is skipped and counted",
    "nu-035": "a group of one has advantage 0 (shared_parts.md)",
    "nu-045": "the setting is called overlong_cache",
    "nu-070": "k3 bounds its exponent, not its value",
    "nu-077": "a batch without a mixed group has loss 0 and is counted",
    "nu-079": "lengths are reported by explore/summary.py",
    "nu-080": "a group of one has advantage 0 (shared_parts.md)",
    "nu-104": "overlong_cache 0 means a fifth of the limit",
}


def read_cases():
    if not CASES.exists():
        return []
    rows = [json.loads(line) for line in CASES.read_text().splitlines()]
    here = [row for row in rows if row["input"]["op"] not in ELSEWHERE]
    return [row for row in here if row["id"] not in CONVENTIONS]


def numbers(value, dtype=np.float64):
    """A nested list in which NaN and infinities are words."""
    return np.array(value, dtype=object).astype(dtype)


def token_losses(learn, logp, batch, adv=None):
    """Loss and gradient of a small batch, with given advantages or its own."""
    scores = score_of(learn, batch)
    if adv is not None:
        scores = scores.replace(advantage=padded(adv).astype(jnp.float32))
    logp = padded(logp).astype(jnp.float32)
    stats = TokenStats(logp=logp, entropy=jnp.zeros_like(logp))
    (value, _), gradient = loss_of(learn, stats, batch, scores)
    return float(value), np.asarray(gradient)


def group_advantage_case(args):
    if "rewards_spec" in args:
        counts = args["rewards_spec"]
        reward = np.repeat(np.float32([1, 0]), [counts["ones"], counts["zeros"]])
    else:
        reward = numbers(args["rewards"], np.float32)
    names = args.get("group_ids") or np.arange(len(reward)) // args["group_size"]
    group = np.unique(names, return_inverse=True)[1]
    part = advantage.GroupZ(ddof=args["ddof"], eps=args["eps"])
    found = advantages(advantage.GroupMean() if args["scale"] == "none" else part, reward, group)
    if "rewards_spec" in args:
        return {"value_ones": found[0], "value_zeros": found[-1]}
    return {"value": found}


def whiten_case(args):
    values = numbers(args["values"], np.float32)
    part = Whitened(of=lambda batch, groups: batch.reward, ddof=1, eps=args["eps"])
    batch = small_batch(np.reshape(args["mask"], (-1, 1)), reward=values)
    return {"value": np.asarray(part(batch, groups_of(batch)))[: len(values)]}


def rloo_advantage_case(args):
    found = advantages(advantage.LeaveOneOut(), args["rewards"])
    return {"value": found, "index0": found[0]}


def duplicate_prompts_case(args):
    part = advantage.GroupZ(ddof=args["ddof"], eps=args["eps"])
    return {"value": advantages(part, args["rewards"], args["uids"])}


def kl_case(args):
    part = penalty.ReferenceKL(beta=1.0, estimator=penalty.ESTIMATORS[args["estimator"]])
    logp = numbers(args["logp_policy"], np.float32)
    if "d" in args:  # the difference itself, which adding to a log-prob would round
        logp, reference = np.zeros_like(logp), np.full_like(logp, args["d"])
    else:
        reference = numbers(args["logp_ref"], np.float32)
    batch = small_batch(args["mask"], ref_logp=reference)
    learn = Learn(clip=Given(), penalties=(part,), weight=weight.TokenMean())
    with_kl, gradient = token_losses(learn, logp, batch)
    without, plain = token_losses(dataclasses.replace(learn, penalties=()), logp, batch)
    return {"value": with_kl - without, "gradient": gradient - plain}


def aggregate_case(args):
    parts = {
        "token_mean": weight.TokenMean(),
        "seq_mean": weight.SequenceMean(),
        "seq_sum_norm": weight.ConstantLength(limit=args["norm_len"]),
    }
    losses = numbers(args["loss"], np.float32)
    if losses.ndim == 1:  # no sequences
        losses = losses.reshape(0, 1)
    batch = small_batch(np.reshape(args["mask"], losses.shape))
    learn = Learn(clip=Given(), weight=parts[args["mode"]])
    value, gradient = token_losses(learn, -losses, batch)
    return {"value": value, "gradient": gradient}


def ppo_loss_case(args):
    part = clip.PPO(low=args["clip_low"], high=args["clip_high"])
    if args.get("dual_clip"):
        part = clip.Dual(low=part.low, high=part.high, bound=args["dual_clip"])
    batch = small_batch(args["mask"], old_logp=numbers(args["logp_old"], np.float32))
    learn = Learn(clip=part, weight=weight.TokenMean())
    logp, adv = numbers(args["logp_new"]), numbers(args["adv"])
    value, gradient = token_losses(learn, logp, batch, adv)
    return {"value": value, "gradient": gradient}


def gspo_ratio_case(args):
    old, logp = (numbers(args[key], np.float32) for key in ("logp_old", "logp_new"))
    batch = small_batch(args["mask"], old_logp=old)

    def ratios(logp):
        return jnp.exp(ratio.Sequence()(TokenStats(logp=logp, entropy=None), batch))[:, 0]

    gradient = jax.grad(lambda logp: jnp.sum(ratios(logp)))(padded(logp))
    return {"value": np.asarray(ratios(padded(logp)))[: len(old)], "gradient": gradient}


def accumulate_case(args):
    """Micro-batches of unequal rows and lengths, weighted as one batch and added up."""
    parts = [np.asarray(part, np.float32) for part in args["micro_batches_loss"]]
    rows = sum(len(part) for part in parts)
    mask, losses = np.zeros((2, rows, max(part.shape[1] for part in parts)), np.float32)
    starts = np.cumsum([0, *map(len, parts)])
    for start, part in zip(starts, parts, strict=False):
        mask[start : start + len(part), : part.shape[1]] = 1
        losses[start : start + len(part), : part.shape[1]] = part
    learn = Learn(clip=Given(), weight=weight.TokenMean())
    scores = score_of(learn, small_batch(mask))
    total = 0.0
    for start, stop in zip(starts[:-1], starts[1:], strict=True):
        chosen = jax.tree.map(lambda leaf, a=start, b=stop: padded(leaf[a:b]), scores)
        batch = small_batch(mask[start:stop])
        logp = padded(-losses[start:stop])
        stats = TokenStats(logp=logp, entropy=jnp.zeros_like(logp))
        (value, _), _ = loss_of(learn, stats, batch, chosen)
        total += float(value)
    return {"value": total}


def filter_groups_case(args):
    group = np.repeat(np.arange(len(args["rewards"])), [len(row) for row in args["rewards"]])
    reward = np.concatenate([np.asarray(row, np.float32) for row in args["rewards"]])
    batch = small_batch(np.ones((len(reward), 1)), group=group.astype(np.int32), reward=reward)
    kept = np.asarray(keep.Mixed()(batch, groups_of(batch)))[: len(reward)]
    return {"kept": sorted(set(group[kept > 0].tolist()))}


def truncation_mask_case(args):
    if args["mode"] == "report":
        return {}
    mask = np.arange(max(args["lengths"]))[None] < np.array(args["lengths"])[:, None]
    batch = small_batch(mask, stopped=np.asarray(args["ends_with_eos"], np.float32))
    learn = Learn(clip=Given(), weight=weight.TokenMean(), keep=(keep.Stopped(),))
    value, gradient = token_losses(learn, -numbers(args["loss_per_token"]), batch)
    return {"value": value, "gradient": gradient, "kept_tokens": np.count_nonzero(gradient)}


def overlong_penalty_case(args):
    term = Overlong(cache=args["buffer"])
    return {"value": term(graded(tokens=args["length"], limit=args["max_len"]))}


def pass_at_k_case(args):
    return {"value": pass_at_k(args["n"], args["c"], args["k"])}


@pytest.mark.skipif(not CASES.exists(), reason="../shared/cases is not there")
@pytest.mark.parametrize("case", read_cases(), ids=lambda case: f"{case['id']}-{case['fault']}")
def test_public_fault(case):
    expected = case["expected"]
    found = globals()[case["input"]["op"] + "_case"](case["input"]["args"])
    tolerance = {"atol": expected.get("atol", 0.0), "rtol": expected.get("rtol", 0.0)}
    for key in ("value", "value_ones", "value_zeros", "index0"):
        if key in expected:
            close(found[key], numbers(expected[key]), **tolerance)
    for key in ("kept", "kept_tokens"):
        if key in expected:
            assert found[key] == expected[key]
    if "value_min" in expected:
        assert found["value"] >= expected["value_min"]
    if "value_max" in expected:
        assert found["value"] <= expected["value_max"]
    if expected.get("finite"):
        values = [found[key] for key in ("value", "value_ones", "value_zeros") if key in found]
        assert all(np.all(np.isfinite(value)) for value in values)
    if expected.get("grad_finite"):
        assert np.all(np.isfinite(found["gradient"]))
    if expected.get("grad_all_zero"):
        assert not np.any(found["gradient"])


def test_overlong_cache_above_the_limit_is_refused():
    with pytest.raises(ValueError, match="algorithm.overlong_cache=120.*max_new_tokens=100"):
        base.make("dapo", base.Budget(group=4, max_new_tokens=100), overlong_cache=120)
