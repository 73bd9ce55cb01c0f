"""The task `files`: the public benchmark files, splits, few-shot prompts and grading."""

import json
import pathlib
import subprocess
import sys

import pytest

from xrpo_jax.data.load import load
from xrpo_jax.data.read import read
from xrpo_jax.tasks import files
from xrpo_jax.verify.structure import parse, spell

DATA = pathlib.Path(__file__).parents[2] / "shared" / "data"
# The last lines of addsub and multiarith have no line end: `wc -l` counts one row less.
ROWS = {
    "gsm8k_train.jsonl": 7473, "gsm8k_test.jsonl": 1319, "math500.jsonl": 500, "aime24.jsonl": 30,
    "amc23.jsonl": 40, "minerva_math.jsonl": 272, "olympiadbench.jsonl": 675, "svamp.jsonl": 1000,
    "asdiv.jsonl": 2215, "multiarith.jsonl": 600, "addsub.jsonl": 395, "mmlu_stem.jsonl": 3018,
}  # fmt: skip
FORMATS = {
    "gsm8k_train.jsonl": "gsm8k", "gsm8k_test.jsonl": "gsm8k", "math500.jsonl": "math",
    "aime24.jsonl": "aime", "amc23.jsonl": "amc", "minerva_math.jsonl": "minerva",
    "olympiadbench.jsonl": "olympiadbench", "svamp.jsonl": "svamp", "asdiv.jsonl": "asdiv",
    "multiarith.jsonl": "mawps", "addsub.jsonl": "mawps", "mmlu_stem.jsonl": "mmlu",
}  # fmt: skip
MOST_SHUFFLED = {"mmlu_stem.jsonl": 0.3, "multiarith.jsonl": 0.1}  # few different right answers
public = pytest.mark.skipif(not DATA.exists(), reason="../shared/data is not there")


def write(path, *values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return str(path)


def sums(path, count, first=0):
    return write(
        path, *({"problem": f"{n} + 1?", "answer": n + 1} for n in range(first, first + count))
    )


def texts(task):
    return [task.prompt(i)[-1].content for i in range(len(task))]


# --- the public files --------------------------------------------------------------------------


@public
@pytest.mark.parametrize("layout", ["auto", "its own"])
@pytest.mark.parametrize("name", ROWS)
def test_every_row_of_every_public_file_loads_and_grades(name, layout):
    path, format = str(DATA / name), "auto" if layout == "auto" else FORMATS[name]
    task = files.make(path=path, eval_path=path, format=format)
    assert len(task) == ROWS[name]
    assert f"{ROWS[name]} rows of layout" in task.describe()
    golds = [example.gold for example in task.examples]
    for i, gold in enumerate(golds):
        assert task.rewards(i, f"So it is \\boxed{{{gold}}}.").correct, gold
        assert task.rewards(i, "").status == "unparsed"
        assert task.answer(i, f"\\boxed{{{gold}}}") in (spell(parse(gold)), gold)
    shifted = [
        task.rewards(i, f"\\boxed{{{golds[(i + 7) % len(golds)]}}}").correct
        for i in range(len(golds))
    ]
    assert sum(shifted) <= MOST_SHUFFLED.get(name, 0.05) * len(golds)


@public
@pytest.mark.parametrize(
    ("name", "column", "share"),
    [
        ("gsm8k_train.jsonl", "answer", 1.0),
        ("gsm8k_test.jsonl", "answer", 1.0),
        ("math500.jsonl", "solution", 1.0),
        ("minerva_math.jsonl", "solution", 1.0),
        ("aime24.jsonl", "solution", 1.0),
    ],
)
def test_published_solutions_are_graded_correct(name, column, share):
    loaded = load(read(str(DATA / name)), name)
    task = files.Files(examples=loaded.examples)
    rows = [row.value for row in read(str(DATA / name))]
    correct = [task.rewards(i, row[column]).correct for i, row in enumerate(rows)]
    assert sum(correct) >= share * len(correct)


@public
def test_levels_come_from_the_rows():
    def levels(name):
        return files.make(path=str(DATA / name), eval_path=str(DATA / name)).levels

    assert levels("math500.jsonl") == tuple(f"Level {n}" for n in range(1, 6))
    assert "Subtraction" in levels("svamp.jsonl") and "Sum" in levels("asdiv.jsonl")
    assert "abstract_algebra" in levels("mmlu_stem.jsonl")
    assert levels("gsm8k_test.jsonl") == ("gsm8k",)


@public
def test_functions_are_asked_for_and_run():
    path = str(DATA / "HumanEval.jsonl.gz")
    task = files.make(path=path, eval_path=path, time_s=5.0)
    assert len(task) == 164 and "python block" in task.prompt(0)[-1].content
    example = task.examples[2]  # truncate_number
    right = f"```python\n{example.gold['prefix']}{example.solution}```"
    assert task.rewards(2, right).correct
    assert task.rewards(2, right.replace("% 1.0", "% 2.0")).status == "wrong"
    assert task.rewards(2, "I cannot").status == "unparsed"
    assert task.answer(2, right) == right[len("```python\n") : -len("\n```")].strip()
    assert task.answer(2, "I cannot") is None


def test_programs_are_asked_for_and_run(tmp_path):
    tests = [{"input": f"{n}\n", "output": f"{n * n}\n", "testtype": "stdin"} for n in (3, -4)]
    row = {"question_content": "Square.", "public_test_cases": json.dumps(tests[:1])}
    row |= {"private_test_cases": json.dumps(tests[1:])}
    path = write(tmp_path / "a.jsonl", row)
    task = files.make(path=path, eval_path=path, partial=True)
    assert "standard input" in task.prompt(0)[-1].content
    assert task.rewards(0, "```python\nprint(int(input())**2)\n```").correct
    half = task.rewards(0, "```python\nprint(abs(int(input()))*3)\n```")
    assert (half.status, half.score) == ("wrong", 0.5)
    with pytest.raises(ValueError, match="shots=1; allowed: 0 .* no worked solutions"):
        files.make(path=write(tmp_path / "b.jsonl", row, row | {"question_content": "Q"}), shots=1)


@pytest.mark.parametrize("setting", ["time_s", "memory_mb", "tolerance"])
def test_wrong_grading_settings_are_refused(tmp_path, setting):
    path = sums(tmp_path / "a.jsonl", 20)
    with pytest.raises(ValueError, match=f"{setting}=-1"):
        files.make(path=path, **{setting: -1})


# --- splits and sizes --------------------------------------------------------------------------


def test_held_out_questions_are_not_trained_on(tmp_path):
    path = sums(tmp_path / "a.jsonl", 1000)
    train, test = files.make(path=path), files.make(path=path, split="test")
    assert len(train) + len(test) == 1000 and 70 <= len(test) <= 130
    assert not set(texts(train)) & set(texts(test))
    assert len(files.make(path=path, split="test", held_out=0.5)) > 400
    # What is held out stays so when rows come, go or change their order.
    more = sums(tmp_path / "b.jsonl", 1500)
    assert set(texts(test)) < set(texts(files.make(path=more, split="test")))


def test_equal_texts_stand_on_one_side(tmp_path):
    rows = [{"problem": f"What is {n}?", "answer": n} for n in range(200)]
    rows += [{"problem": f" what  IS {n}? ", "answer": n} for n in range(200)]
    path = write(tmp_path / "a.jsonl", *rows)
    sides = [files.make(path=path, split=split, instruction="") for split in ("train", "test")]
    plain = [{" ".join(text.lower().split()) for text in texts(side)} for side in sides]
    assert not plain[0] & plain[1] and len(plain[0] | plain[1]) == 200
    assert len(sides[1]) == 2 * len(plain[1])


def test_the_division_is_the_same_in_every_process(tmp_path):
    path = sums(tmp_path / "a.jsonl", 100)
    code = f"from xrpo_jax.tasks import files; print(len(files.make(path={path!r}, split='test')))"
    for seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": seed}
        environment["PYTHONPATH"] = str(pathlib.Path(files.__file__).parents[2])
        found = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert int(found.stdout) == len(files.make(path=path, split="test"))


def test_an_evaluation_file_is_used_whole(tmp_path):
    path, held = sums(tmp_path / "a.jsonl", 50), sums(tmp_path / "b.jsonl", 20, first=100)
    train = files.make(path=path, eval_path=held)
    test = files.make(path=path, eval_path=held, split="test")
    assert (len(train), len(test)) == (50, 20)
    assert len(files.make(eval_path=held, split="test")) == 20  # nothing of `path` is needed


def test_size_takes_rows_from_all_over_the_file(tmp_path):
    path = sums(tmp_path / "a.jsonl", 100)
    settings = {"path": path, "eval_path": path, "instruction": ""}
    assert texts(files.make(**settings, size=4)) == ["0 + 1?", "25 + 1?", "50 + 1?", "75 + 1?"]
    assert len(files.make(**settings, size=99)) == 99
    for size in (0, 100, 1000):
        assert len(files.make(**settings, size=size)) == 100


def test_an_evaluation_file_may_have_its_own_format(tmp_path):
    path = write(tmp_path / "a.jsonl", {"q": "x", "a": "1"})
    other = write(tmp_path / "b.jsonl", {"question": "y", "answer": "#### 2"})
    settings = {"path": path, "prompt_key": "q", "answer_key": "a", "split": "test"}
    assert files.make(**settings, eval_path=path).examples[0].gold == "1"
    assert files.make(**settings, eval_path=other, eval_format="gsm8k").examples[0].gold == "2"
    with pytest.raises(ValueError, match=r"^eval_path='.*b.jsonl', line 1: has no column 'a'"):
        files.make(**settings, eval_path=other)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"split": "dev"}, "split='dev'; allowed: train, test"),
        ({"path": ""}, "path=''; allowed: a file"),
        ({"path": "", "eval_path": "x", "split": "test", "shots": 1}, "path=''; allowed"),
        ({"size": -1}, "size=-1; allowed: 0"),
        ({"held_out": 1.0}, "held_out=1.0; allowed: from 0 to below 1"),
        ({"held_out": float("nan")}, "held_out=nan"),
        (
            {"split": "test", "held_out": 0.0},
            "held_out=0.0: of 5 examples .* none is left for test",
        ),
        ({"shots": 6}, "shots=6; allowed: 0 to "),
        ({"shots": -1}, "shots=-1; allowed: 0 to "),
        ({"path": "none.jsonl"}, "path='none.jsonl': no such file"),
        ({"eval_path": "none.jsonl", "split": "test"}, "eval_path='none.jsonl': no such file"),
        ({"format": "gsm9k"}, "format='gsm9k'; allowed: auto, "),
        ({"eval_format": "gsm9k"}, "eval_format='gsm9k'; allowed: auto, "),
        ({"on_bad_row": "drop"}, "on_bad_row='drop'; allowed: refuse, skip"),
    ],
)
def test_a_bad_setting_is_named(tmp_path, settings, message):
    path = sums(tmp_path / "a.jsonl", 5)
    with pytest.raises(ValueError, match=f"^{message}"):
        files.make(**{"path": path} | settings)


def test_defaults_fit_the_command_line():
    assert {type(v) for v in files.make.__kwdefaults__.values()} <= {str, int, float, bool}


# --- prompts -----------------------------------------------------------------------------------


def test_the_instruction_fits_the_kind_of_answer(tmp_path):
    path = sums(tmp_path / "a.jsonl", 3)
    settings = {"path": path, "eval_path": path}
    assert texts(files.make(**settings))[0] == f"0 + 1?\n{files.INSTRUCTIONS['math']}"
    assert texts(files.make(**settings, instruction="Be brief."))[0] == "0 + 1?\nBe brief."
    assert texts(files.make(**settings, instruction=""))[0] == "0 + 1?"
    path = write(tmp_path / "b.jsonl", {"question": "q", "choices": ["x", "y"], "answer": 0})
    task = files.make(path=path, eval_path=path)
    assert texts(task) == [f"q\nA. x\nB. y\n{files.INSTRUCTIONS['choice']}"]


def test_message_lists_keep_their_own_wording(tmp_path):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    for row in (
        {"prompt": messages, "reward_model": {"ground_truth": "1"}},
        {"prompt": messages, "answer": "1"},
    ):
        path = write(tmp_path / "a.jsonl", row)
        task = files.make(path=path, eval_path=path)
        assert [(turn.role, turn.content) for turn in task.prompt(0)] == [
            ("system", "s"),
            ("user", "u"),
        ]
        task = files.make(path=path, eval_path=path, instruction="Now.")
        assert [turn.content for turn in task.prompt(0)] == ["s", "u\nNow."]


def test_shown_examples_stand_before_every_question(tmp_path):
    path = write(
        tmp_path / "a.jsonl",
        {"problem": "a", "solution": r"so \boxed{1}"},
        {"problem": "b", "solution": "x", "answer": "2"},
        *({"problem": f"c{n}", "solution": r"\boxed{3}"} for n in range(8)),
    )
    held = write(
        tmp_path / "b.jsonl", {"problem": "A ", "answer": "1"}, {"problem": "d", "answer": "4"}
    )
    settings = {"path": path, "eval_path": held, "instruction": "!"}
    task = files.make(**settings, shots=2)
    assert [(turn.role, turn.content) for turn in task.prompt(0)] == [
        ("user", "a\n!"), ("assistant", r"so \boxed{1}"),
        ("user", "b\n!"), ("assistant", "x\nThe answer is \\boxed{2}."),
        ("user", "c0\n!"),
    ]  # fmt: skip
    assert len(task) == 8
    test = files.make(**settings, shots=2, split="test")
    assert test.prompt(0)[:4] == task.prompt(0)[:4]
    assert texts(test) == ["d\n!"]  # a question that is shown solved is not asked
    assert len(files.make(**settings, shots=0).prompt(0)) == 1
    with pytest.raises(ValueError, match="shots=11; allowed: 0 to 10"):
        files.make(**settings, shots=11)


def test_shown_examples_are_never_held_out_ones(tmp_path):
    path = sums(tmp_path / "a.jsonl", 40)
    test = files.make(path=path, split="test", held_out=0.5, shots=5, instruction="")
    shown = {turn.content for turn in test.prompt(0)[:-1]}
    assert not shown & set(texts(test))
    assert len(test.prompt(0)) == 11
    # Were a held-out one shown, it would be missing here.
    assert texts(test) == texts(files.make(path=path, split="test", held_out=0.5, instruction=""))


@pytest.mark.parametrize(
    "row",
    [
        {"target": 98, "nums": [44, 19, 35]},
        {"prompt": [{"role": "user", "content": "u"}], "answer": "1"},
    ],
)
def test_what_cannot_be_shown_solved_is_refused(tmp_path, row):
    path = write(tmp_path / "a.jsonl", row, row)
    settings = {"path": path, "eval_path": path}
    with pytest.raises(ValueError, match="^shots=1; allowed: 0 for message lists, and for count"):
        files.make(**settings, shots=1)
    assert len(files.make(**settings)) == 2


# --- grading -----------------------------------------------------------------------------------


def asked(tmp_path, row):
    path = write(tmp_path / "a.jsonl", row)
    return files.make(path=path, eval_path=path)


def test_verdicts_say_correct_wrong_or_unparsed(tmp_path):
    task = asked(tmp_path, {"problem": "q", "answer": "1/2"})
    assert task.rewards(0, r"\boxed{0.5}").status == "correct"
    verdict = task.rewards(0, r"\boxed{0.6}")
    assert (verdict.status, verdict.score, verdict.reason) == ("wrong", 0.0, "0.6 is not 1/2")
    assert task.rewards(0, "I do not know").status == "unparsed"
    assert task.answer(0, r"\boxed{\frac{2}{4}}") == task.answer(0, "Answer: .5") == "1/2"
    assert task.answer(0, "") is None


def test_choices_are_graded_by_their_letter(tmp_path):
    task = asked(tmp_path, {"question": "q", "choices": ["x", "y", "z"], "answer": 2})
    assert task.rewards(0, r"\boxed{C}").correct and task.answer(0, "Answer: (C)") == "C"
    assert task.rewards(0, r"\boxed{A}").status == "wrong"
    assert task.rewards(0, r"\boxed{D}").status == task.rewards(0, "z").status == "unparsed"


@pytest.mark.parametrize(
    ("completion", "status"),
    [
        (r"\boxed{(44 - 19) * 4}", "wrong"),  # 4 is not given
        ("<think>a</think> <answer>44 + 19 + 35</answer>", "correct"),
        (r"\boxed{19 + 35 + 44 = 98}", "correct"),
        (r"\boxed{44 + 19 \times 35}", "wrong"),
        (r"\boxed{44 + 19 \times \frac{35}{1}}", "wrong"),  # 1 is not given
        (r"\boxed{\left(44 + 19\right) + 35}", "correct"),
        ("<answer>__import__('os')</answer>", "unparsed"),
        ("<answer>" + "(" * 10**5 + "</answer>", "unparsed"),
        ("44 + 19 + 35", "unparsed"),  # not stated as the answer
    ],
)
def test_countdown_rows_are_graded_by_the_expression(tmp_path, completion, status):
    task = asked(tmp_path, {"target": 98, "nums": [44, 19, 35]})
    assert task.rewards(0, completion).status == status
    assert (task.answer(0, completion) is None) == (status == "unparsed")
    assert task.level(0) == "3 numbers"


def test_bad_rows_are_skipped_and_counted_when_asked(tmp_path):
    good = {"problem": "p", "answer": 1}
    path = write(
        tmp_path / "a.jsonl", good, {"problem": "p"}, good, {"problem": "q", "answer": None}
    )
    settings = {"path": path, "eval_path": path}
    with pytest.raises(ValueError, match=r"^path='.*a.jsonl', line 2: has no column 'answer'"):
        files.make(**settings)
    task = files.make(**settings, on_bad_row="skip", dedupe=True)
    assert len(task) == 1
    for words in (
        "4 rows",
        "2 malformed",
        "first line 2",
        "answer is null, first line 4",
        "1 repeated",
    ):
        assert words in task.describe()


def test_several_sources_have_a_layout_and_a_level_each(tmp_path):
    one = write(tmp_path / "one.jsonl", {"input": "1 + 1?", "target": 2.0}, {"input": "", "x": 1})
    two = sums(tmp_path / "two.jsonl", 3)
    task = files.make(path=f"{one}, {two}", held_out=0, on_bad_row="skip")
    assert len(task) == 4 and task.levels == ("one", "two")
    assert [task.level(i) for i in range(4)] == ["one", "two", "two", "two"]
    assert "5 rows of layout mawps + plain, 1 malformed" in task.describe()
    once = files.make(path=f"{one},{two}", held_out=0, on_bad_row="skip", dedupe=True)
    assert len(once) == 3 and "1 repeated and dropped" in once.describe()
    with pytest.raises(ValueError, match="path='.*three.jsonl': no such file"):
        files.make(path=f"{two},{tmp_path}/three.jsonl")
    awkward = sums(tmp_path / "a,b.jsonl", 2)
    assert len(files.make(path=awkward, held_out=0)) == 2


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"eval_hub_split": "dev"}, "eval_hub_split='dev' without eval_path"),
        ({"eval_subset": "main"}, "eval_subset='main' without eval_path"),
        ({"eval_format": "math"}, "eval_format='math' without eval_path"),
        ({"subset": "main"}, "is a file, which has no subset='main'"),
        ({"hub_split": "dev"}, "is a file, which has no .*split='dev'"),
    ],
)
def test_a_setting_that_would_do_nothing_is_refused(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        files.make(path=sums(tmp_path / "a.jsonl", 4), **settings)
