"""The data faults of ../shared/cases, each against the loader that it names."""

import base64
import json
import pathlib

import pytest

from xrpo_jax.data.load import few_shot, load
from xrpo_jax.data.read import Row, read

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
CASES = pathlib.Path(__file__).parents[2] / "shared" / "cases" / "data_format.jsonl"
ELSEWHERE = ("chat_template", "tokenizer")  # not about data: tested with what they are about
FORMATS = {"parquet": "auto", "jsonl": "auto", "auto": "auto"}  # others are named as their loader
pytestmark = pytest.mark.skipif(not CASES.exists(), reason="../shared/cases is not there")


def cases():
    if not CASES.exists():
        return []
    with open(CASES) as lines:
        every = [json.loads(line) for line in lines]
    return [case for case in every if case["input"]["loader"] not in ELSEWHERE]


def source(given, folder):
    """What load() is given for a case: rows with their places, and a name."""
    for name, text in given.get("files", {}).items():
        (folder / name).write_text(text)
    for name, text in given.get("files_b64", {}).items():
        (folder / name).write_bytes(base64.b64decode(text))
    if "columns" in given:
        typed = given.get("arrow_types", {})
        columns = {
            name: pyarrow.array(values, getattr(pyarrow, typed[name])() if name in typed else None)
            for name, values in given["columns"].items()
        }
        parquet.write_table(pyarrow.table(columns), folder / "d.parquet")
    found = sorted(folder.iterdir())
    if found:
        return list(read(str(found[0]))), str(found[0])
    rows = given["rows"] * given.get("repeat_rows", 1)
    return [Row(place=f"row {place}", value=row) for place, row in enumerate(rows)], "rows"


def run(given, folder):
    """What a case leads to, under the names that its expectation uses."""
    if given["loader"] == "few_shot":
        return {"n_shots": len(few_shot(tuple(given["pool"]), given["k"]))}
    rows, name = source(given, folder)
    options = given.get("options", {})
    loaded = load(
        rows,
        name,
        format=FORMATS.get(given["loader"], given["loader"]),
        answer_key=options.get("gold_key", ""),
        dedupe=options.get("dedupe", False),
    )
    values, examples = [row.value for row in rows], loaded.examples
    prompts = [value.get("prompt") for value in values]
    listed = all(isinstance(p, list) and all(isinstance(m, dict) for m in p) for p in prompts)
    return {
        "gold": [example.gold for example in examples],
        "n_rows": len(examples),
        "report": {"dropped": loaded.repeated},
        "columns": sorted(values[0]) if values else [],
        "types": {"prompt": "list of dict" if listed else "other"},
        "n_messages": [len(example.prompt) for example in examples],
        "n_tests": [len(e.gold["tests"]) for e in examples if e.kind == "code"],
        "test_type": [
            "functional" if e.gold["entry_point"] else "stdio" for e in examples if e.kind == "code"
        ],
        "prompt": " ".join(turn.content for turn in examples[0].prompt),
        "values": values,
    }


@pytest.mark.parametrize("case", cases(), ids=lambda case: f"{case['fault']}-{case['id']}")
def test_a_published_fault(case, tmp_path):
    expected = dict(case["expected"])
    names = expected.pop("error_names", None)
    if names:
        with pytest.raises(ValueError) as error:
            run(case["input"], tmp_path)
        for name in names:
            assert name.lower() in str(error.value).lower()
        if "afterwards" in expected:  # what the case's pickle would write
            assert not pathlib.Path("/tmp/rlvr_pwned_pickle").exists()
        return
    found = run(case["input"], tmp_path)
    for text in expected.pop("prompt_contains", ()):
        assert text in found["prompt"]
    column = expected.pop("prompt_column", None)
    if column:
        assert found["values"][0][column] == found["prompt"]
    assert expected or column
    for key, value in expected.items():
        assert found[key] == value, key


def test_every_loader_is_covered_here_or_there():
    loaders = {case["input"]["loader"] for case in cases()}
    assert len(cases()) == 38
    assert loaders == {
        "jsonl", "parquet", "gsm8k", "math", "aime", "auto", "dapo", "countdown",
        "livecodebench", "few_shot",
    }  # fmt: skip
