"""What a policy makes of the beginning of its own answer: the acceptance test of SKPO's skip text.

    python scripts/conditioning.py --out=runs/conditioning
    python scripts/conditioning.py --config=FILE --config.init_from=MODEL --out=runs/conditioning

2604.08690, §4.1: beginnings at six relative cuts of a rollout a problem, answers continued from
each under three contexts. The paper's finding on base models: behind the question (continual) they
lose their diversity, in front of it (skip) they look like answers without one (unconditional).
Problems are `eval.problems` held-out ones; seed, temperature and limits are the config's, and
`algorithm.skip_layout` is the layout that is tried. Intervals are 95 % by bootstrap over problems.
Answers have what the beginning left of the tokens, in all contexts. Writes conditioning.md,
conditioning.json and conditioning.png into `--out`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import sys

import numpy as np
from absl import app, flags, logging
from matplotlib.figure import Figure
from tqdm import tqdm

from xrpo_jax.build import build
from xrpo_jax.config import parse
from xrpo_jax.evaluate import interval
from xrpo_jax.explore.collect import forget_paths
from xrpo_jax.explore.reward import FAILED
from xrpo_jax.explore.sample import sample
from xrpo_jax.explore.skip import SkipConnection
from xrpo_jax.log import Clock
from xrpo_jax.types import Draft, Progress, Request

CUTS = np.linspace(1 / 6, 1 / 2, 6)
CONTEXTS = ("unconditional", "continual", "skip")
METRICS = {
    "distinct": "distinct answers",
    "identical": "share of groups of identical outcomes",
    "length": "tokens without the beginning",
    "correct": "share correct",
}
PANELS = tuple(METRICS)[:3]  # the paper's; whether answers are right decides how to read them


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """Numbers by metric and context, f64[problems, cuts], and which beginnings hold an answer."""

    values: dict[str, dict[str, np.ndarray]]
    stated: np.ndarray  # bool[problems, cuts]
    lost: int  # problems whose rollout had no beginning


def measure(tools, draw, params, layout: str, *, samples: int, prompts: int, limit: int, seed: int):
    """Found for all problems of `tools.task`, `prompts` at a time, of at most `limit` tokens."""
    bar = tqdm(total=len(tools.task), unit="problem", desc="conditioning")
    groups, stated = [], []
    for start in range(0, len(tools.task), prompts):
        asked = tuple(range(start, min(start + prompts, len(tools.task))))
        sampling = _Sampling(tools, draw, params, asked, limit, seed, layout)
        rows = [row for row in sampling.own() if len(row.tokens) > 1]
        cuts = [
            [row.cut(max(int(cut * len(row.tokens)), 1)) for row in rows] for cut in CUTS.tolist()
        ]
        stated.append([[_states(tools, segment) for segment in some] for some in cuts])
        groups.append(
            [
                [
                    [
                        _numbers(tools, group)
                        for group in sampling.answers(some, context, i, samples)
                    ]
                    for context in CONTEXTS
                ]
                for i, some in enumerate(cuts)
            ]
        )
        forget_paths(rows)
        bar.update(len(asked))
    bar.close()
    size = (len(CUTS), len(CONTEXTS), -1, len(METRICS))
    numbers = np.concatenate([np.reshape(some, size) for some in groups], axis=2)
    answered = np.concatenate([np.reshape(some, (len(CUTS), -1)) for some in stated], axis=1)
    if not numbers.shape[2]:
        raise ValueError("every rollout ended with its first token; there are no beginnings")
    return Found(
        values={
            metric: {
                context: numbers[:, place, :, column].T for place, context in enumerate(CONTEXTS)
            }
            for column, metric in enumerate(METRICS)
        },
        stated=answered.T > 0,
        lost=len(tools.task) - numbers.shape[2],
    )


class _Sampling:
    """Rollouts of some problems through the parts that SKPO is made of."""

    def __init__(self, tools, draw, params, problems, limit, seed, layout):
        self.tools, self.draw, self.params, self.layout = tools, draw, params, layout
        self.problems, self.limit, self.seed = problems, limit, seed

    def _draw(self, requests, seeder, step):
        nothing = ((),) * len(self.problems)
        progress = Progress(
            prompts=self.problems,
            rollouts=nothing,
            drafts=nothing,
            batch=len(self.problems),
            seed=self.seed,
            step=step,
            max_new_tokens=self.limit,
        )
        contexts = [seeder(request, progress, {}, self.tools) for request in requests]
        return sample(
            self.tools, self.draw, self.params, progress, requests, contexts, True, 0, Clock()
        )

    def own(self):
        """One whole rollout a problem, as a draft that can be cut and resumed."""
        requests = [Request(slot=i, n=1, draft=Draft.ALL) for i in range(len(self.problems))]
        return self._draw(requests, SkipConnection(), 0)

    def answers(self, segments, context: str, cut: int, samples: int):
        """Answers to each segment, a list a segment; every cut draws random numbers of its own."""
        requests = [
            Request(
                slot=segment.slot,
                n=samples,
                limit=self.limit - len(segment.tokens),
                source=segment,
                resume=context == "continual",
            )
            for segment in segments
        ]
        seeder = SkipConnection(conditioning=context, layout=self.layout)
        rows = self._draw(requests, seeder, 1 + cut)
        return [rows[start : start + samples] for start in range(0, len(rows), samples)]


def _states(tools, segment) -> bool:
    return tools.task.answer(segment.prompt, tools.decode(segment.tokens)) is not None


def _numbers(tools, rows) -> list[float]:
    """The metrics of one group, in their order; NaN where nothing could be graded."""
    right = [row.verdict.correct for row in rows if row.verdict.status not in FAILED]
    stated = {tools.task.answer(row.prompt, row.text) for row in rows} - {None}
    return [
        len(stated),
        float(len(set(right)) == 1) if right else float("nan"),
        float(np.mean([len(row.tokens) for row in rows])),
        float(np.mean(right)) if right else float("nan"),
    ]


def mean_interval(values: np.ndarray) -> dict[str, float]:
    """Mean over the problems that have a value, and its interval."""
    values = values[np.isfinite(values)]
    if not len(values):
        return dict.fromkeys(("mean", "low", "high"), float("nan"))
    low, high = interval(values)
    return {"mean": float(values.mean()), "low": low, "high": high}


def summary(found: Found) -> dict:
    """Every metric by context: at each cut, over all cuts, and minus unconditional by problem."""
    tables = {}
    for metric, contexts in found.values.items():
        plain = contexts["unconditional"].mean(axis=1)
        tables[metric] = {
            context: {
                "cuts": [mean_interval(column) for column in values.T],
                "all": mean_interval(values.mean(axis=1)),
                "difference": mean_interval(values.mean(axis=1) - plain),
            }
            for context, values in contexts.items()
        }
    return tables


def table(found: Found, samples: int, layout: str) -> str:
    """Markdown."""
    heads = ["", "context", *(f"{cut:.2f}" for cut in CUTS), "all cuts", "minus unconditional"]
    lines = [heads]
    for metric, contexts in summary(found).items():
        for context, cells in contexts.items():
            line = [METRICS[metric] if context == CONTEXTS[0] else "", context]
            line += [f"{cell['mean']:.2f}" for cell in cells["cuts"]]
            line += [_cell(cells["all"])]
            line += ["" if context == CONTEXTS[0] else _cell(cells["difference"], "+")]
            lines.append(line)
    stated = [f"{share:.2f}" for share in found.stated.mean(axis=0)]
    lines.append(["beginnings that state an answer", "", *stated, f"{found.stated.mean():.2f}", ""])
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    texts = [" | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines]
    rows = [f"| {text} |" for text in texts]
    rows.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    note = (
        f"{len(found.stated)} problems, {samples} answers for each beginning, cuts relative to the "
        f"rollout's length, skip layout {layout}; brackets: 95 % by bootstrap over problems."
    )
    if found.lost:
        note += f" {found.lost} problems are left out: their rollout has no beginning."
    return "\n".join([*rows, "", note])


def _cell(cell: dict[str, float], sign: str = "") -> str:
    return f"{cell['mean']:{sign}.2f} [{cell['low']:{sign}.2f}, {cell['high']:{sign}.2f}]"


def picture(found: Found, samples: int, path: pathlib.Path) -> None:
    """A panel for each of the paper's three numbers, over the cuts."""
    colours = dict(zip(CONTEXTS, ("#000000", "#d55e00", "#0072b2"), strict=True))
    figure = Figure(figsize=(11.5, 3.6), layout="constrained")
    for panel, metric in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        for context, cells in summary(found)[metric].items():
            middle, low, high = (
                [cell[name] for cell in cells["cuts"]] for name in ("mean", "low", "high")
            )
            panel.plot(CUTS, middle, color=colours[context], marker="o", ms=4, label=context)
            panel.fill_between(CUTS, low, high, color=colours[context], alpha=0.15, lw=0)
        title = METRICS[metric] + (f" of {samples}" if metric == "distinct" else "")
        panel.set(xlabel="cut, share of the rollout's length", title=title)
        panel.set_ylim(bottom=0.0, top=1.05 if metric == "identical" else None)
        panel.grid(alpha=0.3)
    panel.legend(frameon=False)
    figure.savefig(path, dpi=120)


def run(config, out: pathlib.Path, samples: int) -> Found:
    """Measure what the config's policy does and write it down."""
    config.algorithm.name = "skpo"
    settings = parse(config)
    parts, state = build(settings)
    layout = settings.algorithm.explore.seeder.layout
    with parts.pool or contextlib.nullcontext():
        found = measure(
            parts.eval_tools,
            parts.draw,
            state.params,
            layout,
            samples=samples,
            prompts=parts.shape.prompts,
            limit=parts.shape.max_new_tokens,
            seed=settings.seed,
        )
    out.mkdir(parents=True, exist_ok=True)
    text = table(found, samples, layout)
    (out / "conditioning.md").write_text(text + "\n")
    record = {
        "policy": settings.init_from or "embedded",
        "layout": layout,
        "samples": samples,
        "problems": len(found.stated),
        "left_out": found.lost,
        "cuts": CUTS.tolist(),
        "metrics": summary(found),
        "stated": found.stated.mean(axis=0).tolist(),
    }
    (out / "conditioning.json").write_text(json.dumps(record, indent=1) + "\n")
    picture(found, samples, out / "conditioning.png")
    print(f"\n{text}\n\npicture {out / 'conditioning.png'}")
    return found


def with_config(argv: list[str]) -> list[str]:
    """The arguments with the default config where none is given."""
    given = any(word.split("=")[0] in ("--config", "-config") for word in argv)
    return argv if given else [argv[0], "--config=experiments/quickstart.py", *argv[1:]]


def main(argv: list[str]) -> None:
    """Run what the flags say; a wrong setting ends with one line and exit code 2."""
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    logging.set_verbosity(logging.ERROR)
    try:
        given = flags.FLAGS
        if given.samples < 2:
            raise ValueError(f"--samples={given.samples}; allowed: at least 2")
        run(given.config, pathlib.Path(given.out), given.samples)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    from xrpo_jax.main import read_flags  # it also defines --config

    flags.DEFINE_string("out", None, "The folder to write into.")
    flags.DEFINE_integer("samples", 8, "Answers for each beginning.")
    flags.mark_flags_as_required(["out"])
    app.run(main, flags_parser=lambda argv: read_flags(with_config(argv)))
