"""What compare.py reads from a folder of runs: records, budgets, learning curves, intervals."""

from __future__ import annotations

import dataclasses
import pathlib
import re

import numpy as np
from scipy import stats

from xrpo_jax.log import ended, read_metrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run; `spent[k]` tokens were decoded before step k, NaN where that is unknown."""

    records: list[dict]
    steps: int
    spent: np.ndarray  # f64[steps + 1]
    counted: bool  # by the sampler; else from lengths, which miss what was thrown away


Runs = dict[str, dict[int, Run]]  # variant -> seed -> run


def read(folder: pathlib.Path) -> Runs:
    """The finished runs of `folder`; names the others."""
    runs: Runs = {}
    for path in sorted(folder.glob("*/metrics.jsonl")):
        found = re.fullmatch(r"(.+)-(\d+)", path.parent.name)
        if found:
            records = read_metrics(path)
            if ended(records):
                runs.setdefault(found[1], {})[int(found[2])] = make_run(records)
            else:
                print(f"left out, not finished: {path.parent}")
    return runs


def make_run(records: list[dict]) -> Run:
    steps = records[-1]["step"]
    counts, before = np.full(steps, np.nan), 0.0
    taken = [record for record in records if record["step"] < steps]
    for record in taken:
        # Logs of before `decoded_tokens`: what was trained on is all that was decoded then.
        product = record.get("length", np.nan) * record.get("rollouts", np.nan)
        counts[record["step"]] = record.get("decoded_tokens", product)
        if record["step"] == 0:  # SPO's first estimates cost tokens before the first step
            before = record.get("decoded_tokens_total", counts[0]) - counts[0]
    spent = before + np.concatenate([[0.0], np.cumsum(counts)])
    counted = all("decoded_tokens" in record for record in taken)
    return Run(records=records, steps=steps, spent=spent, counted=counted)


def every(runs: Runs) -> list[Run]:
    """All runs of all variants."""
    return [run for seeds in runs.values() for run in seeds.values()]


def metrics(runs: Runs) -> tuple[list[str], list[str]]:
    """Names of the last records: held-out pass@N and cons@N; pass@1 by level, hardest last."""
    names = list(dict.fromkeys(name for run in every(runs) for name in run.records[-1]))
    passed = [name for name in names if re.fullmatch(r"eval/(pass|cons)@\d+", name)]
    levels = [name for name in names if name.startswith("eval/pass@1/")]
    return passed, [name for name in levels if not name.endswith(("_low", "_high"))]


def differ(values: list[float], share: float = 0.1) -> bool:
    """Whether the largest of `values` is more than `share` above the smallest."""
    return max(values) > (1 + share) * min(values)


def known(runs: Runs) -> bool:
    """Whether the decoded tokens of every run are known."""
    return all(np.isfinite(run.spent[-1]) for run in every(runs))


def axis(runs: Runs) -> str:
    """What the runs are compared along: steps where equal steps are equal budgets, else tokens.

    Of variants, since the seeds of one differ by what they learn to write.
    """
    steps = {run.steps for run in every(runs)}
    spent = [np.mean([run.spent[-1] for run in seeds.values()]) for seeds in runs.values()]
    return "tokens" if known(runs) and (len(steps) > 1 or differ(spent)) else "steps"


def curve(run: Run, name: str, along: str) -> tuple[np.ndarray, np.ndarray]:
    """A metric's values and where they were taken, in steps or in decoded tokens.

    An evaluation in the record of step k was made before that step's tokens were decoded.
    """
    chosen = [record for record in run.records if name in record]
    steps = np.array([record["step"] for record in chosen], np.int64)
    values = np.array([record[name] for record in chosen], np.float64)
    return (run.spent[steps] if along == "tokens" else steps.astype(np.float64)), values


def band(seeds: dict[int, Run], name: str, along: str) -> tuple[np.ndarray, np.ndarray]:
    """Places and f64[seeds, places]: the seeds' curves where any has a point and all have begun.

    Between its own points a curve is a line; ends where the first seed does.
    """
    curves = [curve(run, name, along) for run in seeds.values()]
    curves = [(places, values) for places, values in curves if len(places)]
    if not curves:
        return np.zeros(0), np.zeros((0, 0))
    points = np.unique(np.concatenate([places for places, _ in curves]))
    low = max(places[0] for places, _ in curves)
    high = min(places[-1] for places, _ in curves)
    points = points[(points >= low) & (points <= high)]
    return points, np.array([np.interp(points, places, values) for places, values in curves])


def steps_to(run: Run, target: float) -> float:
    """The step at which held-out pass@1 first reaches `target`, read off between evaluations."""
    steps, values = curve(run, "eval/pass@1", "steps")
    for place, value in enumerate(values):
        if value >= target:
            if place == 0:
                return float(steps[0])
            share = (target - values[place - 1]) / (value - values[place - 1])
            return float(steps[place - 1] + share * (steps[place] - steps[place - 1]))
    return float("inf")


def tokens_to(run: Run, target: float) -> float:
    """The tokens decoded up to `steps_to`."""
    step = steps_to(run, target)
    if np.isinf(step):
        return step
    return float(np.interp(step, np.arange(run.steps + 1), run.spent))


def over_run(run: Run, name: str, along: str) -> float:
    """Mean of a metric over the evaluations after the first: how soon, not only how far.

    Each counts by its distance from the one before: the last may follow that closely.
    """
    places, values = curve(run, name, along)
    return float(np.average(values[1:], weights=np.diff(places))) if len(values) > 1 else np.nan


def mean_interval(values: list[float]) -> tuple[float, float]:
    """Mean and half-width of its 95 % Student-t interval (NaN for a single value)."""
    values = np.asarray(values, np.float64)
    if len(values) < 2:
        return float(values.mean()), float("nan")
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return float(values.mean()), float(half)
