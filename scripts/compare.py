"""A table and curves of the runs in a folder, grouped by variant over seeds.

    python scripts/compare.py runs/ablations [--baseline=grpo] [--target=0.5]

Folders are named VARIANT-SEED. Numbers are means over seeds with 95 % Student-t intervals;
differences to the baseline are paired by seed; the best variant comes first. Runs may end at
different steps, as those with a budget of tokens do; the note under the table says so where their
budgets differ. Writes FOLDER/compare.md and FOLDER/compare.png.
"""

from __future__ import annotations

import argparse
import pathlib

import numpy as np
from compare_curves import draw
from compare_runs import (
    Run,
    Runs,
    axis,
    differ,
    every,
    known,
    mean_interval,
    metrics,
    over_run,
    read,
    steps_to,
    tokens_to,
)


def percent(values: list[float], signed: bool = False) -> str:
    """Mean ± interval of what there is; "" without values."""
    values = [value for value in values if not np.isnan(value)]
    if not values:
        return ""
    mean, half = mean_interval(values)
    text = f"{100 * mean:{'+' if signed else ''}.1f}"
    return text if np.isnan(half) else f"{text} ± {100 * half:.1f}"


def middle_range(values: list[float], scale: float = 1.0, digits: int = 0) -> str:
    """Median and range, infinity as "never"; "" where one is unknown."""
    if np.isnan(values).any():
        return ""
    low, middle, high = (
        f"{value / scale:,.{digits}f}" if np.isfinite(value) else "never"
        for value in np.percentile(values, [0, 50, 100], method="nearest")
    )
    return f"{middle} ({low} to {high})"


def ordered(runs: Runs) -> Runs:
    """By the mean of the last pass@1, best first."""

    def last(variant: str) -> float:
        return float(np.mean([run.records[-1]["eval/pass@1"] for run in runs[variant].values()]))

    return {variant: runs[variant] for variant in sorted(runs, key=last, reverse=True)}


def row(
    seeds: dict[int, Run],
    against: dict[int, Run],
    names: list[str],
    compared: list[str],
    along: str,
    target: float,
) -> list[str]:
    """The cells of a variant, in the order of `table`; `against` are the baseline's runs."""
    members = list(seeds.values())

    def last(name: str) -> list[float]:
        return [run.records[-1][name] for run in members if name in run.records[-1]]

    cells = [str(len(members)), *(percent(last(name)) for name in names)]
    cells += [percent([over_run(run, name, along) for run in members]) for name in compared]
    for name in compared if against else ():
        paired = [
            over_run(seeds[seed], name, along) - over_run(against[seed], name, along)
            for seed in sorted(seeds.keys() & against.keys())
        ]
        cells.append("" if seeds is against else percent(paired, signed=True))
    cells.append(middle_range([steps_to(run, target) for run in members]))
    cells.append(middle_range([tokens_to(run, target) for run in members], scale=1000, digits=1))
    cells.append(f"{np.mean(last('eval/length')):.1f}" if last("eval/length") else "")
    spent = np.mean([run.spent[-1] for run in members]) / 1000
    cells.append(f"{spent:,.1f}" if np.isfinite(spent) else "")
    cells.append(f"{np.mean([run.steps for run in members]):.0f}")
    times = [[r["seconds/step"] for r in run.records if "seconds/step" in r] for run in members]
    times = [np.median(each) for each in times if each]
    cells.append(f"{np.mean(times):.2f}" if times else "")
    return cells


def table(runs: Runs, baseline: str, target: float) -> str:
    """A Markdown table, one row a variant, and what to know about it."""
    along = axis(runs)
    passed, by_level = metrics(runs)
    names = [*passed, *by_level[-1:]]
    compared = ["eval/pass@1", *by_level[-1:]]
    short = [name.rpartition("/")[2] for name in compared]
    against = runs.get(baseline, {})
    heads = ["variant", "seeds"]
    heads += [name.removeprefix("eval/").removeprefix("pass@1/") for name in names]
    heads += [f"{name} over the run" for name in short]
    heads += [f"{name} against {baseline}" for name in short if against]
    heads += [f"steps to {target:.0%}", f"k tokens to {target:.0%}"]
    heads += ["answer tokens", "k decoded", "steps", "s/step"]
    lines = [heads]
    for variant, seeds in ordered(runs).items():
        name = f"{variant} (baseline)" if variant == baseline else variant
        lines.append([name, *row(seeds, against, names, compared, along, target)])
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    texts = [" | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines]
    rows = [f"| {text} |" for text in texts]
    rows.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join([*rows, "", note(runs, baseline, along)])


def note(runs: Runs, baseline: str, along: str) -> str:
    """How the numbers were made, and where the runs are not alike."""
    members = every(runs)
    said = [
        "Held-out, percent, mean ± 95 % over seeds, at the end of each run where nothing else is "
        f"said; over the run: mean along its {along}; differences are of these, paired by seed; "
        "steps and thousands of decoded tokens to the target: median and range over seeds; "
        "k decoded: all that a run decoded for training, in thousands."
    ]
    if baseline not in runs:
        said.append(f"No finished run of the baseline {baseline}.")
    missing = [run for run in members if np.isfinite(run.spent[-1]) and not run.counted]
    if missing:
        said.append(
            f"{len(missing)} of {len(members)} runs logged no decoded tokens: theirs are length x "
            "rollouts."
        )
    amounts = {
        (variant, seed): run.spent[-1] / 1000 if known(runs) else run.steps
        for variant, seeds in runs.items()
        for seed, run in seeds.items()
    }
    values = list(amounts.values())
    # Steps are all alike or they differ: nobody's step is a tenth of a per cent too long.
    if differ(values, 0.1 if known(runs) else 0.0):
        low, high = min(amounts, key=amounts.get), max(amounts, key=amounts.get)
        unit = "thousand decoded tokens" if known(runs) else "steps"
        ends = [f"{amounts[one]:,.0f} ({one[0]}, seed {one[1]})" for one in (low, high)]
        said.append(f"**Budgets differ**: from {ends[0]} to {ends[1]} {unit}.")
    return "\n".join(said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--baseline", default="grpo")
    parser.add_argument("--target", type=float, default=0.8, help="of held-out pass@1")
    options = parser.parse_args()
    runs = read(options.folder)
    if not runs:
        parser.error(f"{options.folder} holds no finished run named VARIANT-SEED")
    text = table(runs, options.baseline, options.target)
    print(text)
    (options.folder / "compare.md").write_text(text + "\n")
    draw(ordered(runs), options.baseline, options.folder / "compare.png")
    print(f"\ncurves {options.folder / 'compare.png'}")


if __name__ == "__main__":
    main()
