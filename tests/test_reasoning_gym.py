"""The task `reasoning_gym`: disjoint splits, determinism, the library's scores, and its dangers."""

import json
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

library = pytest.importorskip("reasoning_gym")

from xrpo_jax.tasks import reasoning_gym as task  # noqa: E402


def questions(made):
    return [problem.entry["question"] for problem in made.problems]


def gold(made, i):
    return f"<think>so</think> <answer>{made.problems[i].entry['answer']}</answer>"


def test_the_module_is_not_taken_for_the_library():
    assert library.__name__ == "reasoning_gym" and hasattr(library, "create_dataset")
    assert task.__name__ == "xrpo_jax.tasks.reasoning_gym"


@pytest.mark.parametrize("dataset", ["chain_sum", "leg_counting", "spell_backward"])
@pytest.mark.parametrize("seeds", [(0, 0), (0, 1), (5, 6)])
def test_train_and_test_share_no_question(dataset, seeds):
    train = task.make(dataset=dataset, size=400, seed=seeds[0])
    test = task.make(dataset=dataset, size=100, seed=seeds[1], split="test")
    assert (len(train), len(test)) == (400, 100)
    assert not set(questions(train)) & set(questions(test))
    assert len(set(questions(train))) == 400


def test_problems_are_a_function_of_the_settings():
    one = task.make(size=300)
    assert questions(one) == questions(task.make(size=300))
    assert questions(task.make(size=30)) == questions(one)[:30]
    assert set(questions(task.make(size=300, seed=1))) != set(questions(one))


def test_problems_are_the_same_in_every_process():
    code = (
        "from xrpo_jax.tasks import reasoning_gym as t\n"
        "print([p.entry['question'] for p in t.make(size=9, split='test').problems])"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        for _ in range(2)
    }
    assert found == {str(questions(task.make(size=9, split="test")))}


def test_neighbouring_seeds_do_not_give_the_same_questions():
    # The library's own seeds do: question i of seed s is question i - 1 of seed s + 1.
    one, two = (set(questions(task.make(size=200, seed=seed))) for seed in (0, 1))
    assert len(one & two) < 10


def test_a_small_data_set_ends_and_says_so():
    made = task.make(dataset="chain_sum", size=5000, options='{"max_terms": 2, "max_digits": 1}')
    assert 20 < len(made) < 300 and "which has no more (size=5000)" in made.describe()


@pytest.mark.parametrize("dataset", ["chain_sum", "countdown", "n_queens", "rubiks_cube", "sudoku"])
def test_the_librarys_scores_are_kept(dataset):
    made = task.make(dataset=dataset, size=5)
    for i in range(5):
        if made.problems[i].entry["answer"] is not None:
            verdict = made.rewards(i, gold(made, i))
            assert (verdict.status, verdict.score) == ("correct", 1.0)
        verdict = made.rewards(i, "<answer>0</answer>")
        assert verdict.status == "wrong" and verdict.score < 0.5
        assert made.rewards(i, "").status == "unparsed"
        assert made.level(i) == dataset == made.levels[0]


def scored(value, threshold=1.0, dataset="chain_sum"):
    def score(answer, entry):
        if isinstance(value, Exception):
            raise value
        return value

    problem = task.Problem(entry={"question": "q", "answer": "a"}, score=score)
    return task.ReasoningGym(
        dataset=dataset, problems=(problem,), threshold=threshold, instruction="i"
    )


def test_an_answer_is_correct_from_the_threshold_on():
    right, wrong = "correct", "wrong"
    for value, threshold, status in (
        (1, 1.0, right),
        (0.99, 1.0, wrong),
        (0.5, 0.5, right),
        (0.4, 0.5, wrong),
        (True, 1.0, right),
    ):
        verdict = scored(value, threshold).rewards(0, "x")
        assert (verdict.status, verdict.score) == (status, float(value))


def test_an_answer_that_a_scorer_cannot_read_is_wrong():
    """Scorers raise on answers of another form; what else they raise is a fault of theirs."""
    for error in (ValueError("x"), ZeroDivisionError(), TypeError(), KeyError("x")):
        verdict = scored(error).rewards(0, "x")
        assert (verdict.status, verdict.score) == ("wrong", 0.0)
        assert type(error).__name__ in verdict.reason
    with pytest.raises(RuntimeError):
        scored(RuntimeError()).rewards(0, "x")
    with pytest.raises(ValueError, match="score=1.5"):
        scored(1.5).rewards(0, "x")


@pytest.mark.parametrize("dataset", task.SAFE_ANSWERS)
@pytest.mark.parametrize(
    "text",
    ["__import__('os').system('touch pwned')", "9**9**9**9", "exit()", "[x for x in [1]]", "().a",
     "lambda: 1", "(1).__class__", "print(1)", "x\u2003y", "9" * 9 + "**9"],
)  # fmt: skip
def test_no_answer_runs_as_code(dataset, text):
    ran = []
    problem = task.Problem(entry={}, score=lambda answer, entry: ran.append(answer) or 1.0)
    made = task.ReasoningGym(dataset=dataset, problems=(problem,), threshold=1.0, instruction="")
    verdict = made.rewards(0, f"<answer>{text}</answer>")
    assert not ran and verdict.status == "wrong" and "as code" in verdict.reason


def test_plain_answers_still_reach_the_scorer():
    plain = {"countdown": "(4 + 6) * 2 / 1.5", "puzzle24": "8*3", "n_queens": "Q _\n_ Q",
             "binary_matrix": "[[0, 1], [1, 0]]", "spiral_matrix": "1 -2 3",
             "string_insertion": "['A', 'B']"}  # fmt: skip
    assert plain.keys() == task.SAFE_ANSWERS.keys()
    for dataset, text in plain.items():
        assert scored(1.0, dataset=dataset).rewards(0, f"<answer>{text}</answer>").correct


def test_every_scorer_that_runs_code_is_known():
    import ast
    import inspect

    from reasoning_gym.factory import DATASETS

    dangerous = set()
    for name, (kind, _) in DATASETS.items():
        source = inspect.getsource(kind.score_answer)
        calls = [
            n.func for n in ast.walk(ast.parse("class A:\n" + source)) if isinstance(n, ast.Call)
        ]
        names = {getattr(call, "id", getattr(call, "attr", "")) for call in calls}
        if names & {"eval", "exec", "parse_expr", "sympify", "simplify"}:
            dangerous.add(name)
    # number_sorting evaluates the right answer, which is the library's own.
    assert dangerous - {"number_sorting"} == task.SAFE_ANSWERS.keys() | (
        task.REFUSED.keys() - {"composite"}
    )


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("<answer> 5 </answer>", "5"), ("<answer>1</answer> or <answer>2</answer>", "2"),
        ("I add.\nIt is\n 7 \n", "7"), ("<think><answer>1</answer></think>\n2", "2"),
        ("<answer>a\nb</answer> done", "a\nb"), ("<answer>5", None), ("<think> 5", None),
        ("", None), (" \n ", None), ("<answer></answer>", None), ("x" * 10_001, None),
    ],
)  # fmt: skip
def test_the_final_answer(completion, answer):
    assert task.final_answer(completion) == answer


def test_votes_even_out_white_space():
    assert scored(1.0).answer(0, "<answer>a\n  b</answer>") == "a b"
    assert scored(1.0).answer(0, "") is None


@given(st.lists(st.sampled_from(["<answer>", "</answer>", "<think>", "</think>", "\n", "1", "a "])))
@settings(max_examples=200, deadline=None)
def test_any_text_is_read(parts):
    found = task.final_answer("".join(parts))
    assert found is None or (found == found.strip() and found)


@pytest.mark.parametrize("text", ["<answer>" * 10**5, "<think>" * 10**5, "\n" * 10**6, "9" * 10**6])
def test_hostile_text_is_graded_at_once(text):
    began = time.perf_counter()
    assert scored(1.0, dataset="countdown").rewards(0, text).status == "unparsed"
    assert time.perf_counter() - began < 0.5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"split": "dev"}, "split='dev'; allowed: train, test"),
        ({"size": 0}, "size=0; allowed: 1 to"),
        ({"threshold": 0.0}, "threshold=0.0; allowed: above 0 to 1"),
        ({"threshold": 1.5}, "threshold=1.5"),
        ({"threshold": float("nan")}, "threshold=nan"),
        ({"dataset": "chain_sums"}, "dataset='chain_sums'; did you mean chain_sum.*allowed: ab, "),
        ({"dataset": "xyzzy"}, "dataset='xyzzy'; allowed: ab, "),
        (
            {"dataset": "simple_integration"},
            "dataset='simple_integration': its scorer runs answers",
        ),
        ({"dataset": "composite"}, "dataset='composite': mixes"),
        ({"options": "{"}, "options='{' is no JSON"),
        ({"options": "[1]"}, r"options='\[1\]'.*allowed: an object with allow_negation"),
        ({"options": '{"size": 3}'}, "options=.*: size is no setting of 'chain_sum'; allowed"),
        ({"options": '{"min_term": 3}'}, "options=.*: min_term is no setting of 'chain_sum'"),
        ({"options": '{"min_terms": 9}'}, "options=.*refuses them.*max_terms must be >= min_terms"),
        ({"options": '{"min_terms": "x"}'}, "options=.*refuses them"),
    ],
)
def test_a_bad_setting_is_named(settings, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        task.make(**settings)


def test_options_reach_the_generator():
    options = json.dumps({"min_terms": 2, "max_terms": 2, "min_digits": 3, "max_digits": 3})
    made = task.make(size=20, options=options)
    for text in questions(made):
        assert text.count(" + ") + text.count(" - ") == 1


def test_the_instruction_is_a_setting():
    assert task.make(size=1).prompt(0)[0].content.endswith(f"\n{task.INSTRUCTION}")
    made = task.make(size=1, instruction="")
    assert made.prompt(0)[0].content == questions(made)[0].strip()
    assert {type(v) for v in task.make.__kwdefaults__.values()} <= {str, int, float, bool}


def test_a_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(ValueError, match="pip install reasoning_gym"):
        task.make()
