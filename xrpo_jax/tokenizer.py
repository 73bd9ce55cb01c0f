"""A tokenizer as a record of two functions and three facts, made from a local directory.

Any other tokenizer is another function that returns this record. transformers is imported inside
`load`, since it takes seconds and most programs that import this module never call it.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

DATE = "26 Jul 2024"  # what Llama 3's templates say where they have no clock
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # one of them must be there


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """What sampling and prompts need of a tokenizer.

    `encode(text, begin=True, special=True)`: `begin` adds what the tokenizer is configured to put
    around a text, `special` reads the texts in the field `special` as their tokens; off, they are
    words like others. `decode` leaves special tokens out and does not clean up spaces.
    `render(messages, **switches)` applies the chat template up to where the assistant speaks; it is
    None for a model without one. `vocab_size` is the largest id plus one; a model's table may be
    longer. There is no padding id: it may be one of `stop_ids`, so lengths travel with the rows.
    """

    encode: Callable[..., list[int]]
    decode: Callable[[Sequence[int]], str]
    stop_ids: tuple[int, ...]
    vocab_size: int
    special: tuple[str, ...] = ()
    render: Callable[..., str] | None = None


def load(path: str | os.PathLike) -> Tokenizer:
    """Loads the Hugging Face tokenizer of a local directory, without any network.

    A rollout stops at the tokenizer's own end and at every one that config.json and
    generation_config.json list: chat models end a turn with a token the tokenizer may not name.
    Raises FileNotFoundError without a tokenizer, ValueError without any end of sequence or when the
    files are damaged.
    """
    folder = Path(path)
    if not any((folder / name).is_file() for name in VOCABULARIES):
        raise FileNotFoundError(
            f"{folder} holds no tokenizer; needed is one of {', '.join(VOCABULARIES)}: copy the "
            "tokenizer's files of the model that it came from"
        )
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # what the tokenizers library raises is a bare Exception
        raise ValueError(
            f"the tokenizer of {folder} cannot be read ({error}); copy or download its files again"
        ) from error
    stops = set(_ids(tokenizer.eos_token_id))
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            stops.update(_ids(_read(folder / name).get("eos_token_id")))
    if not stops:
        raise ValueError(
            f"{folder} names no end of sequence; set eos_token in tokenizer_config.json or "
            "eos_token_id in generation_config.json"
        )

    def encode(text: str, begin: bool = True, special: bool = True) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=begin, split_special_tokens=not special)

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(
            [int(each) for each in ids],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )

    def render(messages: list[dict[str, str]], **switches) -> str:
        return tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=True,
            # Llama 3's templates write the date: a run shall not change overnight.
            date_string=DATE,
            **switches,
        )

    return Tokenizer(
        encode=encode,
        decode=decode,
        stop_ids=tuple(sorted(stops)),
        vocab_size=max(tokenizer.get_vocab().values()) + 1,
        special=tuple(token.content for token in _special(tokenizer)),
        render=render if tokenizer.chat_template else None,
    )


def _special(tokenizer) -> list:
    """Every added token that is special, not only those with a role such as end or padding."""
    return [token for token in tokenizer.added_tokens_decoder.values() if token.special]


def _read(file: Path) -> dict:
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}); copy or download it again") from error


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
