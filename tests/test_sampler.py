"""The sampler on a tiny random model: rows depend on their coordinates alone, and on nothing else.

Shapes: N rows · T new tokens · V vocabulary.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import gc
import types
import weakref

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from scipy import stats
from tiny import policy as tiny

from xrpo_jax import lane, rng
from xrpo_jax import mesh as meshes
from xrpo_jax import sampler as sampler_module
from xrpo_jax.log import Compiles
from xrpo_jax.policy import Policy, token_stats
from xrpo_jax.sampler import Sampler, make_draw
from xrpo_jax.sampling import Method, draw_token

NEW = 6  # T
VOCABULARY = tiny.MODEL.vocab_size
STOPS = tiny.MODEL.eos_token_ids
SHALLOW = dataclasses.replace(tiny.MODEL, num_layers=1)
PROMPTS = [np.array(tiny.encode(text), np.int32) for text in ("abc:", "k:", "ponm:", "d:", "af:")]
# Ragged on purpose: a prompt with one rollout, some with several, one with none, in mixed order.
ROW = np.array([0, 2, 2, 0, 1, 4, 2, 0, 4, 2, 0, 2, 4, 0])
INDEX = np.array([0, 0, 1, 1, 0, 0, 2, 2, 1, 3, 3, 4, 2, 9])
PROMPT = np.array([50, 7, 11, 12, 13])[ROW]  # places in the task, unlike those in the call


@functools.cache
def make(
    slots=16,
    lengths=(8,),
    devices=1,
    method=None,
    prompts=5,
    dtype="float32",
    lanes=1,
    chunk=8,
    new=NEW,
    stops=STOPS,
    scattered=False,
):
    """A draw with the parameters bound; each other setting is a compilation of seconds."""
    sampler = Sampler(
        model=tiny.MODEL,
        method=method or Method(),
        dtype=dtype,
        prompts=prompts,
        slots=slots,
        lengths=lengths,
        max_new_tokens=new,
        stop_ids=stops,
        lanes=lanes,
        chunk=chunk,
        scattered=scattered,
    )
    mesh = meshes.make(devices)
    params = jax.device_put(tiny.weights(), meshes.everywhere(mesh))
    return functools.partial(make_draw(sampler, mesh), params)


def resume(paths, rows, limit, keep=True, **settings):
    draw = make(**settings)
    return draw.func.resume(*draw.args, paths, rows, limit, keep)


def keys(prompt=PROMPT, index=INDEX, step=0):
    return rng.Rows(step_key=rng.key(0, step, "rollout"), prompt=prompt, index=index)


@functools.cache
def straight():
    """What every other way of drawing the same rows must give."""
    return make()(PROMPTS, ROW, keys(), NEW)


def assert_same(found, expected):
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_array_equal(found.length, expected.length)
    np.testing.assert_array_equal(found.stopped, expected.stopped)
    np.testing.assert_allclose(found.logp, expected.logp, atol=1e-5)


def take(samples, rows):
    return jax.tree.map(lambda leaf: leaf[rows], samples.replace(paths=None))


def forward(
    rows: list[np.ndarray], temperature: float = 1.0, model=tiny.MODEL, dtype: str = "float32"
):
    """The trainer's log-probs f32[N,S] of whole rows; 0 for the first token."""
    width = len(PROMPTS[2]) + NEW
    tokens = np.zeros((len(rows), width), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    length = np.array([len(row) for row in rows], np.int32)
    run = jax.jit(token_stats, static_argnums=0)
    policy = Policy(model=model, temperature=temperature, dtype=dtype)
    one = np.ones_like(length)
    found = run(policy, tiny.weights(model), tokens[:, :1], one, tokens[:, 1:], length - 1)
    return np.pad(found.logp, ((0, 0), (1, 0)))


def whole_rows(samples, row=ROW):
    return [
        np.concatenate([PROMPTS[place], samples.tokens[i, : samples.length[i]]])
        for i, place in enumerate(row)
    ]


# --- a row depends on its prompt and its coordinates alone ---------------------------------------


def test_the_rows_of_the_test_are_not_all_alike():
    samples = straight()
    assert len({row.tobytes() for row in samples.tokens}) >= 12
    assert 0 < samples.stopped.sum() < len(ROW) and len(set(samples.length)) >= 4


@pytest.mark.parametrize(
    "settings",
    [
        {"slots": 4},
        {"lengths": (5, 16)},
        {"prompts": 2},
        {"devices": 2},
        {"devices": 8},
        {"chunk": 1},
        {"chunk": 2, "slots": 4},
        {"lanes": 2, "slots": 4, "chunk": 3},
        {"lanes": 4, "slots": 8, "devices": 2},
        {"scattered": True, "devices": 2},
    ],
    ids=str,
)
def test_sizes_change_nothing(settings):
    assert_same(make(**settings)(PROMPTS, ROW, keys(), NEW), straight())


@pytest.mark.parametrize("method", [Method(top_k=4), Method(top_p=0.7)], ids=str)
def test_sizes_change_nothing_where_tokens_are_left_out(method):
    expected = make(method=method)(PROMPTS, ROW, keys(), NEW)
    assert (expected.tokens != straight().tokens).any()
    found = make(method=method, lanes=2, slots=4, devices=2, chunk=3)(PROMPTS, ROW, keys(), NEW)
    assert_same(found, expected)


LONG = 60  # tokens, so that a cache has several lengths: 32, 48 and 80


def long_rows(**settings):
    """68 rows of 60 or 6 tokens, the long ones first."""
    row, index = np.arange(68) % 5, np.arange(68)
    limit = np.where(index < 16, LONG, 6)
    return make(new=LONG, stops=(), **settings)(PROMPTS, row, keys(row, index), limit)


def test_caches_that_grow_and_shrink_and_fewer_rows_change_nothing(monkeypatch):
    resized, fit = set(), sampler_module.lanes.fit

    def watched(mesh, lane, place, length):
        rows, was = lane.cache.keys[0].shape[0], lane.cache.keys[0].shape[2]
        resized.add((np.sign(length - was), len(place) < rows))
        return fit(mesh, lane, place, length)

    assert make(new=LONG).func.sampler.cache_lengths == (32, 48, 80)
    expected = long_rows(slots=68)
    monkeypatch.setattr(sampler_module.lanes, "fit", watched)
    assert_same(long_rows(slots=16, chunk=4), expected)
    assert_same(long_rows(slots=32, lanes=2, chunk=5), expected)
    assert resized >= {(1, False), (-1, False), (0, True)}


def test_a_finished_row_s_slot_goes_to_the_next_row():
    """Fewer chunks than batches of slots would need, which wait for their longest row each."""
    ran, advance = [], sampler_module.Draw._advance
    row, index = np.zeros(9, int), np.arange(9)
    limit = np.where(index == 0, 12, 3)

    def watched(draw, weights, lane):
        ran.append(int((lane.left > 0).sum()))
        return advance(draw, weights, lane)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler_module.Draw, "_advance", watched)
        make(slots=3, chunk=3, new=12, stops=())(PROMPTS, row, keys(row, index), limit)
    assert ran == [3, 3, 3, 3]


@pytest.mark.parametrize("settings", [{"slots": 4, "chunk": 2}, {"slots": 4, "lanes": 2}], ids=str)
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("resumed", [False, True])
def test_each_row_is_told_once_when_it_has_ended(settings, keep, resumed):
    """Some have nothing to draw, or to go on with: they stopped, or may not grow."""
    draw, limit = make(**settings), INDEX % (NEW + 1)
    paths = draw(PROMPTS, ROW, keys(), PAUSE, keep=True).paths if resumed else None

    def drawn(told):
        def finished(rows, samples):
            told.append((rows.copy(), samples))

        if resumed:
            return draw.func.resume(*draw.args, paths, keys(), limit, keep, finished)
        return draw(PROMPTS, ROW, keys(), limit, keep, finished)

    told, again = [], []
    out = drawn(told)
    assert len(told) > 2
    assert sorted(np.concatenate([rows for rows, _ in told])) == list(range(len(ROW)))
    for rows, samples in told:
        assert_same(samples, take(out, rows))
        assert samples.paths == (tuple(out.paths[i] for i in rows) if keep else None)
    drawn(again)
    for (one, _), (other, _) in zip(told, again, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("keep", [False, True])
def test_whoever_listens_is_called_after_every_chunk_and_may_give_up(keep):
    """No row ends before the last of 6 chunks; what listens is called as each begins, and after."""
    draw, told = make(chunk=1, stops=()), []

    def finished(rows, samples):
        assert rows.dtype.kind == "i" and samples.tokens.shape == (len(rows), NEW)
        told.append(len(rows))
        if len(told) == stop_at:
            raise KeyError("enough")

    stop_at = 0
    draw(PROMPTS, ROW, keys(), NEW, keep, finished)
    assert told == [0] * NEW + [len(ROW)]
    told.clear()
    stop_at = 2
    with pytest.raises(KeyError, match="enough"):
        draw(PROMPTS, ROW, keys(), NEW, keep, finished)
    assert told == [0, 0]


def test_nothing_compiles_after_the_warm_up():
    settings = {"slots": 32, "lanes": 2, "chunk": 4, "new": LONG, "stops": (), "devices": 2}
    draw = make(lengths=(5, 16), **settings)
    for job in draw.func.warm_up(*draw.args, pauses=True):
        job()
    compiles = Compiles()
    row, index = np.arange(40) % 5, np.arange(40)
    draw(PROMPTS, row, keys(row, index), np.where(index % 3, LONG, 1 + index))
    draw(PROMPTS[:1], row[:1], keys(row[:1], index[:1]), 2)
    # Paused rows may go on in a lane of any size: many or few of them, short or long, kept or not.
    found = draw(PROMPTS, row, keys(row, index), 2, keep=True)
    for rows, limit, keep in ((40, LONG, False), (3, 2, False), (3, LONG, False), (40, 3, True)):
        paths, these = found.paths[:rows], keys(row[:rows], index[:rows])
        resume(paths, these, limit, keep, lengths=(5, 16), **settings)
    compiles.close()
    assert compiles.count == 0


def test_the_warm_up_compiles_each_program_once_and_runs_none(monkeypatch):
    """In several threads, which must not run programs that join devices."""
    draw = make(prompts=3, lengths=(6, 13), new=5, slots=16, devices=2, stops=())
    for name in ("begin", "fit", "advance"):  # none of them can be called
        only = types.SimpleNamespace(lower=getattr(lane, name).lower)
        monkeypatch.setattr(lane, name, only)
    jobs, compiles = draw.func.warm_up(*draw.args, pauses=True), Compiles()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(job) for job in jobs]:
            done.result()
    compiles.close()
    names, sampler = collections.Counter(compiles.take().names), draw.func.sampler
    lane_shapes = len(sampler.sizes(2)) * len(sampler.cache_lengths)
    assert names["jit(prefill)"] == 2 and names["jit(advance)"] == lane_shapes == 4
    assert names["jit(begin)"] == 3 * lane_shapes


def test_another_way_to_draw_compiles_only_what_draws():
    row = np.zeros(1, int)
    for method in (Method(), Method(temperature=1.2)):
        draw, compiles = make(method=method, prompts=3, lengths=(7,)), Compiles()
        draw([PROMPTS[1]], row, keys(row, row), 2)
        compiles.close()
    assert set(compiles.take().names) == {"jit(advance)"}


@pytest.mark.parametrize("method", [Method(), Method(top_k=4), Method(top_p=0.7)], ids=str)
def test_decoding_joins_no_devices(method):
    """Lanes run in threads: a program that waits for other devices could wait for ever."""
    draw = make(devices=2, slots=8, method=method).func
    decoding, mesh, everywhere = draw.sampler.decoding, draw.mesh, meshes.everywhere(draw.mesh)
    params = jax.device_put(tiny.weights(), everywhere)
    weights = lane.weights(decoding.model, decoding.dtype, params)
    rows = lane.empty(decoding.model, decoding.dtype, mesh, 8, draw.sampler.cache_lengths[-1])
    steps = jax.device_put(np.int32(1), everywhere)
    compiled = lane.advance.lower(decoding, mesh, weights, rows, steps).compile().as_text()
    for word in ("all-reduce", "all-gather", "collective", "all-to-all", "reduce-scatter"):
        assert word not in compiled


def test_prompts_are_prefilled_once_and_forgotten_with_their_last_row(monkeypatch):
    """Five prompts in three pages, whose rows come up in both lanes and over many chunks."""
    made, alive, prefill = [], [], sampler_module.lanes.prefill
    expected = straight()

    def watched(*arguments):
        page = prefill(*arguments)
        made.append((np.array(arguments[-1]), weakref.ref(page.keys[0])))
        return page

    def finished(rows, samples):
        alive.append([page() is not None for _, page in made])

    monkeypatch.setattr(sampler_module.lanes, "prefill", watched)
    draw = make(prompts=2, lanes=2, slots=4, chunk=3)
    assert_same(draw(PROMPTS, ROW, keys(), NEW, finished=finished), expected)
    pages = np.concatenate([tokens for tokens, _ in made])
    assert pages.shape == (6, 8) and len({page.tobytes() for page in pages}) == 6
    # Rows begin page by page, and a page is made with its first row: one at most has some waiting.
    assert len(alive[0]) == 1 and max(map(sum, alive)) == 1 and not any(alive[-1])


def test_a_lane_reads_few_pages(monkeypatch):
    """16 rows of four pages: each lane takes those of two, not some of every page."""
    begun, begin = [], sampler_module.Draw._begin

    def watched(draw, lane, new, keys):
        begun.append(len(new))
        return begin(draw, lane, new, keys)

    monkeypatch.setattr(sampler_module.Draw, "_begin", watched)
    row, index = np.arange(16) % 4, np.arange(16)
    make(prompts=1, lanes=2, slots=16)(PROMPTS[:4], row, keys(row, index), 1)
    assert begun == [4, 4, 4, 4]


def test_order_of_rows_and_of_prompts_changes_nothing():
    order = np.random.default_rng(0).permutation(len(ROW))
    places = np.array([3, 0, 4, 2, 1])  # the new place of each prompt
    prompts = [PROMPTS[int(np.flatnonzero(places == i)[0])] for i in range(5)]
    found = make()(prompts, places[ROW[order]], keys(PROMPT[order], INDEX[order]), NEW)
    assert_same(found, take(straight(), order))


@pytest.mark.parametrize("rows", [[4], [1, 2, 6], list(range(0, 14, 2))], ids=str)
def test_other_rows_change_nothing(rows):
    rows = np.array(rows)
    found = make()(PROMPTS, ROW[rows], keys(PROMPT[rows], INDEX[rows]), NEW)
    assert_same(found, take(straight(), rows))


def test_more_rows_than_slots_and_fewer_prompts_than_places():
    count = 21
    row, index = np.zeros(count, int), np.arange(count)
    found = make()(PROMPTS[:1], row, keys(np.full(count, 50), index), NEW)
    again = make(slots=4)(PROMPTS[:1], row, keys(np.full(count, 50), index), NEW)
    assert_same(again, found)
    assert_same(take(found, np.array([0, 1, 2, 3, 9])), take(straight(), np.flatnonzero(ROW == 0)))


def test_coordinates_are_what_makes_rows_differ():
    row, same = np.zeros(14, int), np.zeros(14, int)
    draw = make()
    alike = draw(PROMPTS, row, keys(same, same), NEW).tokens
    assert len({tokens.tobytes() for tokens in alike}) == 1
    by_index = draw(PROMPTS, row, keys(same, np.arange(14)), NEW).tokens
    by_prompt = draw(PROMPTS, row, keys(np.arange(14), same), NEW).tokens
    assert len({tokens.tobytes() for tokens in by_index}) > 10
    assert len({tokens.tobytes() for tokens in by_prompt}) > 10
    assert (by_index[1:] != by_prompt[1:]).any(axis=1).all()
    other_step = draw(PROMPTS, row, keys(same, np.arange(14), step=1), NEW).tokens
    assert (by_index != other_step).any(axis=1).sum() > 10


# --- rows that are paused and resumed ------------------------------------------------------------

PAUSE = 1 + np.arange(len(ROW)) % NEW  # tokens before the pause: every number there is
NEWER = INDEX + 100  # other coordinates than the rows were begun with


def joined(first, rest):
    """The rows of `first` with what `rest` added to them."""
    out = jax.tree.map(np.zeros_like, first.replace(paths=None))
    for i, (begun, more) in enumerate(zip(first.length, rest.length, strict=True)):
        for name in ("tokens", "logp"):
            whole = getattr(out, name)[i]
            whole[:begun] = getattr(first, name)[i, :begun]
            whole[begun : begun + more] = getattr(rest, name)[i, :more]
            assert not getattr(rest, name)[i, more:].any()
    return out.replace(length=first.length + rest.length, stopped=rest.stopped)


def cut(paths, lengths):
    return [
        dataclasses.replace(path, tokens=path.tokens[:length])
        for path, length in zip(paths, lengths, strict=True)
    ]


@pytest.mark.parametrize(
    "settings",
    [{}, {"slots": 4}, {"lengths": (5, 16)}, {"prompts": 2}, {"devices": 2, "slots": 4}],
    ids=str,
)
def test_a_row_paused_anywhere_is_the_row_drawn_in_one_go(settings):
    """Rows with 1 to 6 tokens in one call, with 4 slots also out of several caches."""
    first = make(**settings)(PROMPTS, ROW, keys(), PAUSE, keep=True)
    np.testing.assert_array_equal(first.length, np.minimum(PAUSE, straight().length))
    rest = resume(first.paths, keys(), NEW, **settings)
    assert_same(joined(first, rest), straight())
    for path, place, tokens, length in zip(
        rest.paths, ROW, straight().tokens, straight().length, strict=True
    ):
        assert path.prompt_length == len(PROMPTS[place])
        np.testing.assert_array_equal(path.tokens, tokens[:length])


def test_a_row_may_be_paused_after_every_token():
    found = make()(PROMPTS, ROW, keys(), 1, keep=True)
    for _ in range(NEW - 1):
        more = resume(found.paths, keys(), 1)
        found = joined(found, more).replace(paths=more.paths)
    assert_same(found, straight())
    assert not resume(found.paths, keys(), NEW).length.any()


def test_pauses_change_nothing_in_low_precision():
    draw = make(dtype="bfloat16", slots=4)
    first = draw(PROMPTS, ROW, keys(), PAUSE, keep=True)
    rest = resume(first.paths, keys(), NEW, dtype="bfloat16", slots=4)
    assert_same(joined(first, rest), draw(PROMPTS, ROW, keys(), NEW))


def children():
    """Three rows of one prompt each branch in three after two tokens: the parents, the leaves."""
    (rows,) = np.nonzero((ROW == 2) & (straight().length > 2))
    rows = rows[:3]
    parents = make()(PROMPTS, ROW[rows], keys(PROMPT[rows], INDEX[rows]), 2, keep=True)
    family = np.repeat(np.arange(3), 3)
    return rows, parents, family, keys(PROMPT[rows][family], 100 + np.arange(9))


def test_leaves_of_a_tree_are_drawn_as_if_alone_by_a_full_forward():
    """Token by token: probabilities without a cache, randomness by the place in the completion."""
    rows, parents, family, coordinates = children()
    leaves = resume([parents.paths[i] for i in family], coordinates, NEW)
    assert len({tokens.tobytes() for tokens in leaves.tokens}) > 6
    prompt, expected = PROMPTS[2], []
    steps = [(leaf, step) for leaf in range(9) for step in range(leaves.length[leaf])]
    for leaf, step in steps:
        before = [prompt, parents.tokens[family[leaf], :2], leaves.tokens[leaf, :step]]
        expected += [np.concatenate([*before, [token]]) for token in range(VOCABULARY)]
    logp = forward(expected)
    row_keys = rng.rows(coordinates.step_key, coordinates.prompt, coordinates.index)
    for i, (leaf, step) in enumerate(steps):
        chances = logp[i * VOCABULARY : (i + 1) * VOCABULARY, len(prompt) + 2 + step]
        uniform = jax.random.uniform(rng.tokens(row_keys[leaf][None], jnp.array([2 + step]))[0])
        token = int(draw_token(jnp.asarray(chances)[None], uniform[None], Method())[0][0])
        assert leaves.tokens[leaf, step] == token
        np.testing.assert_allclose(leaves.logp[leaf, step], chances[token], atol=1e-5)


def test_branches_change_neither_each_other_nor_the_path_that_they_leave():
    rows, parents, family, coordinates = children()
    paths = [parents.paths[i] for i in family]
    leaves = resume(paths, coordinates, NEW)
    for i, path in enumerate(paths):
        one = keys(coordinates.prompt[i : i + 1], coordinates.index[i : i + 1])
        assert_same(resume([path], one, NEW, keep=False), take(leaves, np.array([i])))
    rest = resume(parents.paths, keys(PROMPT[rows], INDEX[rows]), NEW)
    assert_same(joined(parents, rest), take(straight(), rows))


def test_a_cut_path_is_as_if_paused_there():
    full = make()(PROMPTS, ROW, keys(), NEW, keep=True)
    (rows,) = np.nonzero(full.length > 1)
    lengths = 1 + np.arange(len(rows)) % (full.length[rows] - 1)
    paths = cut([full.paths[i] for i in rows], lengths)
    begun = take(full, rows).replace(length=lengths)
    rest = resume(paths, keys(PROMPT[rows], INDEX[rows]), NEW)
    assert_same(joined(begun, rest), take(straight(), rows))
    # And under other coordinates, where what was cut off is not what follows.
    paused = make()(PROMPTS, ROW[rows], keys(PROMPT[rows], INDEX[rows]), lengths, keep=True)
    expected = resume(paused.paths, keys(PROMPT[rows], NEWER[rows]), NEW)
    assert_same(resume(paths, keys(PROMPT[rows], NEWER[rows]), NEW), expected)
    assert (expected.tokens[:, 0] != rest.tokens[:, 0]).any()


@pytest.mark.parametrize("settings", [{}, {"devices": 2, "slots": 4}], ids=str)
def test_rows_of_many_calls_are_resumed_together(settings):
    """Paths of three calls, the last one's cut from a resumed row, in any order."""
    draw = make(**settings)
    one = draw(PROMPTS, ROW, keys(), 2, keep=True)
    two = draw(PROMPTS, ROW, keys(index=NEWER), PAUSE, keep=True)
    three = resume(one.paths, keys(index=NEWER), 2, **settings)
    paths = (*one.paths, *two.paths, *cut(three.paths, [2] * len(ROW)))
    coordinates = keys(np.tile(PROMPT, 3), 200 + np.arange(len(paths)))
    order = np.random.default_rng(4).permutation(len(paths))
    together = resume(
        [paths[i] for i in order],
        keys(coordinates.prompt[order], coordinates.index[order]),
        NEW,
        **settings,
    )
    for start in range(0, len(paths), len(ROW)):
        part = slice(start, start + len(ROW))
        own = keys(coordinates.prompt[part], coordinates.index[part])
        expected = resume(paths[part], own, NEW, **settings)
        back = np.argsort(order)[part]
        assert_same(take(together, back), expected)


def test_the_limit_of_a_resumed_row_is_its_own_and_the_whole_row_has_one():
    first = make()(PROMPTS, ROW, keys(), 2, keep=True)
    limit = np.arange(len(ROW)) % (NEW + 3)  # up to 8, where 4 are left
    rest, full = resume(first.paths, keys(), limit), straight()
    np.testing.assert_array_equal(
        rest.length, np.minimum(np.maximum(full.length - 2, 0), np.minimum(limit, NEW - 2))
    )
    for i, length in enumerate(rest.length):
        np.testing.assert_array_equal(rest.tokens[i, :length], full.tokens[i, 2 : 2 + length])
        np.testing.assert_array_equal(
            rest.paths[i].tokens, full.tokens[i, : first.length[i] + length]
        )


def test_a_stopped_row_stays_stopped_unless_the_stop_token_is_cut_off():
    full = make()(PROMPTS, ROW, keys(), NEW, keep=True)
    (rows,) = np.nonzero(full.stopped & (full.length > 1))
    rest = resume([full.paths[i] for i in rows], keys(PROMPT[rows], NEWER[rows]), NEW)
    assert rest.stopped.all() and not rest.length.any()
    assert list(rest.paths) == [full.paths[i] for i in rows]
    again = cut([full.paths[i] for i in rows], full.length[rows] - 1)
    assert resume(again, keys(PROMPT[rows], NEWER[rows]), NEW).length.all()


def test_nothing_is_kept_unless_asked_for():
    def alive():
        gc.collect()
        return len(jax.live_arrays())

    straight()
    before = alive()
    assert make()(PROMPTS, ROW, keys(), 2).paths is None
    assert alive() == before
    found = make()(PROMPTS, ROW, keys(), 2, keep=True)
    kept = alive()
    assert kept > before
    assert resume(found.paths, keys(), 2, keep=False).paths is None
    assert alive() == kept
    del found
    assert alive() == before


def test_no_shape_of_a_tree_compiles_anew():
    sampler = Sampler(
        model=SHALLOW,
        method=Method(),
        dtype="float32",
        prompts=2,
        slots=4,
        lengths=(8,),
        max_new_tokens=7,
        stop_ids=(),
    )
    mesh = meshes.make(2)
    params = jax.device_put(tiny.weights(SHALLOW), meshes.everywhere(mesh))
    draw = make_draw(sampler, mesh)

    def coordinates(size):
        return keys(np.zeros(size, int), np.arange(size))

    def tree(row, limits, branches, seed):
        """Rows that go on together, each time from paths taken at random from all calls before."""
        generator = np.random.default_rng(seed)
        found = draw(params, PROMPTS[:3], row, coordinates(len(row)), limits[0], keep=True)
        paths = list(found.paths)
        for limit in limits[1:]:
            chosen = [paths[i] for i in generator.integers(0, len(paths), branches)]
            chosen = cut(chosen, [generator.integers(1, len(p.tokens) + 1) for p in chosen])
            paths += draw.resume(params, chosen, coordinates(branches), limit, keep=True).paths
        return paths

    one, other = [
        draw(params, PROMPTS[:1], np.zeros(1, int), coordinates(1), 1, keep=True).paths[0]
        for _ in range(2)
    ]
    draw.resume(params, [one, other], coordinates(2), 1, keep=True)
    compiles = Compiles()
    tree(np.array([0, 1, 2]), (1, 2, 3), 3, seed=0)
    tree(np.arange(11) % 3, (3, 1, np.arange(9) % 4, 2), 9, seed=1)
    compiles.close()
    assert compiles.count == 0


def test_the_stand_in_of_other_tests_pauses_as_the_sampler_does():
    draw = fakes.Draw(says=lambda text, prompt, index: text + "abcdefgh"[: prompt + index], new=6)
    prompts, row = [np.array(fakes.encode(text), np.int32) for text in "xy"], np.array([0, 1, 0, 1])
    coordinates = keys(row, np.array([0, 1, 4, 5]))
    whole = draw(None, prompts, row, coordinates, 6)
    assert whole.length.tolist() == [2, 4, 6, 6] and whole.stopped.tolist() == [1, 1, 1, 0]
    first = draw(None, prompts, row, coordinates, np.array([2, 1, 3, 6]), keep=True)
    assert first.length.tolist() == [2, 1, 3, 6] and first.stopped.tolist() == [1, 0, 0, 0]
    assert_same(joined(first, draw.resume(None, first.paths, coordinates, 6)), whole)
    other = draw.resume(None, cut(first.paths, [1] * 4), keys(row, row), 2, keep=True)
    assert [fakes.decode(path.tokens) for path in other.paths] == ["x", "yab", "x", "yab"]
    assert other.stopped.tolist() == [1, 0, 1, 0]
    assert [call["resumed"] for call in draw.calls] == [False, False, True, True]


# --- log-probs -----------------------------------------------------------------------------------


def test_log_probs_are_the_trainer_s():
    samples = straight()
    expected = forward(whole_rows(samples))
    for i, place in enumerate(ROW):
        start, length = len(PROMPTS[place]), samples.length[i]
        np.testing.assert_allclose(
            samples.logp[i, :length], expected[i, start : start + length], atol=1e-4
        )
        assert not samples.logp[i, length:].any() and not samples.tokens[i, length:].any()


def test_log_probs_are_near_the_trainer_s_in_low_precision():
    """Log-probs down to -5.8; .007 on average and .039 at most were measured."""
    samples = make(dtype="bfloat16")(PROMPTS, ROW, keys(), NEW)
    expected, gaps = forward(whole_rows(samples), dtype="bfloat16"), []
    for i, place in enumerate(ROW):
        start, length = len(PROMPTS[place]), samples.length[i]
        gaps += list(np.abs(samples.logp[i, :length] - expected[i, start : start + length]))
    assert 0 < np.mean(gaps) < 0.01 and max(gaps) < 0.05


def test_greedy_is_the_argmax_of_a_full_forward():
    row, zero = np.arange(5), np.zeros(5, int)
    samples = make(method=Method(temperature=0.0))(PROMPTS, row, keys(zero, zero), NEW)
    assert not samples.logp.any()  # the one possible token has probability one
    for i, prompt in enumerate(PROMPTS):
        rows, stopped = [prompt], False
        while len(rows[0]) < len(prompt) + NEW and not stopped:
            continued = [np.append(rows[0], token) for token in range(VOCABULARY)]
            logp = forward(continued)[:, len(rows[0])]
            rows = [continued[int(np.argmax(logp))]]
            stopped = rows[0][-1] in STOPS
        found = samples.tokens[i, : samples.length[i]]
        assert found.tolist() == rows[0][len(prompt) :].tolist()
        assert samples.stopped[i] == stopped


# --- stopping ------------------------------------------------------------------------------------


def test_a_row_ends_with_the_first_of_several_stop_tokens():
    samples = straight()
    used = set()
    for tokens, length, stopped in zip(
        samples.tokens, samples.length, samples.stopped, strict=True
    ):
        is_stop = np.isin(tokens[:length], STOPS)
        assert is_stop.sum() == stopped and (not stopped or is_stop[-1])
        assert stopped or length == NEW
        used |= set(tokens[:length][is_stop].tolist())
    assert len(used) > 1


def test_the_limit_is_a_row_s_own():
    limit = np.arange(len(ROW)) % (NEW + 1)
    found, full = make()(PROMPTS, ROW, keys(), limit), straight()
    np.testing.assert_array_equal(found.length, np.minimum(full.length, limit))
    np.testing.assert_array_equal(found.stopped, full.stopped & (full.length <= limit))
    for i, length in enumerate(found.length):
        np.testing.assert_array_equal(found.tokens[i, :length], full.tokens[i, :length])
        assert not found.tokens[i, length:].any() and not found.logp[i, length:].any()


# --- the distribution sampled from ---------------------------------------------------------------

METHODS = {
    "plain": Method(),
    "hot": Method(temperature=1.7),
    "top_k": Method(top_k=4),
    "top_p": Method(top_p=0.7),
}


@pytest.mark.parametrize("name", METHODS)
def test_tokens_are_drawn_from_their_log_probs(name):
    count, prompt, method = 4096, PROMPTS[0], METHODS[name]
    one_token = Sampler(
        model=SHALLOW,
        method=method,
        dtype="float32",
        prompts=1,
        slots=1024,
        lengths=(len(prompt),),
        max_new_tokens=1,
        stop_ids=(0,),
    )
    params = tiny.weights(SHALLOW)
    every = [np.append(prompt, token) for token in range(VOCABULARY)]
    logp = forward(every, model=SHALLOW)[:, len(prompt)]
    expected = np.array(oracles.token_chances(logp, method.temperature, method.top_k, method.top_p))
    draw = make_draw(one_token, meshes.make(1))
    places = np.zeros(count, int)
    found = draw(params, [prompt], places, keys(places, np.arange(count)), 1)
    counts = np.bincount(found.tokens[:, 0], minlength=VOCABULARY)
    assert not counts[expected == 0].any()
    np.testing.assert_allclose(np.exp(found.logp[:, 0]), expected[found.tokens[:, 0]], rtol=1e-4)
    if name == "hot":  # the trainer has the temperature too
        hot = forward(every, method.temperature, SHALLOW)[:, len(prompt)]
        np.testing.assert_allclose(np.exp(hot), expected, rtol=1e-4)
    # Rare tokens share a cell, as the chi-square's approximation wants.
    rare = expected * count < 5
    cells = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum()) * count
    assert stats.chisquare(cells[wanted > 0], wanted[wanted > 0]).pvalue > 1e-3


# --- bad input -----------------------------------------------------------------------------------


def test_a_prompt_must_fit():
    row, zero = np.zeros(1, int), np.zeros(1, int)
    with pytest.raises(ValueError, match="9 tokens; allowed: at most 8"):
        make()([np.ones(9, np.int32)], row, keys(zero, zero), NEW)
    with pytest.raises(ValueError, match="empty prompt"):
        make()([np.ones(0, np.int32)], row, keys(zero, zero), NEW)


def test_only_a_row_that_was_begun_can_be_resumed():
    found = make()(PROMPTS, ROW, keys(), np.arange(len(ROW)), keep=True)
    with pytest.raises(ValueError, match="no tokens cannot be resumed; allowed: at least one"):
        resume(found.paths, keys(), NEW)
