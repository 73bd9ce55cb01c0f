"""The picture of compare.py: held-out learning curves of a few variants, or of many."""

from __future__ import annotations

import pathlib

import matplotlib
import numpy as np
from compare_runs import Run, Runs, axis, band, metrics
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

FEW = 8  # lines that one panel can tell apart
COLOURS = ("#0072b2", "#d55e00")  # of overall and hardest, told apart by the colour-blind too
STYLES = ("--", ":")  # of the baseline's
LABELS = {"steps": "step", "tokens": "decoded tokens, thousands"}


def draw(runs: Runs, baseline: str, path: pathlib.Path) -> None:
    """Held-out pass@1 over steps or decoded tokens: mean over seeds and its range."""
    make = few if len(runs) <= FEW else many
    figure = make(runs, baseline, axis(runs))
    figure.savefig(path, dpi=120)


def few(runs: Runs, baseline: str, along: str) -> Figure:
    """A panel for overall and each level, with all variants."""
    names = ["eval/pass@1", *metrics(runs)[1]]
    size = (3.7 * len(names) + 2.4, 3.6)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, len(names), sharex=True, squeeze=False)
    # By name and not by rank, so that a variant keeps its colour from one picture to the next.
    others = sorted(runs.keys() - {baseline})
    colours = dict(zip(others, matplotlib.colormaps["tab10"].colors, strict=False))
    for panel, name in zip(axes[0], names, strict=True):
        for variant, seeds in runs.items():
            style = {"color": "black", "linestyle": "--", "zorder": 3}
            if variant != baseline:
                style = {"color": colours[variant]}
            line(panel, seeds, name, along, label=variant, **style)
        panel.set(ylabel=name.removeprefix("eval/"))
        dress(panel, along)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False)
    figure.suptitle("held-out, mean and range over seeds")
    return figure


def many(runs: Runs, baseline: str, along: str) -> Figure:
    """The ranking of the last values, and a panel a variant with the baseline behind it."""
    hardest = metrics(runs)[1][-1:]
    names = ["eval/pass@1", *hardest]
    columns = int(np.ceil(np.sqrt(1.6 * len(runs))))
    rows = int(np.ceil(len(runs) / columns))
    figure = Figure(figsize=(4.2 + 2.1 * columns, 1.2 + 2.1 * rows), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=[4.2, 2.1 * columns])
    ranking(left.subplots(), runs, baseline, names)
    panels = right.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for place, panel in enumerate(panels.flat):
        if place >= len(runs):
            panel.remove()
            continue
        variant = list(runs)[place]
        for name, colour, style in zip(names, COLOURS, STYLES, strict=False):
            if variant == baseline:
                line(panel, runs[variant], name, along, color="black", linestyle=style)
                continue
            if baseline in runs:
                places, values = band(runs[baseline], name, along)
                panel.plot(places, values.mean(axis=0), style, color="black", linewidth=1)
            line(panel, runs[variant], name, along, color=colour)
        last = np.mean([run.records[-1]["eval/pass@1"] for run in runs[variant].values()])
        panel.set_title(f"{variant}  {100 * last:.1f}", fontsize=9)
        dress(panel, along)
        panel.set_xlabel("")
        panel.tick_params(labelbottom=place + columns >= len(runs))
    right.supxlabel(LABELS[along], fontsize="medium")
    words = [name.removeprefix("eval/") for name in names]
    handles = [Line2D([], [], color=colour) for colour, _ in zip(COLOURS, words, strict=False)]
    if baseline in runs:
        handles += [Line2D([], [], color="black", linestyle=s) for s in STYLES[: len(words)]]
        words += [f"{baseline} {word}" for word in words]
    right.legend(handles, words, loc="outside upper center", ncols=len(words), frameon=False)
    return figure


def ranking(panel: Axes, runs: Runs, baseline: str, names: list[str]) -> None:
    """The last values: a dot a seed, a bar for their mean."""
    for name, colour, style in zip(names, COLOURS, STYLES, strict=False):
        for place, (variant, seeds) in enumerate(runs.items()):
            last = [run.records[-1].get(name, np.nan) for run in seeds.values()]
            panel.plot(last, [place] * len(last), "o", color=colour, markersize=4, alpha=0.5)
            panel.plot(np.mean(last), place, "|", color=colour, markersize=14, markeredgewidth=2)
            if variant == baseline:
                panel.axvline(np.mean(last), linestyle=style, color="black", linewidth=1)
    panel.set_yticks(range(len(runs)), list(runs))
    for label in panel.get_yticklabels():
        label.set_fontweight("bold" if label.get_text() == baseline else "normal")
    panel.invert_yaxis()
    panel.set(xlabel="at the end, each seed and mean", xlim=(0, 1.02))
    panel.grid(alpha=0.25)


def line(panel: Axes, seeds: dict[int, Run], name: str, along: str, **style) -> None:
    """A variant's mean with the range of its seeds."""
    places, values = band(seeds, name, along)
    if len(places):
        (drawn,) = panel.plot(places, values.mean(axis=0), **style)
        low, high = values.min(axis=0), values.max(axis=0)
        panel.fill_between(places, low, high, color=drawn.get_color(), alpha=0.12, linewidth=0)


def dress(panel: Axes, along: str) -> None:
    """Axis labels, limits and grid."""
    panel.set(ylim=(0, 1.02), xlabel=LABELS[along])
    panel.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    if along == "tokens":
        panel.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:,.4g}")
    panel.grid(alpha=0.25)
