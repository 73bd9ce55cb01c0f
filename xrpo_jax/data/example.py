"""What a row becomes, and how its columns are read; every fault is a BadRow that says what."""

from __future__ import annotations

import dataclasses
import math

from xrpo_jax import types
from xrpo_jax.types import Conversation


class BadRow(ValueError):
    """A row that lacks what its layout needs; the text says what."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """A question with its right answer: `kind` (math, choice, countdown, code) says how to grade.

    `gold` is text for math, a letter out of `letters` for choice, and a dict for the others.
    """

    prompt: Conversation
    gold: str | dict
    kind: str
    level: str
    solution: str = ""  # worked, as the data has it; "" where it has none
    letters: str = ""
    given: bool = False  # the prompt came as a list of messages, with its own wording


def column(row: dict, *names: str) -> tuple[str, object]:
    """The first of the columns that the row has: its name and value."""
    for name in names:
        if name in row:
            return name, row[name]
    wanted = " or ".join(repr(name) for name in names)
    raise BadRow(f"has no column {wanted}; its columns are {', '.join(map(str, row))}")


def text_column(row: dict, *names: str) -> str:
    """The first of the columns that the row has, which must be text that is not blank."""
    name, value = column(row, *names)
    if not isinstance(value, str):
        raise BadRow(f"{name} is of type {type(value).__name__}, not text")
    if not value.strip():
        raise BadRow(f"{name} is empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can hold half of a surrogate pair
        raise BadRow(f"{name} holds a character that is none ({error.reason})") from error
    return value


def plain(value: object, name: str) -> str:
    """An answer as text: text as it is, numbers exactly, a list joined; raises BadRow."""
    if isinstance(value, list | tuple) and value:
        return ", ".join(plain(part, name) for part in value)
    if value is None:
        raise BadRow(f"{name} is null")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadRow(f"{name} is a {type(value).__name__}, not text or a number")
    if isinstance(value, float):
        if not math.isfinite(value):
            raise BadRow(f"{name} is {value}")
        return str(int(value)) if value.is_integer() else repr(value)
    try:
        return str(value).strip()
    except ValueError as error:  # an integer of more digits than Python prints
        raise BadRow(f"{name} is too long a number") from error


def prompt_of(value: object, name: str) -> str | Conversation:
    """A prompt given as text, or as a list of messages that ends with the user's; raises BadRow."""
    if isinstance(value, str):
        return text_column({name: value}, name)
    try:
        return types.conversation(value)
    except ValueError as error:
        raise BadRow(f"{name}: {error}") from error


def level_of(row: dict, default: str, *names: str) -> str:
    """The first of the columns that names a level; 3 is `Level 3`."""
    for name in names:
        value = row.get(name)
        if isinstance(value, str) and value.strip():
            return value.strip()
        if isinstance(value, int):
            return f"Level {value}"
    return default
