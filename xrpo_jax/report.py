"""What a person sees of a run: the progress bar, the table before and after, the learning curve."""

from __future__ import annotations

import io
import json
import os
import pathlib
import re
import shlex
import sys
from collections.abc import Sequence

import numpy as np
from tqdm import tqdm

from xrpo_jax.chat import Chat
from xrpo_jax.config import Settings
from xrpo_jax.explore.reward import FAILED
from xrpo_jax.log import Compiled, read_metrics, write_whole
from xrpo_jax.prompts import describe
from xrpo_jax.types import Task

SHOWN = 60  # characters of a sample in the table
PROMPT_SHOWN = 300  # characters of the first prompt


def opening(settings: Settings, task: Task, held_out: Task, parameters: int, chat: Chat) -> str:
    """What is about to be trained on what, and the first prompt as the model reads it."""
    lines = [
        f"{settings.algorithm_name} on {settings.init_from or 'the embedded policy'}: "
        f"{parameters:,} parameters, {settings.model.dtype}; task {settings.task_name}: "
        f"{len(task)} prompts, {len(held_out)} held out"
    ]
    train = settings.train
    if settings.algorithm.learn.second_update and train.minibatches * train.epochs == 1:
        lines.append(
            "note: a part of this algorithm acts from the second update of a batch on; "
            "train.minibatches=1 and train.epochs=1 make only one"
        )
    if train.async_rollouts and train.importance == "none":
        lines.append(
            "note: with train.async_rollouts=1 rollouts come from the policy of one update ago; "
            "train.importance=none takes them for the newest one's, token or sequence corrects it"
        )
    way = "through the chat template" if chat.templated else "as plain text"
    first = f"first prompt, {way}: {chat.render(task.prompt(0))[:PROMPT_SHOWN]!r}"
    return "\n".join(line for line in (*lines, describe(task), describe(held_out), first) if line)


def progress_bar(settings: Settings, start: int) -> tqdm:
    """A bar over the steps; its time left is of the steps to come."""
    bar = tqdm(
        total=settings.train.steps,
        initial=start,
        desc=settings.algorithm_name,
        unit="step",
        dynamic_ncols=True,
    )
    bar.groups = settings.rollout.prompts
    return bar


def advance(bar: tqdm, metrics: dict) -> None:
    """One step further, with reward, newest held-out pass@1 and tokens a second."""
    if "eval/pass@1" in metrics:
        bar.held_out = metrics["eval/pass@1"]
    bar.set_postfix_str(
        f"reward={metrics['reward']:.2f} pass@1={bar.held_out:.3f} "
        f"tok/s={metrics['tokens_per_second']:.0f}"
        if hasattr(bar, "held_out")
        else f"reward={metrics['reward']:.2f} tok/s={metrics['tokens_per_second']:.0f}",
        refresh=False,
    )
    bar.update()
    if metrics["groups"] < bar.groups:  # DAPO's refill reached its bound
        bar.write(
            f"step {bar.n - 1}: after {metrics['rounds']} rounds {metrics['groups']} of "
            f"{bar.groups} groups are mixed; the step trains on those (`groups` in metrics.jsonl)"
        )
        bar.groups = 0  # said once


def warn_failed(bar: tqdm, where: str, graded: Sequence[tuple[str, str]], alarm: float) -> None:
    """Say loudly when the verifier failed on more than the share `alarm` of completions.

    `graded` holds a status and a reason each.
    """
    failed = [(status, reason) for status, reason in graded if status in FAILED]
    if len(failed) <= alarm * len(graded):
        return
    counts = ", ".join(f"{sum(one == status for one, _ in failed)} {status}" for status in FAILED)
    bar.write(
        f"WARNING, {where}: the verifier failed on {len(failed)} of {len(graded)} completions "
        f"({counts}), more than verify.alarm={alarm}. Nothing is learned from them. The first "
        f"says: {failed[0][1] or 'nothing'}",
        file=sys.stderr,
    )


def warmed_up(compiled: Compiled, seconds: float) -> str:
    """What was compiled before the first step, and how long it took."""
    cached = f" ({compiled.cached} from the cache)" if compiled.cached else ""
    return f"compiled {len(compiled.names)} functions in {seconds:.0f} s{cached}"


def warn_compiled(bar: tqdm, step: int, compiled: Compiled) -> None:
    """Say loudly that something was compiled in a step that should find everything compiled."""
    if compiled.names:
        bar.write(
            f"WARNING, step {step}: compiled {', '.join(sorted(set(compiled.names)))} in "
            f"{compiled.seconds:.1f} s, after the run's first step. Such steps are slow: some "
            "shape is not among those that were compiled before it (`compiles` in metrics.jsonl)",
            file=sys.stderr,
        )


def finish(folder: pathlib.Path, settings: Settings, step: int, ended: bool, exported: str) -> dict:
    """Print the table, draw the curve, name the paths and the next command; the last evaluation.

    `ended` says whether the run is complete, `exported` how the written policy compares with the
    trained one ("" = none was written).
    """
    records = read_metrics(folder / "metrics.jsonl")
    evaluated = [record for record in records if "eval/pass@1" in record]
    print()
    if not ended:
        print(f"stopped after {step} of {settings.train.steps} steps; the same command goes on")
    elif step < settings.train.steps:
        print(f"ended after {step} steps: train.tokens={settings.train.tokens} are decoded")
    if not evaluated:
        return {}
    before, after = evaluated[0], evaluated[-1]
    print(table(before, after))
    steps = [record for record in records if "seconds/step" in record]
    print(phases(steps))
    print(samples_table(folder, before["step"], after["step"]))
    curve = folder / "curve.png"
    draw_curve(records, curve, settings.algorithm_name)
    print(f"\nlearning curve  {curve}")
    print(f"metrics         {folder / 'metrics.jsonl'}")
    print(f"samples         {folder / 'samples'}")
    if settings.checkpoint.rollouts:
        print(f"rollouts        {folder / 'rollouts.jsonl.gz'}")
    print(f"checkpoint      {folder / 'checkpoints' / str(step)}")
    if ended:
        if exported:
            print(f"policy          {folder / 'policy'}  (Hugging Face layout)")
            print(f"                checked: {exported}")
        print(f"\nnext: {next_command(settings, folder, sys.argv[1:])}")
    return after


def next_command(settings: Settings, folder: pathlib.Path, arguments: list[str]) -> str:
    """The obvious thing to try after the run of a command line: the same with another algorithm."""
    other = "grpo" if settings.algorithm_name.startswith("xrpo") else "xrpo"
    text = "\n".join(arguments)
    text = re.sub(r"(?m)^--?(workdir|config\.algorithm\.name)[=\n].*\n?", "", text)
    rest = [argument for argument in text.split("\n") if argument]
    if not any(argument.startswith("--config=") for argument in rest):
        return f"bash scripts/quickstart.sh --config.algorithm.name={other}"  # not from a shell
    # An algorithm's own settings mean nothing to another one.
    rest = [argument for argument in rest if not argument.startswith("--config.algorithm.")]
    mine = settings.algorithm_name
    name = folder.name.replace(mine, other, 1) if mine in folder.name else f"{folder.name}-{other}"
    more = [f"--workdir={folder.parent / name}", f"--config.algorithm.name={other}"]
    return shlex.join(["python", "-m", "xrpo_jax.main", *rest, *more])


def write_samples(folder: pathlib.Path, step: int, records: list[dict]) -> None:
    """Every sample of an evaluation as samples/<step>.jsonl."""
    (folder / "samples").mkdir(exist_ok=True)
    lines = "".join(json.dumps(record) + "\n" for record in records)
    write_whole(folder / "samples" / f"{step:06d}.jsonl", lines.encode())


def samples_table(folder: pathlib.Path, first: int, last: int) -> str:
    """A question of each level with its first sample in two evaluations, as text."""
    before, after = (_first_samples(folder, step) for step in (first, last))
    lines, seen = [f"\nsamples at step {first} and step {last} (+ right, - wrong)"], set()
    # A question that is right by now says more than one that is not.
    for prompt, record in sorted(after.items(), key=lambda item: not item[1]["correct"]):
        if record["level"] not in seen and prompt in before and len(seen) < 4:
            seen.add(record["level"])
            lines.append(f"  {_short(record['question'])}")
            lines += [
                f"    {'+' if each['correct'] else '-'} {_short(each['text'])}"
                for each in (before[prompt], record)
            ]
    return "\n".join(lines)


def _first_samples(folder: pathlib.Path, step: int) -> dict[int, dict]:
    path = folder / "samples" / f"{step:06d}.jsonl"
    found: dict[int, dict] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        record = json.loads(line)
        found.setdefault(record["prompt"], record)
    return found


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def table(before: dict, after: dict) -> str:
    """Held-out numbers of two evaluations side by side, in percent."""
    names = [name for name in before if name.startswith("eval/") and name in after]
    heads = [f"step {record['step']}" for record in (before, after)]
    lines = [f"{'held-out':<16}{heads[0]:>10}{heads[1]:>10}   95 % interval"]
    for name in names:
        if name.endswith(("_low", "_high")):
            continue
        short, low, high = name.removeprefix("eval/"), after[f"{name}_low"], after[f"{name}_high"]
        if short == "length":
            short, unit = "tokens", ".1f"
        else:
            unit = ".1%"
        lines.append(
            f"{short:<16}{before[name]:>10{unit}}{after[name]:>10{unit}}"
            f"   {low:{unit}} to {high:{unit}}"
        )
    return "\n".join(lines)


def phases(steps: list[dict]) -> str:
    """Where the time of a step goes, the first step (which compiles) left out."""
    steps = steps[1:] or steps
    if not steps:
        return ""
    names = sorted({name for r in steps for name in r if name.startswith("seconds/")})
    whole = np.mean([r["seconds/step"] for r in steps])
    shown = []
    for name in names:
        phase = name.removeprefix("seconds/")
        hidden = phase.endswith(("_hidden", "_ahead"))
        if phase not in ("step", "evaluate", "compile", "warm_up") and not hidden:
            spent = np.mean([r.get(name, 0.0) for r in steps])
            shown.append(f"{phase} {spent / whole:.1%}")
    return f"a step takes {whole:.2f} s: " + ", ".join(shown)


def draw_curve(records: list[dict], path: str | os.PathLike, title: str) -> None:
    """Held-out pass@1 with its interval and by level, and the training reward, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    evaluated = [record for record in records if "eval/pass@1" in record]
    at = [record["step"] for record in evaluated]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    mean = [record["eval/pass@1"] for record in evaluated]
    left.plot(at, mean, color="black", linewidth=2, label="all")
    low = [record["eval/pass@1_low"] for record in evaluated]
    high = [record["eval/pass@1_high"] for record in evaluated]
    left.fill_between(at, low, high, color="black", alpha=0.12, linewidth=0)
    for name in evaluated[0]:
        if name.startswith("eval/pass@1/") and not name.endswith(("_low", "_high")):
            values = [record[name] for record in evaluated]
            left.plot(at, values, label=name.removeprefix("eval/pass@1/"))
    left.set(xlabel="step", ylabel="held-out pass@1", ylim=(0, 1), title=title)
    left.legend(frameon=False)
    for name, label in (
        ("accuracy", "accuracy (plain)"),
        ("zero_variance", "zero-variance groups"),
        ("seeded", "seeded share"),
        ("seeded_accuracy", "accuracy (seeded)"),
    ):
        points = [(record["step"], record[name]) for record in records if name in record]
        if any(value for _, value in points):
            at, values = zip(*points, strict=True)
            (line,) = right.plot(at, values, alpha=0.25, linewidth=0.8)
            right.plot(at, _smooth(values), color=line.get_color(), label=label)
    right.set(xlabel="step", ylim=(0, 1), title="training rollouts, mean of 10 steps")
    right.legend(frameon=False)
    for axis in (left, right):
        axis.grid(alpha=0.25)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=120, format="png")
    write_whole(pathlib.Path(path), drawn.getvalue())
    pyplot.close(figure)


def _smooth(values: Sequence[float], window: int = 10) -> list[float]:
    """Means of the last `window` values up to each."""
    return [float(np.mean(values[max(0, i + 1 - window) : i + 1])) for i in range(len(values))]
