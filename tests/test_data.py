"""Data files and rows: what is read, what is refused, and what is said about it."""

import base64
import gzip
import json
import pickle
import sys
import types as modules
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xrpo_jax.data.adapters import LAYOUTS, recognise
from xrpo_jax.data.code_tests import decode_tests
from xrpo_jax.data.load import few_shot, load
from xrpo_jax.data.read import Row, read

LINE = '{"problem": "a", "answer": "1"}\n'


def rows(*values):
    return [Row(place=f"row {place}", value=value) for place, value in enumerate(values)]


def one(value, **settings):
    (example,) = load(rows(value), "rows", **settings).examples
    return example


def write(path, data):
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return str(path)


# --- files -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "data", "places"),
    [
        ("a.jsonl", LINE * 2, ["line 1", "line 2"]),
        ("a.jsonl", "\ufeff" + LINE + "\n  \n" + LINE.strip(), ["line 1", "line 4"]),
        ("a.jsonl", LINE.replace("\n", "\r\n") * 2, ["line 1", "line 2"]),
        ("a.jsonl.gz", gzip.compress((LINE * 2).encode(), mtime=0), ["line 1", "line 2"]),
        ("a.json", f"\n [{LINE},{LINE}]", ["row 0", "row 1"]),
        ("a.json", LINE * 2, ["line 1", "line 2"]),  # JSON Lines under the wrong name
        ("a.csv", 'problem,answer\na,1\n"a",1\n', ["line 2", "line 3"]),
        ("a.csv", "\ufeffproblem,answer\r\na,1\r\n", ["line 2"]),
        ("a.csv.gz", gzip.compress(b"problem,answer\na,1\n", mtime=0), ["line 2"]),
    ],
)
def test_text_files_are_read_with_places(tmp_path, name, data, places):
    found = list(read(write(tmp_path / name, data)))
    assert [row.place for row in found] == places
    assert all(row.value == {"problem": "a", "answer": "1"} for row in found)


def test_csv_keeps_commas_quotes_and_line_ends_in_fields(tmp_path):
    path = write(tmp_path / "a.csv", 'problem,answer\n"say ""x"",\r\ntwice","1,000"\nb,2\n')
    first, second = read(path)
    assert first.value == {"problem": 'say "x",\r\ntwice', "answer": "1,000"}
    assert (first.place, second.place) == ("line 3", "line 4")


def test_parquet_gives_plain_lists_and_dicts(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    messages = [{"role": "user", "content": "q", "name": None}]
    table = pyarrow.table({"prompt": [messages] * 3, "answer": pyarrow.array([7, None, 9])})
    parquet.write_table(table, tmp_path / "a.parquet")
    found = list(read(str(tmp_path / "a.parquet")))
    assert [row.place for row in found] == ["row 0", "row 1", "row 2"]
    assert [row.value["answer"] for row in found] == [7, None, 9]
    assert found[2].value["prompt"] == messages and type(found[0].value["prompt"]) is list


def test_a_pattern_reads_every_file_and_says_which(tmp_path):
    write(tmp_path / "b.jsonl", LINE)
    write(tmp_path / "a.jsonl", LINE + "{")
    found = list(read(str(tmp_path / "*.jsonl")))
    assert [row.place for row in found] == ["a.jsonl, line 1", "a.jsonl, line 2", "b.jsonl, line 1"]
    assert found[1].problem and not found[2].problem


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.jsonl", b"", ["empty"]),
        ("a.jsonl", b" \n \n", ["empty"]),
        ("a.jsonl", LINE.encode("utf-16"), ["UTF-16", "UTF-8"]),
        ("a.jsonl", LINE.encode("utf-16-be"), ["UTF-16"]),
        ("a.csv", b"\xfe\xff\0a", ["UTF-16"]),
        ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\noid", ["Git LFS", "pull"]),
        ("a.jsonl", b"<!DOCTYPE html><html>", ["web page"]),
        ("a.jsonl.gz", b"{}", ["gzip"]),
        ("a.jsonl.gz", gzip.compress(LINE.encode() * 99, mtime=0)[:-9], ["gzip"]),
        ("a.parquet", b"PAR1 and no more", ["parquet"]),
        ("a.json", b'[{"a": 1}', ["not JSON"]),
        ("a.csv", b'problem,answer\n"a,1\n', ["line 2", "CSV"]),
        ("a.csv", b"problem,answer\n\xff\xfd,1\n", ["CSV in UTF-8"]),
        ("a.xlsx", b"PK", [".jsonl", ".parquet"]),
    ],
)
def test_a_file_that_is_none_is_refused_plainly(tmp_path, name, data, words):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    path = write(tmp_path / name, data)
    with pytest.raises(ValueError) as error:
        list(read(path))
    for word in [name, *words]:
        assert word in str(error.value)


@pytest.mark.parametrize("name", ["none.jsonl", "data/none.csv", "nothing"])
def test_a_missing_file_is_named(name):
    with pytest.raises(ValueError, match=f"'{name}': no such file; allowed: a file, a pattern"):
        list(read(name))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"problem": "b", "ans', ["not a JSON object", "cut off"]),
        (b"[1, 2]\n", ["type list"]),
        (b"null\n", ["type NoneType"]),
        (b'{"problem": "\xff"}\n', ["UTF-8", "byte 14"]),
        (b'{"a": ' + b"[" * 10**5 + b"\n", ["JSON"]),
        (b'{"a": ' + b"9" * 5000 + b"}\n", ["JSON that cannot be held"]),
    ],
)
def test_a_bad_line_is_refused_or_skipped_and_counted(tmp_path, line, words):
    path = write(tmp_path / "a.jsonl", LINE.encode() + line)
    with pytest.raises(ValueError) as error:
        load(read(path), f"path={path!r}")
    for word in ["a.jsonl', line 2: ", "task.on_bad_row=skip", *words]:
        assert word in str(error.value)
    loaded = load(read(path), path, on_bad_row="skip")
    assert len(loaded.examples) == 1 and loaded.rows == 2
    ((what, times, place),) = loaded.skipped
    assert (times, place) == (1, "line 2") and all(word in what for word in words)
    assert "1 malformed and skipped (1 x is " in loaded.describe()


def test_bad_csv_rows_name_their_line(tmp_path):
    path = write(tmp_path / "a.csv", "problem,answer\na,1,2\nb\nc,3\n")
    loaded = load(read(path), path, on_bad_row="skip")
    assert [e.gold for e in loaded.examples] == ["3"]
    assert [(what, place) for what, _, place in loaded.skipped] == [
        ("has more fields than the header", "line 2"),
        ("has fewer fields than the header", "line 3"),
    ]


def test_no_usable_row_is_an_error():
    with pytest.raises(ValueError, match="rows is empty, it holds no row"):
        load([], "rows")
    with pytest.raises(ValueError, match="holds no usable row: 2 rows.*2 x answer is null, first"):
        bad = {"problem": "a", "answer": None}
        load(rows(bad, bad), "rows", on_bad_row="skip")


def test_hub_data_sets_are_read_by_their_name(monkeypatch):
    asked = []

    def load_dataset(name, subset, split):
        asked.append((name, subset, split))
        return [{"question": "q", "answer": "#### 3"}]

    monkeypatch.setitem(sys.modules, "datasets", modules.SimpleNamespace(load_dataset=load_dataset))
    (row,) = read("openai/gsm8k", subset="main", hub_split="test")
    assert row == Row(place="row 0", value={"question": "q", "answer": "#### 3"})
    list(read("owner/name"))
    assert asked == [("openai/gsm8k", "main", "test"), ("owner/name", None, "train")]


def test_the_library_itself_is_called_rightly(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    # A folder named like a data set is one to the library, which needs no network for it.
    (tmp_path / "owner" / "name").mkdir(parents=True)
    for split, gold in (("train", "1"), ("test", "2")):
        write(tmp_path / "owner" / "name" / f"{split}.jsonl", f'{{"q": "x", "answer": "{gold}"}}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (row,) = read("owner/name", hub_split="test")
    assert row == Row(place="row 0", value={"q": "x", "answer": "2"})
    with pytest.raises(ValueError, match="'owner/name'.*split 'dev'"):
        list(read("owner/name", hub_split="dev"))


def test_a_hub_error_names_the_data_set_and_the_way_out(monkeypatch):
    def load_dataset(name, subset, split):
        raise ConnectionError("no network")

    monkeypatch.setitem(sys.modules, "datasets", modules.SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(ValueError, match="'owner/name'.*no network.*task.path"):
        list(read("owner/name"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"'owner/name'.*pip install datasets"):
        list(read("owner/name"))


# --- layouts -----------------------------------------------------------------------------------

TESTS = '[{"input": "1", "output": "2", "testtype": "stdin"}]'
KNOWN = {
    "humaneval": (
        {"prompt": "def f():", "entry_point": "f", "test": "t", "canonical_solution": "s"},
        {"tests": "t", "entry_point": "f", "prefix": "def f():"},
    ),
    "livecodebench": (
        {"question_content": "q", "public_test_cases": TESTS, "private_test_cases": "[]"},
        {"tests": json.loads(TESTS), "entry_point": "", "prefix": ""},
    ),
    "dapo": (
        {"prompt": [{"role": "user", "content": "q"}], "reward_model": {"ground_truth": "34"}},
        "34",
    ),
    "countdown": ({"target": 6, "nums": [2, 3]}, {"target": 6, "numbers": [2, 3]}),
    "mmlu": ({"question": "q", "choices": ["x", "y"], "answer": 1}, "B"),
    "svamp": ({"Body": "b ", "Question": "q", "Answer": 145.0}, "145"),
    "asdiv": ({"body": "b", "question": "q", "answer": "9 (apples)"}, "9"),
    "mawps": ({"input": "q", "target": 0.6666666667}, "0.6666666667"),
    "olympiadbench": ({"question": "q", "final_answer": ["2", "3"]}, "2, 3"),
    "gsm8k": ({"question": "q", "answer": "4 <<2+2=4>>\n#### 1,004"}, "1004"),
    "math": ({"problem": "q", "solution": r"\boxed{3} or \boxed{4}"}, "4"),
    "minerva": ({"problem": "q", "solution": r"so \boxed{4.5e33}", "type": "t"}, "4.5e33"),
    "aime": ({"Problem": "q", "Answer": "033"}, "33"),
    "amc": ({"problem": "q", "answer": 27.0}, "27"),
    "plain": ({"input": "q", "expected_answer": 3}, "3"),
}
BY_NAME_ONLY = {"minerva": "math", "aime": "plain", "amc": "plain"}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_read_and_recognised(name):
    row, gold = KNOWN[name]
    assert recognise(row) == BY_NAME_ONLY.get(name, name)
    example = one(row, format=name)
    assert example.gold == gold and example.prompt[-1].role == "user"
    assert one(row).prompt == example.prompt


def test_the_whole_row_becomes_the_example():
    example = one(
        {"problem": "q", "solution": r"s \boxed{1}", "level": "Level 5", "type": "Algebra"}
    )
    assert (example.level, example.solution, example.kind) == ("Level 5", r"s \boxed{1}", "math")
    example = one({"Body": "b ", "Question": " q", "Answer": 1, "Type": "Sum"})
    assert (example.prompt[0].content, example.level) == ("b q", "Sum")
    example = one({"question": "q?", "choices": ["x", 2], "answer": "A", "subject": "s"})
    assert example.prompt[0].content == "q?\nA. x\nB. 2"
    assert (example.kind, example.letters, example.level) == ("choice", "AB", "s")
    example = one({"question": "q", "answer": "2+2=<<2+2=4>>4\n#### 4"})
    assert (example.solution, example.level, example.given) == ("2+2=4", "gsm8k", False)
    assert one(KNOWN["dapo"][0]).given


def test_columns_named_by_hand_win():
    row = {"q": "why", "a": 3, "problem": "p", "answer": "1", "grade": 2}
    example = one(row, prompt_key="q", answer_key="a", level_key="grade")
    assert (example.prompt[0].content, example.gold, example.level) == ("why", "3", "2")
    assert one(row, answer_key="a").prompt[0].content == "p"
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    example = one({"m": messages, "a": 1}, prompt_key="m", answer_key="a")
    assert [turn.role for turn in example.prompt] == ["system", "user"]
    with pytest.raises(ValueError, match="format=auto where columns are named by hand"):
        one(row, format="math", prompt_key="q")


@pytest.mark.parametrize(
    ("row", "settings", "words"),
    [
        ({"text": "a", "label": "1"}, {}, ["no column", "text, label"]),
        ({"question": "a", "label": "1"}, {}, ["'answer'", "question, label"]),
        ({"problem": "a", "answer": "1"}, {"answer_key": "gold"}, ["'gold'", "problem, answer"]),
        ({"problem": "a", "answer": "1"}, {"level_key": "hard"}, ["'hard'"]),
        ({"problem": "a", "answer": None}, {}, ["answer is null"]),
        ({"problem": "a", "answer": False}, {}, ["answer is a bool"]),
        ({"problem": "a", "answer": {}}, {}, ["answer is a dict"]),
        ({"problem": "a", "answer": []}, {}, ["answer is a list"]),
        ({"problem": "a", "answer": " "}, {}, ["answer is empty"]),
        ({"problem": "a", "answer": float("nan")}, {}, ["answer is nan"]),
        ({"problem": "a", "answer": "x" * 1001}, {}, ["answer is no answer that can be graded"]),
        ({"problem": " ", "answer": "1"}, {}, ["problem is empty"]),
        ({"problem": 5, "answer": "1"}, {}, ["problem: messages are a int"]),
        ({"problem": "\ud800", "answer": "1"}, {}, ["problem holds a character"]),
        ({"problem": "a", "solution": r"\boxed{1"}, {}, ["solution has no", "boxed"]),
        ({"question": "a", "answer": "5"}, {"format": "gsm8k"}, ["answer has no '####'"]),
        ({"question": "a", "answer": "5\n#### "}, {}, ["nothing after '####'"]),
        ({"question": "a", "choices": ["x", "y"], "answer": 2}, {}, ["answer is 2", "0 to 1"]),
        ({"question": "a", "choices": ["x", "y"], "answer": "C"}, {}, ["'C'"]),
        ({"question": "a", "choices": ["x", "y"], "answer": True}, {}, ["True"]),
        ({"question": "a", "choices": "xy", "answer": 1}, {}, ["choices"]),
        ({"target": 3, "nums": "[1, "}, {}, ["target and nums"]),
        ({"target": 3.5, "nums": [1]}, {}, ["target and nums"]),
        ({"target": 3, "nums": []}, {}, ["nums is []"]),
        ({"target": 3, "nums": [1000]}, {}, ["0 to 999"]),
        ({"prompt": "q", "reward_model": {}}, {}, ["ground_truth"]),
        ({"prompt": [], "reward_model": {"ground_truth": "1"}}, {}, ["prompt", "empty"]),
        (
            {"prompt": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "1"}],
             "reward_model": {"ground_truth": "1"}},
            {}, ["assistant"],
        ),
    ],
)  # fmt: skip
def test_a_bad_row_says_what_is_wrong_with_it(row, settings, words):
    with pytest.raises(ValueError) as error:
        load(rows({"problem": "good", "answer": "1"}, row)[1:], "rows", **settings)
    for word in ["rows, row 1: ", *words]:
        assert word in str(error.value)


def test_the_first_good_row_decides_on_the_layout():
    gsm8k, other = {"question": "q", "answer": "#### 3"}, {"question": "r", "answer": "four"}
    loaded = load(rows({"x": 1}, gsm8k, other), "rows", on_bad_row="skip")
    assert loaded.layout == "gsm8k" and len(loaded.examples) == 1
    assert [place for _, _, place in loaded.skipped] == ["row 0", "row 2"]


def test_repeated_questions_are_dropped_only_when_asked():
    values = rows(*({"problem": text, "answer": 1} for text in "aba"))
    assert len(load(values, "rows").examples) == 3
    loaded = load(values, "rows", dedupe=True)
    assert [e.prompt[0].content for e in loaded.examples] == ["a", "b"]
    assert loaded.repeated == 1 and "1 repeated and dropped" in loaded.describe()


@pytest.mark.parametrize("settings", [{"format": "gsm9k"}, {"on_bad_row": "ignore"}])
def test_unknown_settings_of_loading_are_named(settings):
    ((name, value),) = settings.items()
    with pytest.raises(ValueError, match=f"{name}='{value}'; allowed: (auto|refuse), "):
        one({"problem": "a", "answer": 1}, **settings)


@given(
    st.dictionaries(
        st.sampled_from([column for row, _ in KNOWN.values() for column in row]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=2)
                | st.dictionaries(st.sampled_from(["role", "content", "ground_truth"]), inner)
            ),
            max_leaves=4,
        ),
        max_size=8,
    ),
    st.sampled_from(["auto", *LAYOUTS]),
)
@settings(max_examples=400, deadline=None)
def test_no_row_crashes(row, name):
    try:
        (example,) = load(rows(row), "rows", format=name).examples
    except ValueError as error:
        assert str(error).startswith(("rows, row 0: ", "rows is empty"))
    else:
        assert example.gold and example.prompt[-1].role != "assistant"


# --- few-shot examples and packed tests --------------------------------------------------------


def test_few_shot_examples_are_the_first_ones():
    assert few_shot((1, 2, 3), 0) == () == few_shot((), 0)
    assert few_shot((1, 2, 3), 2) == (1, 2)
    for pool, shots in (((), 1), ((1, 2), 3), ((1,), -1)):
        with pytest.raises(ValueError, match=f"shots={shots}; allowed: 0 to {len(pool)}"):
            few_shot(pool, shots)


def packed(value):
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


class Runs:
    """A pickle of this names a function."""

    def __reduce__(self):
        return (print, ("ran",))


def test_packed_tests_are_text_and_nothing_that_runs(capsys):
    tests = [{"input": "1", "output": "2", "testtype": "functional"}]
    assert decode_tests(json.dumps(tests)) == decode_tests(packed(json.dumps(tests))) == tests
    for text, word in (
        (packed(Runs()), "names builtins.print"),
        (packed([1]), "no pickled JSON text"),
        (packed("[1]"), "no list of test cases"),
        (packed("{}"), "no list"),
        ("[{}]", "without input or output"),
        ("no json", "neither JSON nor base64"),
        (base64.b64encode(zlib.compress(b"junk")).decode(), "no pickled JSON text"),
        (base64.b64encode(b"junk").decode(), "neither"),
    ):
        with pytest.raises(ValueError, match=word):
            decode_tests(text)
    assert capsys.readouterr().out == ""
    row = KNOWN["livecodebench"][0] | {"private_test_cases": packed(json.dumps(tests))}
    with pytest.raises(ValueError, match="metadata has no func_name"):
        one(row)
    with pytest.raises(ValueError, match="metadata is no JSON"):
        one(row | {"metadata": "{"})
    row |= {"metadata": '{"func_name": "f"}'}
    assert one(row).gold["entry_point"] == "f" and len(one(row).gold["tests"]) == 2
    starter = {"starter_code": "class Solution:\n    def f(self, n):\n        "}
    assert one(row | starter).gold["entry_point"] == "Solution.f"
    with pytest.raises(ValueError, match="row 0: private_test_cases holds no pickled"):
        one(row | {"private_test_cases": packed(Runs())})


def test_one_json_object_is_told_from_json_lines(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{\n  "problem": "a",\n  "answer": "1"\n}\n')
    with pytest.raises(ValueError, match="a.json' is one JSON object; allowed: a list of rows"):
        list(read(str(path)))


def test_a_worked_solution_is_no_answer(tmp_path):
    """The first row lacks the marker, so the file looks plain: no gold may be a whole solution."""
    path = tmp_path / "a.jsonl"
    rows = [{"question": "q", "answer": "5"}, {"question": "r", "answer": "2+3=5\n#### 5"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match="line 2: answer is a worked solution .*task.format"):
        load(read(str(path)), "a.jsonl")
