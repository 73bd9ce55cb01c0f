"""XRPO's seeding: who is seeded, what the corpus admits and forgets, what is shown to whom."""

import dataclasses

import numpy as np
import pytest
from fakes import END, decode, encode, progress, rollout, said, tools

from xrpo_jax.explore.embed import ngrams
from xrpo_jax.explore.seeding import Exemplars, NoSeed
from xrpo_jax.tasks import arithmetic
from xrpo_jax.types import Kind, Progress, Request, normal, text_of

NEW = 12  # tokens of a completion at most


def table(similarities: dict[str, list[float]]):
    """An embedder that looks vectors up, so that a test chooses who is near whom."""

    def embed(texts):
        return np.array([similarities[text] for text in texts], np.float32)

    return embed


def angle(cosine: float) -> list[float]:
    return [cosine, (1 - cosine**2) ** 0.5]


def step(rows_by_prompt: dict[int, list]) -> Progress:
    """A finished step: prompt -> its rollouts."""
    return Progress(
        prompts=tuple(rows_by_prompt),
        rollouts=tuple(tuple(rows) for rows in rows_by_prompt.values()),
        batch=len(rows_by_prompt),
    )


def corpus(seeder: Exemplars, *texts: tuple[int, str]) -> dict:
    """A memory that admitted (prompt, completion) one step after the other."""
    memory = seeder.init(NEW)
    for number, (prompt, text) in enumerate(texts):
        memory = seeder.observe(memory, step({prompt: [rollout(True, text=text)]}), number)
    return memory


def contents(memory: dict) -> dict[int, str]:
    """Prompt -> completion, from the arrays."""
    return {
        int(prompt): decode(tokens[:length])
        for prompt, tokens, length in zip(
            memory["prompt"], memory["tokens"], memory["length"], strict=True
        )
        if prompt >= 0
    }


# Question 0 and five others, ever less similar to it.
PROMPTS = ["0?", "1?", "2?", "3?", "4?", "5?"]
COSINES = [1.0, 0.9, 0.8, 0.5, 0.3, 0.1]
EMBED = table({text: angle(cosine) for text, cosine in zip(PROMPTS, COSINES, strict=True)})
SEEDER = Exemplars(embed=EMBED, min_similarity=0.0)
TOOLS = tools(PROMPTS)
FAILED = progress([(0, 3)])  # slot 0 is prompt 0
ASK = Request(slot=0, n=2)


# --- trigger -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows, seeded",
    [
        ([], False),  # the base round
        ([False], True),
        ([False, False, False], True),
        ([False, True, False], False),
        ([True, True], False),
    ],
)
def test_only_prompts_that_always_failed_are_seeded(rows, seeded):
    memory = corpus(SEEDER, (1, "one"))
    context = SEEDER(ASK, progress([rows]), memory, TOOLS)
    assert context.kind == (Kind.SEEDED if seeded else Kind.PLAIN)
    assert said(context.sampled) == ("1?one\n0?" if seeded else "0?")


def test_a_prompt_that_seeded_rollouts_solved_is_plain_again():
    memory = corpus(SEEDER, (1, "one"))
    rows = (rollout(False), rollout(True, kind=Kind.SEEDED))
    done = Progress(prompts=(0,), rollouts=(rows,), batch=1)
    assert SEEDER(ASK, done, memory, TOOLS).kind == Kind.PLAIN
    failed = Progress(
        prompts=(0,), rollouts=((rows[0], rollout(False, kind=Kind.SEEDED)),), batch=1
    )
    assert SEEDER(ASK, failed, memory, TOOLS).kind == Kind.SEEDED


def test_correctness_not_reward_is_the_trigger():
    memory = corpus(SEEDER, (1, "one"))
    shortened = Progress(prompts=(0,), rollouts=((rollout(True, reward=-0.5),),), batch=1)
    assert SEEDER(ASK, shortened, memory, TOOLS).kind == Kind.PLAIN


def test_nothing_retrieved_is_zero_shot():
    context = SEEDER(ASK, FAILED, SEEDER.init(NEW), TOOLS)
    assert context == NoSeed()(ASK, FAILED, {}, TOOLS)
    assert context.kind == Kind.PLAIN and context.sampled == context.trained
    assert said(context.trained) == "0?"


def test_no_seed_shows_the_prompt_alone_and_remembers_nothing():
    assert not NoSeed().seeds


# --- what is shown -------------------------------------------------------------------------------


def test_the_nearest_stands_next_to_the_question():
    memory = corpus(SEEDER, (3, "three"), (1, "one"), (5, "five"), (2, "two"))
    context = SEEDER(ASK, FAILED, memory, TOOLS)
    assert said(context.sampled) == "2?two\n1?one\n0?"
    shots = dataclasses.replace(SEEDER, shots=3)
    assert said(shots(ASK, FAILED, memory, TOOLS).sampled) == "3?three\n2?two\n1?one\n0?"
    assert said(dataclasses.replace(SEEDER, shots=9)(ASK, FAILED, memory, TOOLS).sampled) == (
        "5?five\n3?three\n2?two\n1?one\n0?"
    )


@pytest.mark.parametrize("loss_context", ["generation", "plain"])
def test_loss_context_is_what_the_learner_sees(loss_context):
    seeder = dataclasses.replace(SEEDER, loss_context=loss_context)
    context = seeder(ASK, FAILED, corpus(seeder, (1, "one")), TOOLS)
    assert context.kind == Kind.SEEDED and said(context.sampled) == "1?one\n0?"
    assert said(context.trained) == {"generation": "1?one\n0?", "plain": "0?"}[loss_context]


def test_never_the_same_problem():
    memory = corpus(SEEDER, (0, "own"), (4, "four"))
    assert said(SEEDER(ASK, FAILED, memory, TOOLS).sampled) == "4?four\n0?"
    assert SEEDER(ASK, FAILED, corpus(SEEDER, (0, "own")), TOOLS).kind == Kind.PLAIN


def test_never_an_identical_text_however_it_is_spaced_or_written():
    prompts = ["What is 2 + 3", "what  is 2\n+ 3 ", "another one"]
    embed = table(dict(zip(prompts, ([1, 0], [0.5, 0.0], [0.0, 1.0]), strict=True)))
    seeder = dataclasses.replace(SEEDER, embed=embed)
    memory = corpus(seeder, (1, "five"), (2, "no"))
    assert (
        said(seeder(ASK, FAILED, memory, tools(prompts)).sampled) == "another oneno\nWhat is 2 + 3"
    )
    assert normal(prompts[0]) == normal(prompts[1])


def test_never_above_the_largest_similarity():
    prompts = ["q", "near", "limit", "far"]
    vectors = [[1.0, 0.0], angle(0.96), [0.95, 0.3122499], angle(0.2)]
    embed = table(dict(zip(prompts, vectors, strict=True)))
    seeder = dataclasses.replace(SEEDER, embed=embed)
    memory = corpus(seeder, (1, "N"), (2, "L"), (3, "F"))
    limit = float(np.float32(0.95))
    seeder = dataclasses.replace(seeder, max_similarity=limit)
    assert said(seeder(ASK, FAILED, memory, tools(prompts)).sampled) == "farF\nlimitL\nq"
    free = dataclasses.replace(seeder, max_similarity=1.0)
    assert said(free(ASK, FAILED, memory, tools(prompts)).sampled) == "limitL\nnearN\nq"


def test_never_below_the_least_similarity():
    memory = corpus(SEEDER, (2, "two"), (3, "three"), (5, "five"))
    for least, shown in ((0.0, "3?three\n2?two\n0?"), (0.6, "2?two\n0?"), (0.9, "0?")):
        seeder = dataclasses.replace(SEEDER, min_similarity=least)
        assert said(seeder(ASK, FAILED, memory, TOOLS).sampled) == shown


def test_equally_near_ones_are_taken_in_a_fixed_order():
    embed = table(dict(zip(PROMPTS, [[1.0, 0.0]] + [angle(0.5)] * 5, strict=True)))
    seeder = dataclasses.replace(SEEDER, embed=embed)
    memory = corpus(seeder, (4, "four"), (2, "two"), (3, "three"))
    assert said(seeder(ASK, FAILED, memory, TOOLS).sampled) == "2?two\n4?four\n0?"


def test_the_default_embedder_finds_neighbours_of_the_same_family():
    # One in 24 problems shares a hard problem's family; two shots from 200 mostly do (83 %).
    task = arithmetic.make(size=600)
    hard = [i for i in range(200, 600) if task.level(i) == "hard"][:60]
    vectors = ngrams([text_of(task.prompt(i)) for i in range(200)])
    found = []
    for question in hard:
        nearest = np.argsort(-vectors @ ngrams([text_of(task.prompt(question))])[0], kind="stable")[
            :2
        ]
        found += [task.family(int(i)) == task.family(question) for i in nearest]
    assert np.mean(found) > 0.7


def test_default_embeddings_have_unit_norm_and_know_no_batch():
    texts = ["make 3 from 1 2 :", "Make 3  from 1 2 :", "", "x"]
    vectors = ngrams(texts)
    assert vectors.dtype == np.float32 and vectors.shape == (4, vectors.shape[1])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), [1, 1, 0, 1], atol=1e-6)
    np.testing.assert_array_equal(vectors[0], vectors[1])  # the same normalised text
    np.testing.assert_array_equal(vectors[3:], ngrams(["x"]))


# --- the prompt limit ----------------------------------------------------------------------------


def limited(limit: int, completions=((1, "abcdef"), (2, "uvwxyz"))) -> str:
    """What is shown when a prompt with exemplars may have `limit` characters."""
    memory = corpus(SEEDER, *completions)
    return said(SEEDER(ASK, FAILED, memory, tools(PROMPTS, prompt_limit=limit)).sampled)


def test_the_farthest_exemplar_goes_first_and_the_last_one_is_cut():
    both = "2?uvwxyz\n1?abcdef\n0?"
    assert limited(len(both)) == both
    one = "1?abcdef\n0?"
    assert limited(len(both) - 1) == one
    assert limited(len(one)) == one
    assert limited(len(one) - 1) == "1?abcde\n0?"
    assert limited(len(one) - 5) == "1?a\n0?"
    assert limited(len(one) - 6) == "0?"  # nothing left of its completion


@pytest.mark.parametrize("limit", range(2, 24))
def test_a_seeded_prompt_never_exceeds_the_limit(limit):
    shown = limited(limit)
    assert len(encode(shown)) <= limit and shown.endswith("0?")


def test_a_cut_to_nothing_is_plain_in_kind_too():
    memory = corpus(SEEDER, (1, "abc"))
    context = SEEDER(ASK, FAILED, memory, tools(PROMPTS, prompt_limit=3))
    assert context.kind == Kind.PLAIN and said(context.trained) == "0?"


# --- corpus --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row, admitted",
    [
        (rollout(True, text="good"), True),
        (rollout(False, text="wrong"), False),
        (rollout(True, text="cut", stopped=False), False),
        (rollout(True, text="seeded", kind=Kind.SEEDED), False),
        (rollout(True, text="penalised", reward=-1.0), True),  # correctness decides, not reward
    ],
)
def test_plain_stopped_and_correct_rollouts_are_admitted(row, admitted):
    memory = SEEDER.observe(SEEDER.init(NEW), step({4: [row]}), 7)
    assert contents(memory) == ({4: row.text} if admitted else {})
    if admitted:
        place = int(np.argmax(memory["prompt"]))
        assert memory["step"][place] == 7
        assert memory["tokens"][place, memory["length"][place] - 1] == END


def test_one_a_problem_the_newest():
    rows = [
        rollout(True, text="a long one"),
        rollout(True, text="mid"),
        rollout(True, text="last!"),
    ]
    memory = SEEDER.observe(SEEDER.init(NEW), step({4: rows, 2: [rollout(True, text="x")]}), 0)
    assert contents(memory) == {4: "last!", 2: "x"}
    memory = SEEDER.observe(memory, step({4: [rollout(True, text="much later")]}), 1)
    assert contents(memory) == {4: "much later", 2: "x"}
    assert memory["step"].max() == 1 and (memory["prompt"] == 4).sum() == 1


def test_one_a_problem_the_shortest():
    seeder = dataclasses.replace(SEEDER, keep="shortest")
    rows = [
        rollout(True, text="a long one"),
        rollout(True, text="mid"),
        rollout(True, text="last!"),
    ]
    memory = seeder.observe(seeder.init(NEW), step({4: rows}), 0)
    assert contents(memory) == {4: "mid"}
    memory = seeder.observe(memory, step({4: [rollout(True, text="longer")]}), 1)
    assert contents(memory) == {4: "mid"} and memory["step"].max() == 0
    memory = seeder.observe(memory, step({4: [rollout(True, text="ab")]}), 2)
    assert contents(memory) == {4: "ab"} and memory["step"].max() == 2


def test_a_shorter_completion_leaves_nothing_of_the_longer_one():
    memory = corpus(SEEDER, (4, "a long one"), (4, "b"))
    assert contents(memory) == {4: "b"}
    assert not memory["tokens"][memory["prompt"] == 4][0, 2:].any()


def test_beyond_capacity_the_oldest_update_is_evicted():
    seeder = dataclasses.replace(SEEDER, capacity=3)
    memory = corpus(seeder, (0, "0"), (1, "1"), (2, "2"))
    assert contents(memory) == {0: "0", 1: "1", 2: "2"}
    memory = seeder.observe(memory, step({0: [rollout(True, text="again")]}), 3)
    memory = seeder.observe(memory, step({3: [rollout(True, text="3")]}), 4)
    assert contents(memory) == {0: "again", 2: "2", 3: "3"}  # 1 was updated longest ago
    memory = seeder.observe(memory, step({4: [rollout(True, text="4")]}), 5)
    assert contents(memory) == {0: "again", 4: "4", 3: "3"}


def test_memory_has_fixed_shapes_and_observing_leaves_the_old_one_alone():
    seeder = dataclasses.replace(SEEDER, capacity=3)
    before = corpus(seeder, (0, "0"))
    kept = {name: values.copy() for name, values in before.items()}
    after = seeder.observe(before, step({1: [rollout(True, text="1")]}), 1)
    assert contents(after) == {0: "0", 1: "1"}
    for name, values in before.items():
        np.testing.assert_array_equal(values, kept[name])
        assert after[name].shape == values.shape and after[name].dtype == values.dtype


# --- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"keep": "best"}, "algorithm.keep='best'; allowed: newest, shortest"),
        ({"loss_context": "both"}, "algorithm.loss_context='both'; allowed: generation, plain"),
        ({"shots": 0}, "algorithm.shots=0; allowed: at least 1"),
        ({"capacity": 0}, "algorithm.capacity=0; allowed: at least 1"),
        ({"min_similarity": 0.99}, "min_similarity=0.99, .*max_similarity=0.95; allowed: cosines"),
        ({"max_similarity": 1.5}, "max_similarity=1.5; allowed: cosines in this order"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        Exemplars(**settings)
