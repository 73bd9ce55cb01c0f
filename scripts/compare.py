"""A table and curves of the runs in a folder, grouped by variant over seeds.

    python scripts/compare.py runs/ablations [--baseline=grpo] [--target=0.5]

Folders are named VARIANT-SEED. Numbers are means over seeds with 95 % Student-t intervals;
differences to the baseline are paired by seed. Writes FOLDER/compare.md and FOLDER/compare.png.
"""

from __future__ import annotations

import argparse
import pathlib
import re

import numpy as np
from scipy import stats

from xrpo_jax.log import read_metrics


def read(folder: pathlib.Path) -> dict[str, dict[int, list[dict]]]:
    """variant -> seed -> records."""
    runs: dict[str, dict[int, list[dict]]] = {}
    for path in sorted(folder.glob("*/metrics.jsonl")):
        found = re.fullmatch(r"(.+)-(\d+)", path.parent.name)
        if found:
            records = read_metrics(path)
            if records and "eval/pass@1" in records[-1] and "reward" not in records[-1]:
                runs.setdefault(found[1], {})[int(found[2])] = records
            else:
                print(f"left out, not finished: {path.parent}")
    return runs


def curve(records: list[dict], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of a metric."""
    chosen = [record for record in records if name in record]
    return [record["step"] for record in chosen], [record[name] for record in chosen]


def mean_interval(values: list[float]) -> tuple[float, float]:
    """Mean and half-width of its 95 % Student-t interval (NaN for a single value)."""
    values = np.asarray(values, np.float64)
    if len(values) < 2:
        return float(values.mean()), float("nan")
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return float(values.mean()), float(half)


def steps_to(records: list[dict], target: float) -> float:
    """The step at which held-out pass@1 first reaches `target`, read off between evaluations."""
    steps, values = curve(records, "eval/pass@1")
    for place, value in enumerate(values):
        if value >= target:
            if place == 0:
                return steps[0]
            share = (target - values[place - 1]) / (value - values[place - 1])
            return steps[place - 1] + share * (steps[place] - steps[place - 1])
    return float("inf")


def over_run(records: list[dict], name: str) -> float:
    """Mean of a metric over the evaluations after the first: how soon, not only how far."""
    return float(np.mean(curve(records, name)[1][1:]))


def _steps(value: float) -> str:
    return f"{value:.0f}" if np.isfinite(value) else "never"


def percent(values: list[float], signed: bool = False) -> str:
    mean, half = mean_interval(values)
    text = f"{100 * mean:{'+' if signed else ''}.1f}"
    return text if np.isnan(half) else f"{text} ± {100 * half:.1f}"


def levels(record: dict) -> list[str]:
    """Names of held-out pass@1 by level, in the task's order: the last is the hardest."""
    names = [name for name in record if name.startswith("eval/pass@1/")]
    return [name for name in names if not name.endswith(("_low", "_high"))]


def table(runs: dict, baseline: str, target: float) -> str:
    """A Markdown table, one row a variant."""
    last = max(r["step"] for seeds in runs.values() for records in seeds.values() for r in records)
    complete = {
        variant: {s: r for s, r in seeds.items() if r and r[-1]["step"] == last}
        for variant, seeds in runs.items()
    }
    some = next(r for seeds in complete.values() for r in seeds.values())
    passed = [name for name in some[-1] if re.fullmatch(r"eval/(pass|cons)@\d+", name)]
    by_level = levels(some[-1])
    names = [*passed, *by_level]
    heads = [name.removeprefix("eval/").removeprefix("pass@1/") for name in names]
    compared = ("eval/pass@1", *by_level[-1:])
    short = [name.rpartition("/")[2] for name in compared]
    heads += [f"{name} over the run" for name in short]
    heads += [f"{name} against {baseline}" for name in short]
    heads += [f"steps to {target:.0%}", "tokens", "s/step"]
    lines = ["| variant | seeds | " + " | ".join(heads) + " |", "|" + "---|" * (len(heads) + 2)]
    for variant, seeds in complete.items():
        if not seeds:
            continue
        cells = [variant, str(len(seeds))]
        cells += [percent([r[-1][name] for r in seeds.values()]) for name in names]
        cells += [percent([over_run(r, name) for r in seeds.values()]) for name in compared]
        for name in compared:
            paired = [
                over_run(seeds[s], name) - over_run(complete[baseline][s], name)
                for s in seeds
                if s in complete.get(baseline, {})
            ]
            cells.append(percent(paired, signed=True) if variant != baseline and paired else "")
        reached = [steps_to(r, target) for r in seeds.values()]
        low, middle, high = np.percentile(reached, [0, 50, 100], method="nearest")
        cells.append(f"{_steps(middle)} ({_steps(low)} to {_steps(high)})")
        cells.append(f"{np.mean([r[-1]['eval/length'] for r in seeds.values()]):.1f}")
        spent = [np.median(curve(r, "seconds/step")[1]) for r in seeds.values()]
        cells.append(f"{np.mean(spent):.2f}")
        lines.append("| " + " | ".join(cells) + " |")
    note = (
        f"\nHeld-out, percent, mean ± 95 % over seeds; at step {last} where nothing else is said; "
        "differences are of the means over the run, paired by seed; steps to target: median "
        "and range over seeds."
    )
    return "\n".join(lines) + "\n" + note


def draw(runs: dict, path: pathlib.Path) -> None:
    """Held-out pass@1, overall and by level: mean over seeds and its range."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    some = next(records for seeds in runs.values() for records in seeds.values())
    names = ["eval/pass@1", *levels(some[-1])]
    size = (3.7 * len(names), 3.6)
    figure, axes = pyplot.subplots(1, len(names), figsize=size, layout="constrained")
    for axis, name in zip(axes, names, strict=True):
        for variant, seeds in runs.items():
            curves = [curve(records, name) for records in seeds.values()]
            shared = min(len(steps) for steps, _ in curves)
            if not shared:
                continue
            steps = curves[0][0][:shared]
            values = np.array([value[:shared] for _, value in curves])
            (line,) = axis.plot(steps, values.mean(axis=0), label=variant)
            axis.fill_between(
                steps, values.min(axis=0), values.max(axis=0), color=line.get_color(), alpha=0.12
            )
        axis.set(xlabel="step", ylabel=name.removeprefix("eval/"), ylim=(0, None))
        axis.grid(alpha=0.25)
    axes[0].set_title("held-out, mean and range over seeds")
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


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
    draw(runs, options.folder / "compare.png")
    print(f"\ncurves {options.folder / 'compare.png'}")


if __name__ == "__main__":
    main()
