"""The learner: one update whatever the devices, micro-batches and row order, equal to the oracle's.

Every algorithm runs with a policy that is one table of bigram logits, whose gradient the oracle has
by hand and which compiles in a tenth of a transformer's time; two run with the transformer as well.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
from jax.experimental.compilation_cache import compilation_cache

from xrpo_jax import mesh as meshes
from xrpo_jax.algorithms import base
from xrpo_jax.arrays import Batch, Scores, TokenStats, TrainState
from xrpo_jax.explore.collect import Shape, pack
from xrpo_jax.learn import batches, update
from xrpo_jax.learn.batches import Schedule
from xrpo_jax.learn.objective import loss
from xrpo_jax.learn.optimizer import OptimizerSettings, clipped, make_optimizer
from xrpo_jax.learn.update import make_learner
from xrpo_jax.log import Compiles
from xrpo_jax.model import params as parameters
from xrpo_jax.model.config import ModelConfig
from xrpo_jax.policy import Policy, packed_stats, token_stats
from xrpo_jax.types import Progress, Rollout, Verdict

NAMES = base.names()
BUDGET = base.Budget(group=4, max_new_tokens=7)
SLOTS, PROMPT, COLUMNS, VOCABULARY = 16, 4, 7, 24
# Devices, rows of a micro-batch over all devices, rows that share a copy of their prompt.
PLACES = [(1, 16, 4), (2, 4, 2), (8, 8, 1)]
BIGRAM = "bigram"
TRANSFORMER = Policy(
    model=ModelConfig(
        family="llama",
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        initializer_range=0.4,
    ),
    temperature=0.8,
)


def bigram_stats(params, packed):
    """`packed_stats` of the table of bigram logits."""
    target, before = packed.tokens[: len(packed.before)], packed.tokens[packed.before]
    logp = jax.nn.log_softmax(params["table"], axis=-1)
    entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)

    def in_rows(flat):
        return jnp.where(packed.rows >= 0, flat[jnp.maximum(packed.rows, 0)], 0.0)

    return TokenStats(logp=in_rows(logp[before, target]), entropy=in_rows(entropy[before]))


@pytest.fixture(scope="module", autouse=True)
def quick(tmp_path_factory):
    """The bigram policy is known to the learner, and compiling, most of this file's time, is quick.

    Learners share most of their programs, which the compilation cache finds by their text.
    """

    def either(policy, params, packed):
        if policy == BIGRAM:
            return bigram_stats(params, packed)
        return packed_stats(policy, params, packed)

    settings = {
        "jax_disable_most_optimizations": (True, False),
        "jax_compilation_cache_dir": (
            str(tmp_path_factory.mktemp("compiled")),
            jax.config.jax_compilation_cache_dir,
        ),
        "jax_persistent_cache_min_compile_time_secs": (0.0, 1.0),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(update, "packed_stats", either)
        for name, (here, _) in settings.items():
            jax.config.update(name, here)
        compilation_cache.reset_cache()
        yield
    for name, (_, elsewhere) in settings.items():
        jax.config.update(name, elsewhere)
    compilation_cache.reset_cache()


# --- data ---------------------------------------------------------------------------------------

RAGGED = oracles.ragged()
TOKENS = np.random.default_rng(4).integers(0, VOCABULARY, RAGGED.mask.shape)
TOKENS[:, :PROMPT] = TOKENS[RAGGED.group, :PROMPT]  # prompts of 2 to 4 tokens, alike in a group
STARTS = np.argmax(RAGGED.mask, axis=1)
LENGTHS = RAGGED.mask.sum(axis=1).astype(int)
TABLE, OLD_TABLE, REFERENCE_TABLE = (
    np.random.default_rng(5).standard_normal((VOCABULARY, VOCABULARY))
    + scale * np.random.default_rng(seed).standard_normal((VOCABULARY, VOCABULARY))
    for seed, scale in [(6, 0.0), (7, 0.2), (8, 0.4)]
)


def rows_at(table):
    """The ragged rollouts under the bigram policy `table`, drawn by OLD_TABLE."""
    tables = (table, OLD_TABLE, REFERENCE_TABLE)
    now, old, reference = (oracles.bigram_logp(each, TOKENS, RAGGED.mask) for each in tables)
    entropies = [oracles.bigram_entropy(each, TOKENS, RAGGED.mask) for each in tables]
    return oracles.Rows(
        now=now,
        old=old,
        reference=reference,
        entropy=entropies[0],
        old_entropy=entropies[1],
        reference_entropy=entropies[2],
        mask=RAGGED.mask,
        reward=RAGGED.reward,
        group=RAGGED.group,
        correct=RAGGED.correct,
        kind=RAGGED.kind,
        baseline=RAGGED.baseline,
        ancestors=RAGGED.ancestors,
    )


ROWS = rows_at(TABLE)


def oracle(name, table=TABLE, **settings):
    """Loss and gradient by the table, float64."""
    if name in ("drgrpo", "critique_grpo"):
        settings["limit"] = BUDGET.max_new_tokens
    loss = functools.partial(oracles.LOSSES[name], **settings)
    rows = rows_at(table)
    gradient = oracles.bigram_gradient(table, TOKENS, oracles.gradient(loss, rows))
    by_entropy = oracles.entropy_gradient(loss, rows)
    return loss(rows), gradient + oracles.bigram_entropy_gradient(table, TOKENS, by_entropy)


def cut(values):
    """Columns of the completions of [n,12] rows that begin with their prompt, as [n,7]."""
    out = np.zeros((len(values), COLUMNS), values.dtype)
    for row, value, start, length in zip(out, values, STARTS, LENGTHS, strict=True):
        row[:length] = value[start : start + length]
    return out


def make_batch(order=None, mask=RAGGED.mask):
    """The ragged rollouts in slots `order`, not yet annotated."""
    order = np.arange(len(mask)) if order is None else order

    def placed(values, *shape, dtype=np.float32):
        out = np.zeros((SLOTS, *shape), dtype)
        out[order] = values
        return out

    prompts = TOKENS[:, :PROMPT] * (np.arange(PROMPT) < STARTS[:, None])
    return Batch(
        prompt=placed(prompts, PROMPT, dtype=np.int32),
        prompt_length=placed(STARTS, dtype=np.int32),
        tokens=placed(cut(TOKENS), COLUMNS, dtype=np.int32),
        length=placed(LENGTHS, dtype=np.int32),
        mask=placed(cut(mask), COLUMNS),
        old_logp=placed(0.0, COLUMNS),
        reward=placed(RAGGED.reward),
        correct=placed(RAGGED.correct),
        group=placed(RAGGED.group, dtype=np.int32),
        kind=placed(RAGGED.kind, dtype=np.int32),
        stopped=placed(1.0),
        valid=placed(1.0),
        baseline=placed(RAGGED.baseline),
        ancestors=placed(RAGGED.ancestors, RAGGED.ancestors.shape[1], dtype=np.int32),
    )


SHUFFLED = np.random.default_rng(9).permutation(SLOTS)[: len(RAGGED.mask)]


# --- learners -----------------------------------------------------------------------------------


def recording(rate):
    """Plain gradient descent whose state is the sum of all gradients it was given."""

    def step(gradient, total, params):
        total = jax.tree.map(jnp.add, total, gradient)
        return jax.tree.map(lambda leaf: -rate * leaf, gradient), total

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), step)


@functools.cache
def learner_of(
    name,
    devices=1,
    rows=SLOTS,
    share=4,
    *,
    rate=1.0,
    policy=BIGRAM,
    settings=(),
    deferred=False,
    **schedule,
):
    """The learner of an algorithm on some devices, compiled once for all tests."""
    usual = {"minibatches": 1, "epochs": 1, "groups": 5}
    usual |= {"prompt_lengths": (PROMPT,), "lengths": (COLUMNS,)}
    schedule = Schedule(**(usual | schedule), rows=rows, share=share)
    learn = base.make(name, BUDGET, **dict(settings)).learn
    mesh = meshes.make(devices)
    return make_learner(learn, policy, recording(rate), schedule, mesh, deferred=deferred)


def state_of(params, devices=1):
    # Copies, since an update consumes the state it is given.
    params = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), params)
    state = TrainState(params=params, optimizer=jax.tree.map(jnp.zeros_like, params))
    return jax.device_put(state, meshes.everywhere(meshes.make(devices)))


def bigram_state(devices=1, table=TABLE):
    return state_of({"table": table}, devices)


def annotated(order=None, mask=RAGGED.mask):
    """The batch with what OLD_TABLE and REFERENCE_TABLE make of it."""
    order = np.arange(len(mask)) if order is None else order
    batch = make_batch(order, mask)
    found = {
        "old_logp": ROWS.old,
        "old_entropy": ROWS.old_entropy,
        "ref_logp": ROWS.reference,
        "ref_entropy": ROWS.reference_entropy,
    }
    for name, values in found.items():
        placed = np.zeros((SLOTS, COLUMNS), np.float32)
        placed[order] = cut(values * mask)
        batch = batch.replace(**{name: placed})
    return batch


def close(actual, wanted, atol):
    np.testing.assert_allclose(np.asarray(actual), wanted, atol=atol, rtol=0)


# --- one update, however it is computed -----------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_devices_micro_batches_and_order_give_the_oracles_update(name):
    loss, gradient = oracle(name)
    assert np.abs(gradient).max() > 0.005
    results = []
    for place, order in zip(PLACES, [None, SHUFFLED, SHUFFLED[::-1]], strict=True):
        batch, start = annotated(order), bigram_state(place[0])
        state, metrics, _ = learner_of(name, *place).update(start, batch, 0, 0)
        results.append((state.optimizer["table"], state.params["table"]))
        close(results[-1][0], gradient, 3e-6)
        close(results[-1][1], TABLE - gradient, 3e-6)
        assert metrics["loss"] == pytest.approx(loss, abs=2e-6)
        assert metrics["gradient_norm"] == pytest.approx(np.linalg.norm(gradient), rel=1e-4)
        assert metrics["empty_batch"] == metrics["skipped_updates"] == 0
    for one, other in itertools.combinations(results, 2):
        close(one[0], other[0], 1e-6)
        close(one[1], other[1], 1e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("devices, rows, share", PLACES)
def test_all_masked_batch_changes_nothing(name, devices, rows, share):
    """Rows without a trained token, and no row at all: loss 0, gradient 0, counted, no NaN."""
    batch = annotated(mask=np.zeros_like(RAGGED.mask))
    for valid in (batch.valid, np.zeros_like(batch.valid)):
        state, metrics, _ = learner_of(name, devices, rows, share).update(
            bigram_state(devices), batch.replace(valid=valid), 0, 0
        )
        assert metrics["empty_batch"] == 1 and metrics["loss"] == 0
        assert metrics["gradient_norm"] == 0 and np.all(np.isfinite(list(metrics.values())))
        assert not np.any(state.optimizer["table"])
        np.testing.assert_array_equal(state.params["table"], np.float32(TABLE))


@pytest.fixture(scope="module")
def transformer():
    """Parameters, the annotated batch, and the chain rule from log-probs to parameters."""
    current = parameters.init(TRANSFORMER.model, jax.random.key(0))
    noise = parameters.init(TRANSFORMER.model, jax.random.key(1))
    old = jax.tree.map(lambda one, other: one + 0.05 * other, current, noise)
    batch = learner_of("grpo", policy=TRANSFORMER).annotate(
        state_of(old).params, None, make_batch()
    )

    @jax.jit
    def stats_and_pull(params, by_logp):
        stats, pull = jax.vjp(
            lambda params: (
                token_stats(
                    TRANSFORMER,
                    params,
                    batch.prompt,
                    batch.prompt_length,
                    batch.tokens,
                    batch.length,
                ).logp
            ),
            params,
        )
        return stats, pull(by_logp)[0]

    return current, batch, stats_and_pull


@pytest.mark.parametrize(
    "name, place, schedule",
    [
        ("xrpo", (1, 16, 8), {}),
        ("grpo", (2, 4, 2), {}),
        ("xrpo", (8, 8, 1), {}),
        (
            "gspo",
            (1, 16, 4),
            {"tokens": 48, "lengths": (3, COLUMNS), "prompt_lengths": (3, PROMPT)},
        ),
        ("dapo", (2, 16, 4), {"tokens": 80}),
        ("grpo", (8, 16, 2), {"remat": "layer"}),
    ],
)
def test_transformer_update_is_the_oracles(transformer, name, place, schedule):
    """To 1e-6, so it is the same on 1, 2 and 8 devices, with and without shared prompts, packed."""
    current, batch, stats_and_pull = transformer
    params = state_of(current).params
    logp, _ = stats_and_pull(params, np.zeros_like(batch.old_logp))
    count = len(RAGGED.mask)
    rows = oracles.Rows(
        now=np.asarray(logp, np.float64)[:count],
        old=batch.old_logp[:count].astype(np.float64),
        mask=cut(RAGGED.mask),
        reward=RAGGED.reward,
        group=RAGGED.group,
        correct=RAGGED.correct,
    )
    by_logp = np.zeros_like(batch.old_logp)
    by_logp[:count] = oracles.gradient(oracles.LOSSES[name], rows)
    _, wanted = stats_and_pull(params, by_logp)
    schedule = dict(schedule)
    policy = dataclasses.replace(TRANSFORMER, remat=schedule.pop("remat", "none"))
    learner = learner_of(name, *place, policy=policy, **schedule)
    state, metrics, _ = learner.update(state_of(current, place[0]), batch, 0, 0)
    assert metrics["loss"] == pytest.approx(oracles.LOSSES[name](rows), abs=2e-6)
    assert metrics["entropy"] > 1
    for (path, gradient), leaf in zip(
        jax.tree.leaves_with_path(state.optimizer), jax.tree.leaves(wanted), strict=True
    ):
        assert np.abs(leaf).max() > 1e-3, path
        close(gradient, leaf, 1e-6)


@pytest.mark.parametrize(
    "name, settings",
    [
        ("grpo", {"beta": 0.3}),
        ("grpo_entropy", {"coefficient": 0.5}),
        ("tepo", {"entropy_drop": "ref"}),
    ],
)
def test_annotation_by_old_and_reference_policy(name, settings):
    learner = learner_of(name, 2, 8, settings=tuple(settings.items()))
    old, reference = (bigram_state(2, table).params for table in (OLD_TABLE, REFERENCE_TABLE))
    batch = learner.annotate(old, reference, make_batch())
    count = len(RAGGED.mask)
    close(batch.old_logp[:count], cut(ROWS.old), 1e-5)
    close(batch.ref_logp[:count], cut(ROWS.reference), 1e-5)
    close(batch.old_entropy[:count], cut(ROWS.old_entropy), 1e-5)
    close(batch.ref_entropy[:count], cut(ROWS.reference_entropy), 1e-5)
    assert not np.any(batch.old_logp[count:]) and not np.any(batch.ref_logp[count:])
    state, metrics, _ = learner.update(bigram_state(2), batch, 0, 0)
    loss, gradient = oracle(name, **settings)
    assert np.abs(gradient - oracle(name)[1]).max() > 1e-3
    assert metrics["loss"] == pytest.approx(loss, abs=2e-6)
    close(state.optimizer["table"], gradient, 3e-6)


def test_logged_numbers():
    rows = ROWS
    _, metrics, _ = learner_of("grpo").update(bigram_state(), annotated(), 0, 0)
    advantage, ratio = oracles.group_z(rows.reward, rows.group), oracles.token_ratio(rows)
    # Means are over the rows that a gradient comes from.
    assert 0 < np.sum(np.asarray(advantage) != 0) < rows.number
    places = [(i, t) for i in range(rows.number) if advantage[i] for t in rows.tokens(i)]
    clipped = [
        oracles.ppo(ratio[i][t], advantage[i], 0.2, 0.2) < ratio[i][t] * advantage[i]
        for i, t in places
    ]
    assert 0 < sum(clipped) < len(places)
    assert metrics["clip_fraction"] == pytest.approx(np.mean(clipped), abs=1e-6)
    kl = np.mean([oracles.k3(rows.old[i, t] - rows.now[i, t]) for i, t in places])
    assert metrics["kl_old"] == pytest.approx(kl, rel=1e-4)
    assert metrics["advantage_max"] == pytest.approx(np.abs(advantage).max(), rel=1e-5)


# --- what need not be computed ----------------------------------------------------------------


def defers(name):
    return not base.make(name, BUDGET).learn.reads_old_logp


def test_which_scores_read_old_log_probs():
    """XRPO's novelty, ReCo's weights and Critique-GRPO's log; all others wait for the forward."""
    assert {name for name in NAMES if not defers(name)} == {
        "xrpo", "xrpo_token", "reco", "critique_grpo"
    }  # fmt: skip
    with pytest.raises(ValueError, match="deferred=True; allowed: False"):
        learner_of("xrpo", deferred=True)


@pytest.mark.parametrize("minibatches, epochs", [(1, 1), (1, 2), (3, 2)])
@pytest.mark.parametrize("name", [name for name in NAMES if defers(name)])
def test_old_log_probs_of_the_first_forward_are_those_of_annotation(name, minibatches, epochs):
    """The same update and log, without a pass before it; the batch comes back annotated."""
    found = []
    for deferred in (False, True):
        learner = learner_of(
            name, rate=0.3, minibatches=minibatches, epochs=epochs, deferred=deferred
        )
        state = bigram_state()
        reference = bigram_state(table=REFERENCE_TABLE).params
        batch = learner.annotate(state.params, reference, make_batch())
        assert deferred == np.isnan(batch.old_logp).all() == np.isnan(batch.old_entropy).all()
        found.append(learner.update(state, batch, 0, 0))
    (state, metrics, batch), (same, also, filled) = found
    assert np.abs(np.asarray(state.params["table"]) - TABLE).max() > 1e-3
    close(same.params["table"], state.params["table"], 2e-6)
    assert also == pytest.approx(metrics, abs=2e-5, rel=1e-4)
    seen = np.isfinite(filled.old_logp).all(axis=1)
    penalties = bool(base.make(name, BUDGET).learn.penalties)
    assert seen.sum() > 4 and (penalties <= seen[: len(RAGGED.mask)].all())
    close(filled.old_logp[seen], batch.old_logp[seen], 1e-6)
    close(filled.old_entropy[seen], batch.old_entropy[seen], 1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_without_advantage_has_no_gradient(name):
    """What lets the learner leave it out, where no penalty is."""
    learn, batch = base.make(name, BUDGET).learn, jax.tree.map(jnp.asarray, annotated())
    scores = Scores(
        advantage=jnp.zeros_like(batch.mask), weight=batch.mask, accuracy=batch.valid * 0.5
    )

    @jax.jit
    def gradient(logp, entropy):
        def total(stats):
            return loss(learn, stats, batch, scores)[0]

        return jax.grad(total)(TokenStats(logp=logp, entropy=entropy))

    found = jax.tree.leaves(gradient(batch.old_logp + 0.3 * batch.mask, batch.old_entropy))
    assert learn.penalties or not any(np.any(leaf) for leaf in found)


@pytest.mark.parametrize("name, computed", [("grpo", False), ("grpo_entropy", True)])
def test_rows_without_advantage_are_left_out_where_there_is_no_penalty(name, computed):
    learner = learner_of(name, deferred=True)
    state = bigram_state()
    batch = learner.annotate(state.params, None, make_batch())
    advantage = np.asarray(oracles.group_z(RAGGED.reward, RAGGED.group))
    _, _, filled = learner.update(state, batch, 0, 0)
    seen = np.isfinite(filled.old_logp[: len(RAGGED.mask)]).all(axis=1)
    np.testing.assert_array_equal(seen, (advantage != 0) | computed)


# --- EOS and padding ----------------------------------------------------------------------------


def test_eos_is_trained_where_it_is_also_the_padding():
    """Token 0 ends two rollouts and pads every row; 5 -> 0 gets gradient, 0 -> 0 gets none."""
    wrong, right = Verdict(status="wrong", score=0.0), Verdict(status="correct", score=1.0)

    def rollout(index, tokens, verdict):
        prompt = np.array([3, 4], np.int32)
        return Rollout(
            prompt=0, slot=0, index=index, round=0, kind=0, sampled_prompt=prompt,
            trained_prompt=prompt, tokens=np.array(tokens, np.int32),
            logp=np.zeros(len(tokens), np.float32), stopped=True, text="", verdict=verdict,
            reward=verdict.score,
        )  # fmt: skip

    drawn = (rollout(0, [5, 0], right), rollout(1, [6, 7, 0], wrong))
    progress = Progress(prompts=(0,), rollouts=(drawn,), batch=1)
    shape = Shape(
        prompts=1, rows=SLOTS, prompt_length=PROMPT, seeded_length=PROMPT, max_new_tokens=COLUMNS
    )
    packed = pack(progress, list(progress.rollouts), shape)
    batch = learner_of("grpo").annotate(bigram_state().params, None, packed)
    state, _, _ = learner_of("grpo").update(bigram_state(), batch, 0, 0)
    gradient = np.asarray(state.optimizer["table"])
    # On policy the gradient of a row's token is -A / (rows x tokens), times 1 - p of the token.
    chance = np.exp(TABLE[5, 0]) / np.exp(TABLE[5]).sum()
    assert gradient[5, 0] == pytest.approx(-np.sqrt(0.5) / 4 * (1 - chance), rel=1e-4)
    assert gradient[7, 0] > 0.05
    assert not np.any(gradient[0])


def test_padding_tokens_and_lengths_do_not_matter():
    """Other tokens and old log-probs under the padding, and micro-batches of several lengths."""
    batch = annotated()
    state, _, _ = learner_of("grpo").update(bigram_state(), batch, 0, 0)
    padding = np.arange(COLUMNS)[None] >= batch.length[:, None]
    other = batch.replace(
        prompt=np.where(np.arange(PROMPT) >= batch.prompt_length[:, None], 5, batch.prompt),
        tokens=np.where(padding, 7, batch.tokens),
        old_logp=np.where(padding, 9, batch.old_logp),
    )
    same, _, _ = learner_of("grpo").update(bigram_state(), other, 0, 0)
    np.testing.assert_array_equal(same.optimizer["table"], state.optimizer["table"])
    assert {4, 7} < set(batch.length.tolist()) and batch.length.max() == COLUMNS  # to the brim
    cut_short = learner_of("grpo", prompt_lengths=(3, PROMPT), lengths=(4, COLUMNS))
    close(
        cut_short.update(bigram_state(), batch, 0, 0)[0].optimizer["table"],
        state.optimizer["table"],
        1e-6,
    )


@pytest.mark.parametrize(
    "widths, message",
    [
        ({"lengths": (3, 5)}, "a completion of 7 tokens.*hold at most 5"),
        ({"prompt_lengths": (2,)}, "a prompt of 4 tokens.*hold at most 2"),
    ],
)
def test_a_row_too_long_for_every_micro_batch_is_an_error(widths, message):
    with pytest.raises(ValueError, match=message):
        learner_of("grpo", **widths).update(bigram_state(), annotated(), 0, 0)


def schedule_of(**given):
    usual = {"minibatches": 1, "epochs": 1, "rows": 8, "share": 4, "groups": 5}
    return Schedule(**(usual | {"prompt_lengths": (3, 4), "lengths": (3, 7)} | given))


@pytest.mark.parametrize(
    "schedule",
    [
        schedule_of(),
        schedule_of(tokens=35),  # fewer than 8 rows may have
        schedule_of(devices=2, rows=16, share=2, tokens=60, lengths=(7,)),
    ],
    ids=["by rows", "by tokens", "devices"],
)
def test_micro_batches_hold_every_row_once_behind_its_prompt(schedule):
    """Blocks of one prompt within the buffer; from it every token can be read back."""
    batch = make_batch(SHUFFLED)
    parts = batches.micro_batches(batch, np.flatnonzero(batch.valid), schedule)
    rows = np.concatenate([part.rows for part in parts])
    assert sorted(rows[rows >= 0]) == sorted(SHUFFLED)
    shared = 0
    for part in parts:
        assert len(part.rows) == schedule.places(part.width)
        shape = part.prompt_width, part.width, part.slots
        assert shape in schedule.shapes()
        packed = batches.model_inputs(batch, part)
        assert packed.tokens.shape == (schedule.devices * part.slots,)
        blank = batches.model_inputs(batch, batches.blank(schedule, *shape))
        assert jax.tree.map(np.shape, packed) == jax.tree.map(np.shape, blank)
        each = jax.tree.map(lambda leaf: np.split(leaf, schedule.devices), packed)
        blocks = np.split(part.rows.reshape(-1, schedule.share), schedule.devices)
        for device, mine in enumerate(blocks):
            here = jax.tree.map(
                lambda leaf, device=device: leaf[device],
                each,
                is_leaf=lambda leaf: isinstance(leaf, list),
            )
            used = np.flatnonzero(here.place >= 0)
            slots = np.concatenate([here.prompts.reshape(-1), here.rows.reshape(-1)])
            np.testing.assert_array_equal(slots[here.place[used]], used)
            assert (slots >= 0).sum() == len(used)
            for block, prompt in zip(mine, here.prompts, strict=True):
                members = block[block >= 0]
                assert (block[: len(members)] >= 0).all()
                shared += max(len(members) - 1, 0)
                assert len(np.unique(batch.prompt[members], axis=0)) == min(len(members), 1)
                for row in members[:1]:
                    slots = prompt[: batch.prompt_length[row]]
                    assert (prompt[batch.prompt_length[row] :] == -1).all()
                    real = batch.prompt[row, : batch.prompt_length[row]]
                    np.testing.assert_array_equal(here.tokens[slots], real)
                    np.testing.assert_array_equal(here.positions[slots], np.arange(len(real)))
            for number, row in enumerate(mine.reshape(-1)):
                length = batch.length[row] if row >= 0 else 0
                slots = here.rows[number]
                assert (slots[length:] == -1).all()
                if length:
                    start, slots = batch.prompt_length[row], slots[:length]
                    tokens = batch.tokens[row, :length]
                    np.testing.assert_array_equal(here.tokens[slots], tokens)
                    np.testing.assert_array_equal(here.positions[slots], start + np.arange(length))
                    before = np.concatenate([batch.prompt[row, start - 1 : start], tokens[:-1]])
                    np.testing.assert_array_equal(here.tokens[here.before[slots]], before)
    assert shared >= 2


def test_devices_are_filled_evenly_and_a_buffer_is_halved_where_that_is_enough(monkeypatch):
    """Eight prompts of 4 tokens with two completions each, on two devices of 64 slots."""
    monkeypatch.setattr(batches, "HALF", 32)
    schedule = schedule_of(devices=2, rows=16, share=2, lengths=(6,), prompt_lengths=(4,))
    assert schedule.slots(4) == (32, 64)
    empty = batches.empty(16, 4, 6, frozenset())
    length = np.array([6, 6, 1, 1, 6, 6, 1, 1, 1, 1, 1, 1, 2, 2, 1, 1], np.int32)
    prompt = np.repeat(np.arange(8), 2)[:, None] + np.zeros((16, 4), int)
    batch = empty.replace(
        length=length, prompt_length=np.full(16, 4, np.int32), prompt=prompt.astype(np.int32)
    )

    def filled(rows):
        return [
            (
                part.slots,
                [int(np.sum(mine.place >= 0)) for mine in split(batches.model_inputs(batch, part))],
            )
            for part in batches.micro_batches(batch, np.array(rows), schedule)
        ]

    def split(packed):
        halves = jax.tree.map(lambda leaf: np.split(leaf, 2), packed)
        is_pair = lambda leaf: isinstance(leaf, list)  # noqa: E731
        return [jax.tree.map(lambda leaf, i=i: leaf[i], halves, is_leaf=is_pair) for i in range(2)]

    # Blocks of 16, 6, 16, 6, 6, 6, 8, 6 tokens, each to the device that has less.
    assert filled(range(16)) == [(64, [36, 34])]
    assert filled(range(4)) == [(32, [16, 6])]
    assert filled([*range(8), 8, 9]) == [(32, [28, 22])]


def test_a_buffer_too_small_for_a_block_is_an_error():
    """Before anything is compiled."""
    with pytest.raises(ValueError, match="micro_tokens=31; allowed: 0, or at least 32"):
        schedule_of(tokens=31).slots(4)
    with pytest.raises(ValueError, match="micro_tokens=5; allowed"):
        learner_of("grpo", tokens=5)


# --- several updates of a batch -------------------------------------------------------------------


def test_minibatches_add_up_to_the_batch():
    """A minibatch of m stands for the whole: unmoved, their gradients sum to m times its own."""
    loss, gradient = oracle("grpo")
    learner = learner_of("grpo", rate=0.0, minibatches=3, epochs=2)
    state, metrics, _ = learner.update(bigram_state(), annotated(), 0, 0)
    close(state.optimizer["table"], 3 * 2 * gradient, 2e-5)
    assert metrics["loss"] == pytest.approx(loss, abs=2e-6)
    again, same, _ = learner.update(bigram_state(), annotated(), 0, 0)
    np.testing.assert_array_equal(again.optimizer["table"], state.optimizer["table"])
    assert same == metrics
    other = learner.update(bigram_state(), annotated(), 0, 1)[1]["gradient_norm"]
    assert other != metrics["gradient_norm"]  # another step draws other minibatches


def test_second_epoch_moves_on_under_the_first_ones_scores():
    _, first = oracle("xrpo")
    _, second = oracle("xrpo", TABLE - 2.0 * first)
    assert np.abs(second - first).max() > 0.01
    learner = learner_of("xrpo", rate=2.0, epochs=2)
    state, _, _ = learner.update(bigram_state(), annotated(), 0, 0)
    close(state.optimizer["table"], first + second, 1e-5)
    close(state.params["table"], TABLE - 2.0 * (first + second), 2e-5)


def metrics_by_updates(name, *numbers, **settings):
    """Metrics of a step whose batch the policy drew itself, by its number of minibatches."""
    found = []
    for minibatches in numbers:
        learner = learner_of(
            name, rate=4.0, minibatches=minibatches, settings=tuple(settings.items())
        )
        start = bigram_state()
        batch = learner.annotate(start.params, None, make_batch())
        found.append(learner.update(start, batch, 0, 0)[1])
    return found


def test_tepos_mask_needs_a_second_update():
    one, several = metrics_by_updates("tepo", 1, 3)
    assert one["mask_share"] == one["masked_kl"] == 0
    assert 0.02 < several["mask_share"] < 0.5 and several["masked_kl"] > 1e-4


def test_recos_token_part_needs_a_second_update_and_its_response_part_does_not():
    one, several = metrics_by_updates("reco", 1, 3, response_cap=40.0)  # 5 would cap every row
    assert one["variance_ratio"] == pytest.approx(1.0, abs=1e-5)
    assert abs(several["variance_ratio"] - 1.0) > 0.01
    rows = dataclasses.replace(ROWS, old=ROWS.now)
    size = np.bincount(rows.group)
    weights = [w * size[rows.group[i]] for i, w in oracles.response_weights(rows, cap=40).items()]
    for metrics in (one, several):
        assert metrics["response_weight"] == pytest.approx(np.mean(weights), rel=1e-5)
        assert metrics["response_weight_low"] == pytest.approx(min(weights), rel=1e-5)
        assert metrics["response_weight_high"] == pytest.approx(max(weights), rel=1e-5)
    assert min(weights) < 10 and max(weights) == pytest.approx(40)


def test_the_entropy_bonus_shows_in_the_entropy():
    plain, bonus = (
        learner_of("grpo_entropy", rate=4.0, minibatches=3, settings=(("coefficient", value),))
        for value in (0.0, 5.0)
    )
    found = [learner.update(bigram_state(), annotated(), 0, 0)[1] for learner in (plain, bonus)]
    assert found[1]["entropy"] > found[0]["entropy"] + 0.01


# --- faults and switches --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, value", [(name, np.nan) for name in NAMES] + [("grpo", np.inf), ("gspo", -np.inf)]
)
def test_an_update_that_is_not_finite_is_skipped_and_counted(name, value):
    """One old log-prob that is not a number, on a trained token of a mixed group."""
    batch = annotated()
    batch.old_logp[0, 0] = value
    state, metrics, _ = learner_of(name).update(bigram_state(), batch, 0, 0)
    if np.isnan(value):
        assert metrics["skipped_updates"] == 1 and metrics["gradient_norm"] == 0
    if metrics["skipped_updates"]:
        np.testing.assert_array_equal(state.params["table"], np.float32(TABLE))
        assert not np.any(state.optimizer["table"])
    assert np.all(np.isfinite(state.params["table"]))


def test_warm_up_compiles_the_step_and_changes_nothing():
    """After it only the scores compile, whose rows it cannot know, and after one step nothing."""
    learner = make_learner(
        base.make("grpo", BUDGET, beta=0.1).learn,
        BIGRAM,
        recording(1.0),
        Schedule(
            minibatches=1,
            epochs=2,
            rows=4,
            share=2,
            prompt_lengths=(2, PROMPT),
            lengths=(5, COLUMNS),
            groups=5,
        ),
        meshes.make(2),
    )
    state, reference = bigram_state(2), bigram_state(2, REFERENCE_TABLE).params
    for job in learner.warm_up(state):
        job()
    np.testing.assert_array_equal(state.params["table"], np.float32(TABLE))
    counts = []
    for order in (None, SHUFFLED):
        compiles = Compiles()
        batch = learner.annotate(state.params, reference, make_batch(order))
        state, _, _ = learner.update(state, batch, 0, len(counts))
        compiles.close()
        counts.append(compiles.count)
    assert counts == [1, 0]


def test_optimizer_warms_up_and_clips():
    """Adam's step is the rate while gradients are alike, which clipping to norm 1 makes them."""
    optimizer = make_optimizer(OptimizerSettings(learning_rate=0.4, warmup=3, clip_norm=1.0))
    params = {"w": jnp.ones(1)}
    memory, steps = optimizer.init(params), []
    step = jax.jit(optimizer.update)
    for gradient in (1000.0, 1.0, 50.0, 2.0, 7.0):
        change, memory = step({"w": jnp.full(1, gradient)}, memory, params)
        steps.append(float(change["w"][0]))
    assert steps == pytest.approx([-0.1, -0.2, -0.3, -0.4, -0.4], rel=1e-4)


@pytest.mark.parametrize("limit", [0.5, 2.0])
@pytest.mark.parametrize("size", [0.1, 1.0, 30.0])
def test_gradients_are_clipped_as_optax_does(limit, size):
    gradient = {"a": size * jnp.array([0.6, 0.0]), "b": size * jnp.array([[0.8]])}
    clip = optax.clip_by_global_norm(limit)
    wanted, _ = clip.update(gradient, clip.init(gradient))
    found, _ = clipped(limit).update(gradient, clipped(limit).init(gradient))
    for name in gradient:
        close(found[name], wanted[name], 1e-6)
    assert float(optax.tree.norm(found)) == pytest.approx(min(size, limit), rel=1e-6)


def test_minibatches_of_whole_groups_part_no_prompt():
    batch = make_batch(SHUFFLED)
    parts = batches.minibatches(batch, True, 3, np.random.default_rng(0))
    assert sorted(np.concatenate(parts)) == sorted(np.flatnonzero(batch.valid))
    groups = [set(batch.group[part]) for part in parts]
    assert sum(map(len, groups)) == len(set.union(*groups)) == 4  # each in one part
    rows = batches.minibatches(batch, False, 3, np.random.default_rng(0))
    groups = [set(batch.group[part]) for part in rows]
    assert sum(map(len, groups)) > 4
