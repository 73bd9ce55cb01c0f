"""Conversations to token ids: through the model's chat template, or as plain text without one.

Whatever a question or an earlier answer says is text: `</s>` in it never becomes the token that
ends a turn. A sampled completion is never encoded again; it enters a later prompt only as an
exemplar that was decoded.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable

from xrpo_jax.tokenizer import Tokenizer
from xrpo_jax.types import Conversation, Turn, question

CHATS = ("auto", "template", "plain")
THINKING = ("auto", "on", "off")
OVERLONG = ("refuse", "drop")
SEPARATOR = "\n"  # after an answer, in plain text
THINK = "<think>"
_PRIVATE = range(0xF0000, 0xFFFFE)  # code points that no text uses


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextSettings:
    """How a conversation becomes a prompt."""

    chat: str = "auto"  # the model's template where it has one, always (template), never (plain)
    system: str = ""  # system turn for conversations without one; "" leaves it to the template
    thinking: str = "auto"  # the template's enable_thinking (Qwen3): on, off, or its own default
    overlong: str = "refuse"  # prompts over rollout.prompt_length: refuse the run, or drop them

    def __post_init__(self):
        for name, allowed in (("chat", CHATS), ("thinking", THINKING), ("overlong", OVERLONG)):
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"text.{name}={value!r}; allowed: {', '.join(allowed)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chat:
    """`encode` turns a conversation into token ids; an answer's text begins with `opening`.

    `opening` is what the template already says for the assistant ("<think>\\n" where it starts the
    reasoning), so that a verifier sees a reasoning that was opened before it was closed.
    """

    encode: Callable[[Conversation], list[int]]
    render: Callable[[Conversation], str]
    opening: str
    templated: bool


def make_chat(tokenizer: Tokenizer, settings: TextSettings) -> Chat:
    """The encoder of a run; ValueError when the settings ask for what the template has not."""
    templated = tokenizer.render is not None and settings.chat != "plain"
    if settings.chat == "template" and not templated:
        raise ValueError(
            "text.chat='template', but the tokenizer has no chat template; allowed: auto, plain, "
            "or a chat_template.jinja in the model's directory"
        )
    switches = {} if settings.thinking == "auto" else {"enable_thinking": settings.thinking == "on"}
    if switches and not (templated and _has_switch(tokenizer, "enable_thinking")):
        raise ValueError(
            f"text.thinking={settings.thinking!r}, but the chat template has no such switch; "
            "allowed: auto"
        )

    def with_system(conversation: Conversation) -> Conversation:
        if settings.system and conversation[0].role != "system":
            return (Turn(role="system", content=settings.system), *conversation)
        return conversation

    def render(conversation: Conversation) -> str:
        conversation = with_system(conversation)
        if templated:
            return _templated(tokenizer, conversation, switches)
        return _plain(conversation)

    def encode(conversation: Conversation) -> list[int]:
        hidden, marks = _hide(conversation, tokenizer.special)
        pieces = _split(render(hidden), marks)
        # A template writes the tokens that begin a text itself.
        first = tokenizer.encode(pieces[0], begin=not templated)
        rest = [
            tokenizer.encode(piece, begin=False, special=place % 2 == 0)
            for place, piece in enumerate(pieces[1:], 1)
        ]
        return first + list(itertools.chain.from_iterable(rest))

    opening = ""
    if templated:
        shown = render(question("?"))
        if shown.rstrip().endswith(THINK):
            opening = shown[shown.rindex(THINK) :]
    cached = functools.lru_cache(maxsize=32768)(encode)  # a step encodes its prompts every round
    return Chat(encode=cached, render=render, opening=opening, templated=templated)


def _plain(conversation: Conversation) -> str:
    """Turns one after the other, a separator after everything but the user's words."""
    return "".join(
        turn.content + ("" if turn.role == "user" else SEPARATOR) for turn in conversation
    )


def _templated(tokenizer: Tokenizer, conversation: Conversation, switches: dict) -> str:
    from jinja2 import TemplateError

    messages = [dataclasses.asdict(turn) for turn in conversation]
    try:
        return tokenizer.render(messages, **switches)
    except TemplateError as error:
        roles = ", ".join(turn.role for turn in conversation)
        raise ValueError(
            f"the chat template refuses turns of {roles}: {error}. Without a system turn "
            "(text.system='' and none in the data) or with text.chat=plain it may do"
        ) from error


def _has_switch(tokenizer: Tokenizer, name: str) -> bool:
    on, off = (
        tokenizer.render([{"role": "user", "content": "?"}], **{name: value})
        for value in (True, False)
    )
    return on != off


def _hide(
    conversation: Conversation, special: tuple[str, ...]
) -> tuple[Conversation, dict[str, str]]:
    """The conversation with special tokens' texts replaced by marks, and what each stands for."""
    said = "".join(turn.content for turn in conversation)
    found = sorted((text for text in special if text and text in said), key=len, reverse=True)
    if not found:
        return conversation, {}
    free = (chr(code) for code in _PRIVATE if chr(code) not in said)
    marks = dict(zip(free, found, strict=False))

    def hidden(turn: Turn) -> Turn:
        content = turn.content
        for mark, text in marks.items():
            content = content.replace(text, mark)
        return Turn(role=turn.role, content=content)

    return tuple(hidden(turn) for turn in conversation), marks


def _split(text: str, marks: dict[str, str]) -> list[str]:
    """Pieces of `text`, every second one the text that a mark stood for."""
    pieces = [""]
    for character in text if marks else ():
        if character in marks:
            pieces += [marks[character], ""]
        else:
            pieces[-1] += character
    return pieces if marks else [text]
