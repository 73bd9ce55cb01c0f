"""scripts/compare.py on metrics written by hand: budgets, crossings, intervals, gaps."""

import importlib.util
import json
import pathlib
import sys

import matplotlib.image
import numpy as np
import pytest

SCRIPTS = pathlib.Path(__file__).parents[1] / "scripts"


@pytest.fixture
def compare(monkeypatch):
    """The script, and with it its two neighbours."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    spec = importlib.util.spec_from_file_location("compare_script", SCRIPTS / "compare.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


@pytest.fixture
def runs_module(compare):
    return sys.modules["compare_runs"]


def evaluation(value, hard=0.5):
    return {
        "eval/pass@1": value,
        "eval/pass@1_low": 0.0,
        "eval/pass@8": value,
        "eval/cons@8": value,
        "eval/pass@1/easy": 1.0,
        "eval/pass@1/hard": hard,
        "eval/pass@1/hard_low": 0.0,
        "eval/length": 9.0,
    }


def records(evaluations, per_step, **more):
    """A finished run: {step: pass@1}, the last step's being the end; decoded tokens by step."""
    end = max(evaluations)
    found = []
    for step in range(end):
        record = {"step": step, "reward": 0.5, "seconds/step": 2.0} | more
        if per_step:
            record["decoded_tokens"] = per_step(step)
        found.append(record | (evaluation(evaluations[step]) if step in evaluations else {}))
    return [*found, {"step": end} | evaluation(evaluations[end])]


CURVE = {0: 0.4, 20: 0.6, 30: 0.9}


def late(step):
    """200 tokens in the first 20 steps, 300 in the next 10."""
    return 10 if step < 20 else 30


def write(folder, name, lines):
    (folder / name).mkdir()
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / name / "metrics.jsonl").write_text(text)


def cells(text):
    """variant -> head -> cell."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: dict(zip(rows[0], row, strict=True)) for row in rows[2:]}


def test_the_target_is_read_off_between_evaluations(runs_module):
    run = runs_module.make_run(records(CURVE, late))
    assert run.steps == 30 and run.counted
    assert runs_module.steps_to(run, 0.75) == pytest.approx(25)  # halfway from 0.6 to 0.9
    assert runs_module.tokens_to(run, 0.75) == pytest.approx(200 + 5 * 30)
    assert runs_module.steps_to(run, 0.5) == pytest.approx(10)
    assert runs_module.tokens_to(run, 0.5) == pytest.approx(100)
    assert (runs_module.steps_to(run, 0.3), runs_module.tokens_to(run, 0.3)) == (0, 0)
    assert runs_module.steps_to(run, 0.95) == runs_module.tokens_to(run, 0.95) == np.inf


def test_an_evaluation_comes_before_the_tokens_of_its_step(runs_module):
    run = runs_module.make_run(records(CURVE, late))
    assert runs_module.curve(run, "eval/pass@1", "tokens")[0].tolist() == [0, 200, 500]
    assert runs_module.curve(run, "eval/pass@1", "steps")[0].tolist() == [0, 20, 30]
    # 0.6 counts for what led to it, 0.9 likewise.
    assert runs_module.over_run(run, "eval/pass@1", "steps") == pytest.approx(
        (0.6 * 20 + 0.9 * 10) / 30
    )
    assert runs_module.over_run(run, "eval/pass@1", "tokens") == pytest.approx(
        (0.6 * 200 + 0.9 * 300) / 500
    )


def test_seeds_with_other_points_meet_on_a_common_grid(runs_module):
    seeds = {
        0: runs_module.make_run(records({0: 0.0, 10: 1.0}, lambda step: 10)),
        1: runs_module.make_run(records({0: 0.2, 4: 0.6, 8: 0.4}, lambda step: 15)),
    }
    places, values = runs_module.band(seeds, "eval/pass@1", "tokens")
    assert places.tolist() == [0, 60, 100]  # seed 1's end, 120, is beyond seed 0's
    assert values[0] == pytest.approx([0.0, 0.6, 1.0])
    assert values[1] == pytest.approx([0.2, 0.6, 0.6 - 0.2 * 40 / 60])
    assert runs_module.band(seeds, "eval/none", "tokens")[1].size == 0


def test_the_interval_is_students(runs_module, compare):
    # t(0.975, 2 degrees of freedom) = 4.302653, standard deviation 1.
    assert runs_module.mean_interval([1, 2, 3]) == pytest.approx((2, 4.302653 / 3**0.5))
    mean, half = runs_module.mean_interval([5])
    assert mean == 5 and np.isnan(half)
    assert compare.percent([0.01, 0.02, 0.03]) == "2.0 ± 2.5"
    assert compare.percent([0.25], signed=True) == "+25.0"
    assert compare.percent([]) == compare.percent([np.nan]) == ""


def test_what_is_unknown_has_an_empty_cell(compare):
    assert compare.middle_range([30.0, 10.0, np.inf]) == "30 (10 to never)"
    assert compare.middle_range([1500.0], scale=1000, digits=1) == "1.5 (1.5 to 1.5)"
    assert compare.middle_range([np.nan, 3.0]) == ""


def test_the_table(tmp_path, compare, capsys):
    """Best first; runs of one budget that end at different steps stay; one not finished does not.

    CURVE reaches 80 % two thirds of the way from step 20 to 30; `quick` halfway from 10 to 20.
    """
    quick = {0: 0.4, 10: 0.7, 20: 0.9}
    for seed in (0, 1):
        write(tmp_path, f"grpo-{seed}", records(CURVE, late))
        write(tmp_path, f"dapo-{seed}", records(quick, lambda step: 25))
    write(tmp_path, "dapo-2", records(quick, lambda step: 25)[:-1])
    write(tmp_path, "dapo-3", records(quick, lambda step: 25)[:11])  # up to an evaluation
    write(tmp_path, "best-of-all-7", records({0: 0.4, 10: 1.0}, lambda step: 51))
    write(tmp_path, "notes", [])
    runs = compare.read(tmp_path)
    assert capsys.readouterr().out.splitlines() == [
        f"left out, not finished: {tmp_path / name}" for name in ("dapo-2", "dapo-3")
    ]
    text = compare.table(runs, "grpo", 0.8)
    found = cells(text)
    # dapo and grpo end equally: the order of their names.
    assert list(found) == ["best-of-all", "dapo", "grpo (baseline)"]
    assert found["best-of-all"]["seeds"] == "1" and found["best-of-all"]["pass@1"] == "100.0"
    assert found["best-of-all"]["pass@1 against grpo"] == ""  # no seed in common
    over = (0.7 * 250 + 0.9 * 250) / 500, (0.6 * 200 + 0.9 * 300) / 500
    assert found["dapo"] == {
        "variant": "dapo",
        "seeds": "2",
        **{name: "90.0 ± 0.0" for name in ("pass@1", "pass@8", "cons@8")},
        "hard": "50.0 ± 0.0",
        "pass@1 over the run": f"{100 * over[0]:.1f} ± 0.0",
        "hard over the run": "50.0 ± 0.0",
        "pass@1 against grpo": f"{100 * (over[0] - over[1]):+.1f} ± 0.0",
        "hard against grpo": "+0.0 ± 0.0",
        "steps to 80%": "15 (15 to 15)",
        "k tokens to 80%": "0.4 (0.4 to 0.4)",
        "answer tokens": "9.0",
        "k decoded": "0.5",
        "steps": "20",
        "s/step": "2.00",
    }
    assert found["grpo (baseline)"]["steps to 80%"] == "27 (27 to 27)"
    assert found["grpo (baseline)"]["pass@1 against grpo"] == ""
    assert "along its tokens" in text
    assert "Budgets differ" not in text  # 500 to 510
    assert "logged no decoded tokens" not in text and "No finished run" not in text


def test_differing_budgets_are_said(tmp_path, compare):
    write(tmp_path, "grpo-0", records(CURVE, lambda step: 1000))
    write(tmp_path, "grpo-1", records(CURVE, lambda step: 1090))
    assert "Budgets differ" not in compare.table(compare.read(tmp_path), "grpo", 0.8)
    write(tmp_path, "dapo-0", records({0: 0.1, 34: 0.5}, lambda step: 1000))
    text = compare.table(compare.read(tmp_path), "gspo", 0.8)
    assert text.endswith(
        "No finished run of the baseline gspo.\n"
        "**Budgets differ**: from 30 (grpo, seed 0) to 34 (dapo, seed 0) thousand decoded tokens."
    )


def test_logs_of_before_decoded_tokens(tmp_path, compare, runs_module):
    """Length x rollouts in their place; equal steps are compared along steps."""
    write(tmp_path, "grpo-0", records(CURVE, None, length=2.5, rollouts=4))
    write(tmp_path, "gspo-0", records(CURVE, late))
    old, new = (runs[0] for runs in compare.read(tmp_path).values())
    assert (old.spent[-1], old.counted) == (300, False)
    assert (new.spent[-1], new.counted) == (500, True)
    assert runs_module.axis({"grpo": {0: old}}) == "steps"
    assert runs_module.axis({"grpo": {0: old}, "gspo": {0: new}}) == "tokens"
    text = compare.table(compare.read(tmp_path), "grpo", 0.75)
    assert cells(text)["grpo (baseline)"]["k tokens to 75%"] == "0.2 (0.2 to 0.2)"
    assert "1 of 2 runs logged no decoded tokens" in text


def test_logs_without_any_length(tmp_path, compare, runs_module):
    """Nothing is known of tokens: steps are what is compared, and what may differ."""
    write(tmp_path, "grpo-0", records(CURVE, None))
    write(tmp_path, "gspo-0", records(CURVE, late))
    runs = compare.read(tmp_path)
    assert runs_module.axis(runs) == "steps"
    text = compare.table(runs, "grpo", 0.75)
    assert cells(text)["grpo (baseline)"]["k decoded"] == ""
    assert cells(text)["grpo (baseline)"]["k tokens to 75%"] == ""
    assert cells(text)["gspo"]["k decoded"] == "0.5"
    assert "Budgets differ" not in text
    write(tmp_path, "gspo-1", records({0: 0.4, 31: 0.8}, late))
    runs = compare.read(tmp_path)
    assert runs_module.axis(runs) == "steps"
    text = compare.table(runs, "grpo", 0.75)
    assert "from 30 (grpo, seed 0) to 31 (gspo, seed 1) steps." in text


@pytest.mark.parametrize("count, panels", [(3, 3), (12, 1 + 12)])
def test_the_picture(tmp_path, compare, monkeypatch, count, panels):
    """A few variants share panels; many have one each, with the baseline in it, dashed, black."""
    for place in range(count):
        for seed in (0, 1):
            lines = records({0: 0.4, 10: 0.5 + seed / 10, 20 + place: 0.8}, lambda step: 10)
            write(tmp_path, f"{'grpo' if not place else place}-{seed}", lines)
    drawn = sys.modules["compare_curves"]
    monkeypatch.setattr(sys, "argv", ["compare.py", str(tmp_path)])
    compare.main()
    assert cells((tmp_path / "compare.md").read_text()).keys() >= {"grpo (baseline)"}
    assert matplotlib.image.imread(tmp_path / "compare.png").ndim == 3
    make = drawn.few if panels == count else drawn.many
    figure = make(compare.ordered(compare.read(tmp_path)), "grpo", "tokens")
    assert len(figure.axes) == panels
    for axes in figure.axes:
        dashed = [line for line in axes.lines if line.get_linestyle() == "--"]
        assert dashed and all(line.get_color() == "black" for line in dashed)
        if axes.get_title().startswith("grpo"):  # its own: with its range, and nothing else
            assert len(axes.lines) == len(axes.collections) == 2


def test_a_folder_without_runs(tmp_path, compare, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["compare.py", str(tmp_path)])
    with pytest.raises(SystemExit):
        compare.main()
    assert "holds no finished run named VARIANT-SEED" in capsys.readouterr().err


def test_tokens_decoded_before_the_first_step_count(runs_module):
    """SPO estimates every prompt first."""
    lines = records(CURVE, late)
    total = 1000
    for line in lines[:-1]:
        total += line["decoded_tokens"]
        line["decoded_tokens_total"] = total
    run = runs_module.make_run(lines)
    assert run.spent[0] == 1000 and run.spent[-1] == total == 1500
    assert runs_module.tokens_to(run, 0.75) == pytest.approx(1000 + 200 + 5 * 30)
