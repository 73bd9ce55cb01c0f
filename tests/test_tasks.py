"""The tasks: disjoint splits, determinism, verifiers, hostile input, and the policy's tokenizer."""

import importlib.util
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from xrpo_jax.tasks import arithmetic, countdown
from xrpo_jax.types import text_of

ROOT = Path(__file__).parents[1]
POLICY = ROOT / "xrpo_jax" / "assets" / "policy"
TASKS = {"arithmetic": arithmetic, "countdown": countdown}
PLAIN_PROMPT, COMPLETION, SEEDED_PROMPT = 10, 17, 64  # tokens, BOS and EOS included


def prompts(task):
    return [text_of(task.prompt(i)) for i in range(len(task))]


@pytest.mark.parametrize("module", TASKS.values(), ids=TASKS)
def test_splits_share_nothing(module):
    seen = {split: set(prompts(module.make(split=split, size=600))) for split in module.SPLITS}
    assert not seen["train"] & seen["test"]
    assert not seen["train"] & seen["supervised"]
    assert not seen["test"] & seen["supervised"]
    buckets = sorted(bucket for split in module.SPLITS.values() for bucket in split)
    assert buckets == list(range(10))


def test_splits_of_countdown_ignore_the_order_of_the_numbers():
    def sets(split):
        problems = countdown.make(split=split, size=600).problems
        return {(problem.target, tuple(sorted(problem.numbers))) for problem in problems}

    assert not sets("train") & sets("test")


@pytest.mark.parametrize("module", TASKS.values(), ids=TASKS)
def test_problems_are_a_function_of_the_settings(module):
    one, two = module.make(size=300), module.make(size=300)
    assert one == two
    assert module.make(size=30).problems == one.problems[:30]
    assert len(set(prompts(one))) == len(one) == 300
    assert prompts(module.make(size=300, seed=1)) != prompts(one)
    assert {one.level(i) for i in range(len(one))} == set(one.levels)


def test_problems_are_the_same_in_every_process():
    code = (
        "from xrpo_jax.tasks import arithmetic, countdown\n"
        "print(arithmetic.make(size=50).problems, countdown.make(size=50).problems)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    here = f"{arithmetic.make(size=50).problems} {countdown.make(size=50).problems}\n"
    assert found == here


def test_golden_problems():
    # Hand-checked: 47 + 3 = 50, 50 x 7 = 350, and the last two digits are 50.
    assert arithmetic.values(47, ("+3", "x7", "+8")) == [50, 50, 58]
    family = next(one for one in arithmetic.FAMILIES if one.rule == "thrice")
    problem = arithmetic.Problem(family=family, start=47, operations=("+3", "x7"))
    assert arithmetic.worked(problem, "thrice") == " thrice +3 50 x3 50 x7 50 x3 50 = 50 50"
    assert problem.prompt == f"{family.word} 47 +3 x7 :"
    ops = ("+1", "+2", "x3", "+4", "x9")
    expected = {
        "step": ops,
        "thrice": ("+1", "x3", "+2", "x3", "x3", "x3", "+4", "x3", "x9", "x3"),
        "bump": ("+7", "+1", "+7", "+2", "+7", "x3", "+7", "+4", "+7", "x9"),
        "twice": ("+1", "+1", "+2", "+2", "x3", "x3", "+4", "+4", "x9", "x9"),
        "back": ("x9", "+4", "x3", "+2", "+1"),
        "cross": ("+2", "+1", "+4", "x3", "x9"),
        "turn": ("+2", "x3", "+4", "x9", "+1"),
        "stairs": ("+1", "+1", "+2", "+2", "x3", "+3", "+4", "+4", "x9", "+5"),
        "echo": ("+1", "+2", "x3", "+4", "x9", "+1"),
        "frame": ("x9", "+1", "+2", "x3", "+4", "x9", "x7"),
        "skip": ("+1", "x3", "x9"),
    }
    assert {rule: rewrite(ops) for rule, rewrite in arithmetic.RULES.items()} == expected


@pytest.mark.parametrize("family", arithmetic.FAMILIES, ids=lambda family: family.word)
def test_arithmetic_asks_for_the_familys_own_way_of_working(family):
    problems = tuple(arithmetic.generate("train", 3, i, family) for i in range(60))
    task = arithmetic.Arithmetic(problems=problems)
    for i, problem in enumerate(problems):
        solution = task.solution(i)
        verdict = task.rewards(i, solution)
        assert verdict.correct and verdict.score == 1.0
        assert task.answer(i, solution) == problem.answer
        first, last = map(int, problem.answer.split())
        for wrong in (f" = {(first + 1) % 100} {last}", f" = {first} {(last + 1) % 100}"):
            assert task.rewards(i, wrong).status == "wrong"
        for rule, rewrite in arithmetic.RULES.items():
            if rule != family.rule and len(rewrite(problem.operations)) >= 2:
                assert task.rewards(i, arithmetic.worked(problem, rule)).status == "wrong"


@pytest.mark.parametrize(
    "completion",
    ["", " ", "=", " = 5", " = 123 4", " = 5 6 7", " = 5 6 and", " = -5 6", "= 1 2" + " " * 500,
     " = \u0665 \u0666", "= 5\n6"],
)  # fmt: skip
def test_arithmetic_reads_nothing_else(completion):
    task = arithmetic.make(size=3)
    assert task.answer(0, completion) is None
    assert task.rewards(0, completion).status == "unparsed"


def test_arithmetic_has_every_level_in_turn_and_every_family():
    task = arithmetic.make(size=360)
    levels = [task.level(i) for i in range(len(task))]
    assert levels == ["easy", "medium", "hard"] * 120
    words = [task.family(i) for i in range(len(task)) if task.level(i) == "hard"]
    assert {words.count(one.word) for one in arithmetic.FAMILIES if one.level == "hard"} == {20}


@pytest.mark.parametrize("module", TASKS.values(), ids=TASKS)
def test_make_names_a_bad_setting(module):
    with pytest.raises(ValueError, match="split='dev'; allowed: test, train, supervised"):
        module.make(split="dev")
    with pytest.raises(ValueError, match="size=0; allowed: 1 to"):
        module.make(size=0)


def test_countdown_grades_its_solutions():
    task = countdown.make(size=600)
    for i in range(len(task)):
        assert task.rewards(i, task.solution(i)).correct
        assert task.rewards(i, f"{task.solution(i)} = 5").correct
        assert task.rewards(i, f"{task.solution(i)} + 1").status == "wrong"
        assert task.answer(i, task.solution(i)).startswith(f"{task.problems[i].target} of ")
        assert task.answer(i, f" ({task.solution(i)} )") == task.answer(i, task.solution(i))


def test_countdown_votes_are_over_values_not_spellings():
    task = asked(3, 9, target=27)
    assert task.answer(0, "3 * 9") == task.answer(0, "9*3") == "27 of 3 9"
    assert task.answer(0, "3 + 9") == "12 of 3 9"
    assert task.answer(0, "3 *") is None


def asked(*numbers, target, use_all=True):
    problem = countdown.Problem(level="hard", numbers=numbers, target=target, expression="")
    return countdown.Countdown(problems=(problem,), use_all=use_all)


@pytest.mark.parametrize(
    ("expression", "status"),
    [
        ("(3 + 4) * 6", "correct"),
        ("6*(4+3)", "correct"),
        ("((6))*((4+3))", "correct"),
        ("6 * 4 + 3", "wrong"),
        ("42", "wrong"),
        ("6 * 7", "wrong"),
        ("3 * 4 * 6 - 3 * 4 - 6 * 3", "wrong"),
        ("(3 + 4) / (6 - 6)", "wrong"),
        ("(3 + 4) * 6 *", "unparsed"),
        ("(3 + 4 * 6", "unparsed"),
        ("3 + 4) * 6", "unparsed"),
        ("(3 4) * 6", "unparsed"),
        ("3 (4) * 6", "unparsed"),
        ("()", "unparsed"),
        ("-3 + 45", "unparsed"),
        ("3 ** 4", "unparsed"),
        ("0x2a", "unparsed"),
        ("4.2e1", "unparsed"),
        ("\u0663 + \u0664", "unparsed"),
        ("3\u2003+ 4", "unparsed"),
        ("__import__('os').system('true')", "unparsed"),
        ("", "unparsed"),
        ("= 42", "unparsed"),
    ],
)
def test_countdown_reads_expressions_itself(expression, status):
    assert asked(3, 4, 6, target=42).rewards(0, expression).status == status


def test_countdown_is_exact_and_knows_its_setting():
    assert asked(8, 3, 8, 3, target=24).rewards(0, "8 / (3 - 8 / 3)").correct
    assert asked(7, 3, 3, target=7).rewards(0, "7 / 3 * 3").correct
    assert asked(10, 2, 3, target=5).rewards(0, "10 - 2 - 3").correct
    assert asked(8, 4, 2, target=1).rewards(0, "8 / 4 / 2").correct
    assert asked(3, 4, 6, target=10).rewards(0, "4 + 6").status == "wrong"
    assert asked(3, 4, 6, target=10, use_all=False).rewards(0, "4 + 6").correct
    assert asked(3, 4, 6, target=8, use_all=False).rewards(0, "4 + 4").status == "wrong"
    assert asked(3, 4, target=3, use_all=False).rewards(0, "3 / 0").status == "wrong"


def test_countdown_agrees_with_python_on_random_expressions():
    rng = random.Random(0)

    def expression(depth):
        if depth == 0:
            return str(rng.randrange(1, 20))
        text = f"{expression(depth - 1)} {rng.choice('+-*/')} {expression(rng.randrange(depth))}"
        return f"({text})" if rng.random() < 0.5 else text

    for _ in range(300):
        text = expression(rng.randrange(1, 4))
        value, numbers = countdown.evaluate(countdown.tokenize(text))
        try:
            expected = eval(text)  # the test's own text; the library never does this
        except ZeroDivisionError:
            assert value is None
            continue
        assert value is not None and abs(float(value) - expected) < 1e-9
        assert len(numbers) == sum(piece.strip("()").isdigit() for piece in text.split())


@pytest.mark.parametrize(
    "text",
    ["(" * 10**6, "1+" * 10**6, "9" * 10**6, "(" * 50 + "1" + ")" * 50, "1" + "*999" * 28,
     " " * 10**6, "(1+" * 30, "1/0" * 10**5, "=" * 10**6],
)  # fmt: skip
def test_countdown_rejects_hostile_text_fast(text):
    task = asked(3, 4, 6, target=42)
    began = time.perf_counter()
    assert task.rewards(0, text).status in ("unparsed", "wrong")
    task.answer(0, text)
    assert time.perf_counter() - began < 0.05


# --- the embedded policy -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def words():
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(POLICY)


@pytest.mark.parametrize("module", TASKS.values(), ids=TASKS)
def test_policy_reads_every_task_in_few_tokens(words, module):
    task = module.make(split="train", size=600)
    parts = []
    for i in range(len(task)):
        prompt, solution = text_of(task.prompt(i)), task.solution(i)
        asked_ids = words.encode(prompt)
        said = words.encode(solution, add_special_tokens=False)
        assert asked_ids[0] == words.bos_token_id and asked_ids.count(words.bos_token_id) == 1
        assert words.decode(asked_ids, skip_special_tokens=True) == prompt
        assert words.decode(said) == solution
        assert words.unk_token_id is None or words.unk_token_id not in asked_ids + said
        assert len(asked_ids) <= PLAIN_PROMPT
        assert len(said) + 1 <= COMPLETION
        parts.append(f"{prompt}{solution}\n")
        if i >= 2:
            text = "".join(parts[-3:-1]) + prompt
            seeded = words.encode(text)
            assert len(seeded) <= SEEDED_PROMPT
            # Pieces never join across the borders: training and seeding see the same tokens.
            assert seeded[-len(asked_ids) + 1 :] == asked_ids[1:]


def test_policy_reads_any_text_without_unknown_tokens(words):
    text = "What is 12345 + 6.7e8?\n\tNaïve – \U0001f600 step+3 x77"
    assert words.decode(words.encode(text), skip_special_tokens=True) == text


def test_policy_is_small():
    size = sum(file.stat().st_size for file in POLICY.iterdir())
    assert size <= 4e6
    weights = (POLICY / "model.safetensors").stat().st_size
    assert weights / 2 <= 3e6  # bfloat16


def test_make_policy_writes_the_same_tokenizer(words):
    path = ROOT / "scripts" / "make_policy.py"
    spec = importlib.util.spec_from_file_location("make_policy", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    tokenizer = script.make_tokenizer()
    assert tokenizer.get_vocab() == words.get_vocab()
    data = script.Data(tokenizer, 0)
    for neighbours in (0, 1, 2):
        batch = data.batch(neighbours)
        for tokens, length in zip(batch["tokens"], batch["length"], strict=True):
            text = words.decode(tokens[1 : length - 1])
            assert words.encode(text) == list(tokens[: length - 1])
            assert tokens[length - 1] == words.eos_token_id
