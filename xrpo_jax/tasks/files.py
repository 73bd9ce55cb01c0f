r"""Questions with answers from files or from the Hugging Face Hub.

    --config.task.name=files --config.task.path=train.jsonl --config.task.eval_path=test.jsonl

Several sources are named with commas between them; each then is a level of its own.
Without `eval_path` a share of the questions is held out of `path` by a hash of their text, so that
equal texts never stand on both sides. Formats: see data/adapters.py; `auto` goes by the columns.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re

from xrpo_jax.data.example import Example
from xrpo_jax.data.load import FORMATS, Loaded, few_shot, load, merge
from xrpo_jax.data.read import read
from xrpo_jax.tasks import countdown
from xrpo_jax.types import Conversation, Turn, Verdict, normal, text_of
from xrpo_jax.verify import math
from xrpo_jax.verify.choice import choice, grade_choice
from xrpo_jax.verify.code import grade_code
from xrpo_jax.verify.code_blocks import blocks, final_text
from xrpo_jax.verify.extract import boxed, stated
from xrpo_jax.verify.sandbox import Limits, check_seconds, describe
from xrpo_jax.verify.structure import parse, spell

INSTRUCTIONS = {  # appended to a question; not to message lists, which have their own wording
    "math": r"Please reason step by step, and put your final answer within \boxed{}.",
    "choice": r"Please reason step by step, and put the letter of your choice within \boxed{}.",
    "countdown": r"Please reason step by step, and put your final expression within \boxed{}.",
    "function": "Write the whole function in one ```python block.",
    "program": "Write a Python program that reads standard input and writes standard output, in "
    "one ```python block.",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grading:
    """How answers are compared (see verify/math.py: Rules) and what code may use."""

    last_number: bool = False
    tolerance: float = 0.0
    strict: bool = False
    partial: bool = False
    time_s: float = Limits().time_s
    total_s: float = 60.0
    memory_mb: int = Limits().memory_mb

    def __post_init__(self):
        math.Rules(tolerance=self.tolerance)
        Limits(time_s=self.time_s, memory_mb=self.memory_mb)
        check_seconds("total_s", self.total_s)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Files:
    """The task: examples by index, each asked after the same solved ones (`shown`)."""

    examples: tuple[Example, ...]
    shown: Conversation = ()
    levels: tuple[str, ...] = ()
    notes: str = ""
    grading: Grading = Grading()

    def __len__(self) -> int:
        return len(self.examples)

    def prompt(self, i: int) -> Conversation:
        """The solved examples, if any, and the question."""
        return self.shown + self.examples[i].prompt

    def level(self, i: int) -> str:
        """What the row says, such as MATH's `Level 5`, or the name of the layout."""
        return self.examples[i].level

    @property
    def deadline(self) -> float:
        """Seconds that a grader may take for one completion, over its own limits."""
        return self.grading.total_s + 10.0 if self._runs_code() else 10.0

    def describe(self) -> str:
        """What was read, skipped and dropped, and under which guard code runs."""
        return "\n".join([self.notes, describe()] if self._runs_code() else [self.notes])

    def _runs_code(self) -> bool:
        return any(example.kind == "code" for example in self.examples)

    def gold(self, i: int) -> str | None:
        """The right answer of mathematics and choices; others have more than one, or none."""
        example = self.examples[i]
        if example.kind == "math":
            return math.right_answer(example.gold)
        return example.gold if example.kind == "choice" else None

    def answer(self, i: int, completion: str) -> str | None:
        """The answer in a spelling that equal ones share, but for algebra; None for none."""
        example = self.examples[i]
        if example.kind == "choice":
            return choice(completion, example.letters)
        if example.kind == "countdown":
            return _countdown(example).answer(0, _expression(completion))
        if example.kind == "code":
            code = blocks(final_text(completion))
            return code[-1][1].strip() if code else None
        found = math.answer_of(completion, last=self.grading.last_number)
        return None if found is None else spell(parse(found))

    def rewards(self, i: int, completion: str) -> Verdict:
        """One for the right answer, else zero; code may earn the share of its tests that pass."""
        example, grading = self.examples[i], self.grading
        if example.kind == "choice":
            return grade_choice(completion, example.gold, letters=example.letters)
        if example.kind == "countdown":
            return _countdown(example).rewards(0, _expression(completion))
        if example.kind == "code":
            mode = "fraction" if grading.partial else "all"
            return grade_code(
                completion,
                **example.gold,
                mode=mode,
                total_s=grading.total_s,
                time_s=grading.time_s,
                memory_mb=grading.memory_mb,
            )
        return math.grade(
            completion,
            example.gold,
            last_number=grading.last_number,
            tolerance=grading.tolerance,
            strict=grading.strict,
        )


def _countdown(example: Example) -> countdown.Countdown:
    numbers, target = tuple(example.gold["numbers"]), example.gold["target"]
    problem = countdown.Problem(level=example.level, numbers=numbers, target=target, expression="")
    return countdown.Countdown(problems=(problem,))


def _expression(completion: str) -> str:
    text = (stated(completion) or "")[: 10 * countdown.MAX_CHARACTERS]
    text = re.sub(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}", r"((\1)/(\2))", text)
    for sign, plain in (("\\times", "*"), ("\\cdot", "*"), ("×", "*"), ("÷", "/"), ("\\div", "/")):
        text = text.replace(sign, plain)
    return text.replace("−", "-").replace("\\left", "").replace("\\right", "").strip(" $")


def make(
    *,
    split: str = "train",
    size: int = 0,  # at most so many, spread evenly over the source; 0 = all
    path: str = "",
    eval_path: str = "",
    format: str = "auto",
    eval_format: str = "",  # "" = as `path`, with the same columns; else one of its own
    prompt_key: str = "",  # columns named by hand
    answer_key: str = "",
    level_key: str = "",
    instruction: str = "auto",  # appended to every question: "" for none, auto by kind of answer
    shots: int = 0,  # solved examples of `path` before every question
    held_out: float = 0.1,  # share of `path` for evaluation where there is no eval_path
    on_bad_row: str = "refuse",  # or skip, and count
    dedupe: bool = False,  # drop rows whose question came before
    subset: str = "",  # of Hub data sets: configuration and split
    hub_split: str = "train",
    eval_subset: str = "",
    eval_hub_split: str = "test",
    last_number: bool = False,  # the last number counts where no answer is stated
    tolerance: float = 0.0,  # relative difference of numbers that is still right
    strict: bool = False,  # percent signs, units and the order of a list must be as in the data
    partial: bool = False,  # code earns the share of its tests that pass
    time_s: float = Limits().time_s,  # of each test of code
    total_s: float = 60.0,  # of all its tests
    memory_mb: int = Limits().memory_mb,
) -> Files:
    """The rows of `path` for train, of `eval_path` (or held out of `path`) for test."""
    if split not in ("train", "test"):
        raise ValueError(f"split={split!r}; allowed: train, test")
    if size < 0:
        raise ValueError(f"size={size}; allowed: 0 (all) or more")
    if not 0 <= held_out < 1:
        raise ValueError(f"held_out={held_out}; allowed: from 0 to below 1")
    if eval_format not in ("", *FORMATS):
        raise ValueError(
            f"eval_format={eval_format!r}; allowed: {', '.join(FORMATS)}, or '' (as path)"
        )
    if not path and (split == "train" or not eval_path or shots):
        raise ValueError(
            "path=''; allowed: a file (.jsonl, .json, .csv, .parquet), a pattern such as "
            "'data/*.parquet', or a data set of the Hugging Face Hub as owner/name"
        )
    idle = {"eval_format": eval_format, "eval_subset": eval_subset}
    idle |= {"eval_hub_split": "" if eval_hub_split == "test" else eval_hub_split}
    for name, value in idle.items():
        if value and not eval_path:
            raise ValueError(f"{name}={value!r} without eval_path; allowed: with a task.eval_path")
    grading = Grading(
        last_number=last_number,
        tolerance=tolerance,
        strict=strict,
        partial=partial,
        time_s=time_s,
        total_s=total_s,
        memory_mb=memory_mb,
    )
    common = {"on_bad_row": on_bad_row, "dedupe": dedupe}
    layout = {
        "format": format,
        "prompt_key": prompt_key,
        "answer_key": answer_key,
        "level_key": level_key,
    }
    whole = None  # of `path`, read only where it is needed
    if split == "train" or not eval_path or shots:
        whole = _load("path", path, subset, hub_split, **layout, **common)
    share = 0.0 if eval_path else held_out
    pool = tuple(e for e in whole.examples if not _held(e, share)) if whole else ()
    shown = few_shot(pool, shots)
    if any(e.given or e.kind in ("countdown", "code") and not e.solution for e in shown):
        raise ValueError(
            f"shots={shots}; allowed: 0 for message lists, and for countdown and code rows that "
            "have no worked solutions to show"
        )
    if split == "train":
        chosen, source = pool, whole
    elif eval_path:
        own = {"format": eval_format} if eval_format else layout
        source = _load("eval_path", eval_path, eval_subset, eval_hub_split, **own, **common)
        chosen = source.examples
    else:
        chosen, source = tuple(e for e in whole.examples if _held(e, share)), whole
    asked = {_words(example.prompt) for example in shown}
    chosen = tuple(e for e in chosen if _words(e.prompt) not in asked)
    if not chosen:
        raise ValueError(
            f"held_out={held_out}: of {len(source.examples)} examples in {path!r} none is left for "
            f"{split}; choose another share, name a task.eval_path, or lower task.shots"
        )
    where = eval_path if split == "test" and eval_path else path
    notes = f"{split}: {where}: {source.describe()}; {len(chosen)} for {split}"
    if size and size < len(chosen):
        # Spread, not the first ones: files are often sorted by subject or difficulty.
        chosen = tuple(chosen[i * len(chosen) // size] for i in range(size))
        notes += f", {size} of them used"
    told = tuple(turn for e in shown for turn in (*_told(e, instruction).prompt, _solution(e)))
    return Files(
        examples=tuple(_told(example, instruction) for example in chosen),
        shown=told,
        levels=tuple(sorted({example.level for example in chosen})),
        notes=notes,
        grading=grading,
    )


def _load(setting: str, value: str, subset: str, hub_split: str, **settings) -> Loaded:
    """All sources of a setting, by commas; of several each has a layout and is a level."""
    sources = [source.strip() for source in value.split(",")]
    if len(sources) == 1 or os.path.exists(value):
        return _load_one(setting, value, subset, hub_split, **settings)
    parts = []
    for source in sources:
        part = _load_one(setting, source, subset, hub_split, **settings)
        name = os.path.basename(source)
        level = name.split(".")[0]
        skipped = tuple((what, times, f"{name}, {at}") for what, times, at in part.skipped)
        part = dataclasses.replace(part, skipped=skipped)
        if not settings.get("level_key"):
            named = tuple(dataclasses.replace(one, level=level) for one in part.examples)
            part = dataclasses.replace(part, examples=named)
        parts.append(part)
    return merge(parts, dedupe=settings["dedupe"])


def _load_one(setting: str, value: str, subset: str, hub_split: str, **settings) -> Loaded:
    if os.path.exists(value) and (subset or hub_split not in ("train", "test")):
        raise ValueError(
            f"{setting}={value!r} is a file, which has no subset={subset!r} or "
            f"split={hub_split!r}; allowed: these with data sets of the Hub"
        )
    try:
        rows = read(value, subset=subset, hub_split=hub_split)
        loaded = load(rows, f"{setting}={value!r}", **settings)
    except ValueError as error:
        # What read() says begins with the file's name.
        text = str(error)
        raise ValueError(f"{setting}={text}" if text[0] in "'\"" else text) from error
    return loaded


def _words(prompt: Conversation) -> str:
    """What a prompt says, whatever its white space and capitals."""
    return normal(text_of(prompt))


def _held(example: Example, share: float) -> bool:
    digest = hashlib.blake2b(_words(example.prompt).encode(errors="replace"), digest_size=8)
    return int.from_bytes(digest.digest(), "big") < share * 2**64


def _told(example: Example, instruction: str) -> Example:
    """The example with the instruction at the end of its question."""
    *before, last = example.prompt
    if instruction == "auto":
        instruction = "" if example.given else INSTRUCTIONS[_wanted(example)]
    if not instruction:
        return example
    turn = Turn(role="user", content=f"{last.content}\n{instruction}")
    return dataclasses.replace(example, prompt=(*before, turn))


def _wanted(example: Example) -> str:
    """What the instruction asks for."""
    if example.kind != "code":
        return example.kind
    return "function" if example.gold["entry_point"] else "program"


def _solution(example: Example) -> Turn:
    """The example's worked solution, ending as the instruction asks."""
    text = example.solution
    if example.kind == "code":
        return Turn(role="assistant", content=f"```python\n{example.gold['prefix']}{text}\n```")
    if boxed(text) is None:
        text = f"{text}\nThe answer is \\boxed{{{example.gold}}}.".strip()
    return Turn(role="assistant", content=text)
