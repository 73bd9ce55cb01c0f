"""Rows to examples, with a count of what was read, skipped and dropped."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from xrpo_jax.data import adapters
from xrpo_jax.data.example import BadRow, Example, column, plain
from xrpo_jax.data.read import Row
from xrpo_jax.types import Conversation

FORMATS = ("auto", *adapters.LAYOUTS)
ON_BAD_ROW = ("refuse", "skip")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loaded:
    """The examples of one source, in its order, and what became of the other rows."""

    examples: tuple[Example, ...]
    layout: str
    rows: int  # read in all
    repeated: int = 0  # dropped, since an earlier row asks the same
    skipped: tuple[tuple[str, int, str], ...] = ()  # what is wrong, how often, the first place

    def describe(self) -> str:
        """One line for people: rows, layout, and what was left out and why."""
        text = f"{self.rows} rows of layout {self.layout}"
        if self.skipped:
            count = sum(times for _, times, _ in self.skipped)
            why = "; ".join(f"{times} x {what}, first {at}" for what, times, at in self.skipped)
            text += f", {count} malformed and skipped ({why})"
        return text + (f", {self.repeated} repeated and dropped" if self.repeated else "")


def load(
    rows: Iterable[Row],
    source: str,
    *,
    format: str = "auto",
    prompt_key: str = "",
    answer_key: str = "",
    level_key: str = "",
    on_bad_row: str = "refuse",
    dedupe: bool = False,
) -> Loaded:
    """The examples of `rows`; ValueError says `source` and the place of a row that is refused."""
    if format not in FORMATS:
        raise ValueError(f"format={format!r}; allowed: {', '.join(FORMATS)}")
    if on_bad_row not in ON_BAD_ROW:
        raise ValueError(f"on_bad_row={on_bad_row!r}; allowed: {', '.join(ON_BAD_ROW)}")
    by_hand = bool(prompt_key or answer_key)
    if by_hand and format != "auto":
        raise ValueError(
            f"format={format!r} with prompt_key={prompt_key!r}, answer_key={answer_key!r}; "
            "allowed: format=auto where columns are named by hand"
        )
    layout = "named columns" if by_hand else format
    examples: list[Example] = []
    seen: set[Conversation] = set()
    skipped: dict[str, list] = {}
    count = repeated = 0
    for row in rows:
        count += 1
        try:
            if row.problem:
                raise BadRow(row.problem)
            # The first good row decides for the whole source: a layout does not change midway.
            if layout == "auto":
                layout = adapters.recognise(row.value)
            example = adapters.adapter(layout, prompt_key, answer_key)(row.value)
            if level_key:
                level = plain(column(row.value, level_key)[1], level_key)
                example = dataclasses.replace(example, level=level or "none")
        except BadRow as error:
            if on_bad_row == "refuse":
                raise ValueError(
                    f"{source}, {row.place}: {error}. Correct the row, choose the format or the "
                    "columns (task.format, task.prompt_key, task.answer_key), or leave such rows "
                    "out by task.on_bad_row=skip"
                ) from error
            skipped.setdefault(str(error), [0, row.place])[0] += 1
            continue
        if dedupe and example.prompt in seen:
            repeated += 1
            continue
        seen.add(example.prompt) if dedupe else None
        examples.append(example)
    reasons = tuple((what, times, place) for what, (times, place) in skipped.items())
    loaded = Loaded(
        examples=tuple(examples), layout=layout, rows=count, repeated=repeated, skipped=reasons
    )
    if not examples:
        what = (
            "is empty, it holds no row"
            if not count
            else f"holds no usable row: {loaded.describe()}"
        )
        raise ValueError(f"{source} {what}")
    return loaded


def merge(parts: list[Loaded], *, dedupe: bool) -> Loaded:
    """Several sources as one; with `dedupe`, what an earlier one asks is dropped."""
    examples, seen, repeated = [], set(), sum(part.repeated for part in parts)
    for part in parts:
        kept = [one for one in part.examples if not (dedupe and one.prompt in seen)]
        repeated += len(part.examples) - len(kept)
        seen.update(one.prompt for one in kept)
        examples += kept
    return Loaded(
        examples=tuple(examples),
        layout=" + ".join(part.layout for part in parts),
        rows=sum(part.rows for part in parts),
        repeated=repeated,
        skipped=tuple(reason for part in parts for reason in part.skipped),
    )


def few_shot(pool: tuple[Example, ...], shots: int) -> tuple[Example, ...]:
    """The first `shots` of `pool`, to be shown solved before a question; ValueError if too few."""
    if not 0 <= shots <= len(pool):
        raise ValueError(
            f"shots={shots}; allowed: 0 to {len(pool)}, the examples there are for few-shot prompts"
        )
    return tuple(pool[:shots])
