"""The work that all engines are given: prompts, rows, how many tokens each row gets, and rewards.

Plain Python, since the other engines' environments import it, too.
"""

from __future__ import annotations

import ast
import dataclasses
import random
import zlib
from collections.abc import Callable

KINDS = ("rollout", "variable", "update", "step")
SHORTEST, LONGEST = 8, 256  # tokens of a row where lengths vary
FILLERS = (" a", "a")  # where a space is a token of its own, only the latter is one token


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """`texts[i]` has the tokens `prompts[i]`; its rows are `i * samples` to `(i+1) * samples - 1`.

    Row j gets exactly `limits[j]` tokens: no token stops it.
    """

    kind: str  # one of KINDS
    model: str  # a Hugging Face directory
    dtype: str  # of the computation; parameters that are trained are float32
    texts: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...]
    samples: int
    limits: tuple[int, ...]
    temperature: float = 1.0

    @property
    def rows(self) -> int:
        return len(self.prompts) * self.samples

    @property
    def useful(self) -> int:
        """Tokens that are asked for."""
        return sum(self.limits)

    @classmethod
    def read(cls, raw: dict) -> Work:
        """The work that `dataclasses.asdict` wrote, also by way of JSON."""
        raw = {field.name: raw[field.name] for field in dataclasses.fields(cls)}
        prompts = tuple(tuple(prompt) for prompt in raw["prompts"])
        return cls(
            **(raw | {"prompts": prompts})
            | {"texts": tuple(raw["texts"]), "limits": tuple(raw["limits"])}
        )


def limits(kind: str, rows: int, new_tokens: int) -> tuple[int, ...]:
    """Tokens of each row: all `new_tokens`, or for `variable` skewed between 8 and 256.

    There the quantile q of the rows gets 8 + 248 q^3: half of them less than 40, a tenth more than
    190, one 256; shuffled, so that no group has all the long ones.
    """
    if kind != "variable":
        return (new_tokens,) * rows
    last = max(rows - 1, 1)
    spread = [SHORTEST + round((LONGEST - SHORTEST) * (row / last) ** 3) for row in range(rows)]
    random.Random(0).shuffle(spread)
    return tuple(spread)


def texts(encode: Callable[[str], list[int]], number: int, low: int, high: int) -> tuple[str, ...]:
    """`number` different questions of `low` to `high` tokens, the lengths spread evenly.

    ValueError where none can be made.
    """
    found = []
    for place in range(number):
        most = high - (high - low) * place // max(number - 1, 1)
        draw = random.Random(place)
        text, longer = "", "What is"
        while len(encode(f"{longer}?")) <= most:
            text = f"{longer}?"
            longer += f" {draw.choice(('plus', 'and', 'minus'))} {draw.randrange(10, 99)}"
        for filler in FILLERS if text else ():
            while len(encode(text + filler)) <= most:
                text += filler
        if not low <= len(encode(text)) <= high:
            raise ValueError(f"prompts of {low} to {high} tokens cannot be made of questions")
        found.append(text)
    return tuple(found)


def pairs(flag: str, given: list[str], key: str = "key") -> dict[str, str]:
    """`key=value` of a command line by key; ValueError on one without `=`, of its `flag`."""
    found = {}
    for pair in given:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"{flag}={pair}; allowed: {key}=value")
        found[name] = value
    return found


def chosen_of(given: list[str]) -> dict[str, object]:
    """`section.key=value` of `--set`, with values as Python reads them; ValueError without `=`."""
    found = {}
    for name, value in pairs("--set", given, "section.key").items():
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = value
    return found


def right(text: str) -> bool:
    """Whether a completion is rewarded: about every second one, as its checksum has it.

    A model that was never trained is hardly ever right; rewards that are all alike are no work.
    """
    return zlib.crc32(text.encode(errors="replace")) % 2 == 1
