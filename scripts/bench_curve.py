"""The cost curve: useful tokens/s and memory as one size of the work grows, the others fixed.

The model is the tiny one, with a larger table or context where a point asks for it: SmolLM2 would
take hours on two cores for the largest points, and shows less of what is not matrix products.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib

from bench_work import Work

BASE = {"rows": 64, "completion": 64, "prompt": 40, "vocabulary": 416}
AXES = {
    "rows": (16, 64, 256, 1024),
    "completion": (32, 128, 512, 2048),
    "prompt": (32, 128, 512, 2048),
    "vocabulary": (416, 4096, 49152),
}
UNITS = {"rows": "rows", "vocabulary": "entries"}  # of an axis; tokens where nothing is said
MEASURED = ("rollout", "update")
SAMPLES = 8
POINTS = {
    f"{axis}:{size}:{kind}": BASE | {axis: size}
    for axis, sizes in AXES.items()
    for size in sizes
    for kind in MEASURED
}


def main(given: argparse.Namespace) -> int:
    """Measure the points that are asked for and draw all that the file has; 1 if one failed."""
    from bench import measure, outcome, table, write

    def measured(name: str) -> dict:
        log = given.out / "logs" / f"curve-{name.replace(':', '-')}.log"
        found = measure(work_of(name, given.out), given.chosen, given.repeats, log)
        return found | {"work": {key: found["work"][key] for key in ("kind", "dtype", "samples")}}

    file = given.json or given.out / "curve.json"
    for name in given.names:
        found = outcome(functools.partial(measured, name))
        write(file, {name: found | {"point": POINTS[name]}})
        print(table({name: found}).splitlines()[-1], flush=True)
    results = json.loads(file.read_text())
    results = {name: results[name] for name in POINTS if name in results}
    summaries = {name: each["summary"] for name, each in results.items() if "summary" in each}
    print(f"\n{table(results)}")
    print(f"\n{draw(summaries, file.with_suffix('.png'))}")
    return int(any("failure" in results[name] for name in given.names))


def work_of(name: str, folder: pathlib.Path) -> Work:
    """The work of one of POINTS; its model is made in `folder`."""
    from bench_models import make_work, model_folder  # starts JAX

    point = POINTS[name]
    context = max(point["prompt"] + point["completion"], 512)
    changes = {"vocab_size": point["vocabulary"], "max_position_embeddings": context}
    return make_work(
        name.rpartition(":")[2],
        model_folder("tiny", folder, **changes),
        "float32",
        prompts=point["rows"] // SAMPLES,
        samples=SAMPLES,
        new_tokens=point["completion"],
        prompt_length=(max(point["prompt"] - 8, 1), point["prompt"]),
    )


def draw(summaries: dict[str, dict], file: pathlib.Path) -> pathlib.Path:
    """Rates above, memory below, an axis of the work a column; returns `file`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(2, len(AXES), figsize=(12, 5), sharex="col", sharey="row")
    for column, axis in enumerate(AXES):
        rate, memory = panels[:, column]
        for kind, color in zip(MEASURED, ("tab:blue", "tab:orange"), strict=True):
            sizes = [size for size in AXES[axis] if f"{axis}:{size}:{kind}" in summaries]
            facts = [summaries[f"{axis}:{size}:{kind}"] for size in sizes]
            middle = [each["rate"] for each in facts]
            below = [each["rate"] - each["low"] for each in facts]
            above = [each["high"] - each["rate"] for each in facts]
            rate.errorbar(sizes, middle, [below, above], marker="o", color=color, label=kind)
            memory.plot(sizes, [each["peak_gb"] for each in facts], marker="o", color=color)
        rate.set(xscale="log", yscale="log", title=f"{axis} (else {BASE[axis]})")
        memory.set(xscale="log", xlabel=UNITS.get(axis, "tokens"))
        memory.set_xticks(AXES[axis], [str(size) for size in AXES[axis]])
        memory.minorticks_off()
    panels[1, 0].set_ylim(bottom=0)  # of all in its row, after all are drawn
    panels[0, 0].set_ylabel("useful tokens/s")
    panels[1, 0].set_ylabel("peak memory, GB")
    panels[0, 0].legend(frameon=False)
    for panel in panels.flat:
        panel.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)
    return file
