"""Data files to rows: JSON Lines, JSON, CSV (each also gzipped), parquet, and Hub data sets.

A row that cannot be read is handed on with what is wrong with it, so that the caller may refuse or
count it; a file that cannot be read is a ValueError. Nothing here looks at what a row means.
"""

from __future__ import annotations

import csv
import dataclasses
import glob
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Iterator

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")  # the text files also with .gz
INSTALL = "pip install datasets"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# Bytes that files of another kind begin with, and what to say of them.
_FOREIGN = {
    b"version https://git-lfs": "is a Git LFS pointer, not the data; run 'git lfs pull' where it "
    "came from, or download the file itself",
    b"\xff\xfe": "is UTF-16 text; convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)",
    b"\xfe\xff": "is UTF-16 text; convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)",
    b"<!DOCTYPE": "is a web page, not the data; download the raw file",
    b"<html": "is a web page, not the data; download the raw file",
}

csv.field_size_limit(2**30)  # the default of 128 KiB is less than some test cases of code problems


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One row: `place` as a person would look it up, and `problem` where it could not be read."""

    place: str
    value: dict = dataclasses.field(default_factory=dict)
    problem: str = ""


def read(name: str, *, subset: str = "", hub_split: str = "train") -> Iterator[Row]:
    """Rows of a file, of every file of a pattern such as `data/*.parquet`, or of a Hub data set.

    `subset` and `hub_split` are of a Hub data set. ValueError says what is wrong with a file.
    """
    name = os.path.expanduser(name)
    found = [name] if os.path.isfile(name) else sorted(glob.glob(name))
    found = [path for path in found if os.path.isfile(path)]
    if not found and _HUB_ID.fullmatch(name) and not name.removesuffix(".gz").endswith(SUFFIXES):
        yield from _hub(name, subset, hub_split)
        return
    if not found:
        raise ValueError(
            f"{name!r}: no such file; allowed: a file, a pattern such as 'data/*.parquet', or a "
            "data set of the Hugging Face Hub as owner/name"
        )
    for path in found:
        for row in _file(path):
            # With several files a line number alone would not say where to look.
            place = row.place if len(found) == 1 else f"{os.path.basename(path)}, {row.place}"
            yield dataclasses.replace(row, place=place)


def _file(path: str) -> Iterator[Row]:
    kind = path.lower().removesuffix(".gz")
    if not kind.endswith(SUFFIXES) or path.lower().endswith(".parquet.gz"):
        raise ValueError(f"{path!r}: unknown kind of file; allowed: {', '.join(SUFFIXES)} and .gz")
    with open(path, "rb") as file:
        start = file.read(64)
    for foreign, message in _FOREIGN.items():
        if start.startswith(foreign):
            raise ValueError(f"{path!r} {message}")
    if not start.strip():
        raise ValueError(f"{path!r} is empty")
    if b"\0" in start and kind == path.lower() and not kind.endswith(".parquet"):
        raise ValueError(f"{path!r} is no UTF-8 text (UTF-16, or not text at all); convert it")
    if kind.endswith(".parquet"):
        yield from _parquet(path)
        return
    try:
        with gzip.open(path) if path.lower().endswith(".gz") else open(path, "rb") as file:
            if kind.endswith(".csv"):
                yield from _csv(file, path)
            elif kind.endswith(".json"):
                yield from _json(file, path)
            else:
                yield from _lines(file)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path!r} is no whole gzip file ({error}); download it anew") from error


def _lines(file: io.BufferedIOBase) -> Iterator[Row]:
    # Line by line: a reader that infers column types fails where an answer is 4 here and "1/2"
    # there, and would pass large integers through floats.
    for number, line in enumerate(file, 1):
        line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        if line.strip():
            yield _object(line, f"line {number}")


def _object(line: bytes, place: str) -> Row:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Row(place=place, problem=f"is not UTF-8 text (byte {error.start + 1} of the line)")
    except json.JSONDecodeError as error:
        cut = "" if line.endswith(b"\n") else ", the file seems cut off"
        return Row(place=place, problem=f"is not a JSON object ({error.msg}{cut})")
    except (ValueError, RecursionError) as error:  # thousands of digits, or of brackets
        return Row(place=place, problem=f"is JSON that cannot be held ({error})")
    return _mapping(value, place)


def _mapping(value: object, place: str) -> Row:
    if isinstance(value, dict):
        return Row(place=place, value=value)
    return Row(place=place, problem=f"is of type {type(value).__name__}, not an object")


def _json(file: io.BufferedIOBase, path: str) -> Iterator[Row]:
    data = file.read().removeprefix(b"\xef\xbb\xbf")
    if not data.lstrip().startswith(b"["):  # JSON Lines are often called .json
        if data.lstrip()[:1] == b"{" and data.lstrip()[1:].lstrip(b" \t").startswith(
            (b"\n", b"\r")
        ):
            raise ValueError(f"{path!r} is one JSON object; allowed: a list of rows, or JSON Lines")
        yield from _lines(io.BytesIO(data))
        return
    try:
        values = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path!r} is not JSON ({error})") from error
    for number, value in enumerate(values):
        yield _mapping(value, f"row {number}")


def _csv(file: io.BufferedIOBase, path: str) -> Iterator[Row]:
    # utf-8-sig drops a byte order mark; newline="" leaves line ends in quoted fields to csv.
    reader = csv.DictReader(io.TextIOWrapper(file, "utf-8-sig", newline=""), strict=True)
    try:
        for value in reader:
            place = f"line {reader.line_num}"
            if None in value or None in value.values():
                many = "more" if None in value else "fewer"
                yield Row(place=place, problem=f"has {many} fields than the header")
            else:
                yield Row(place=place, value=value)
    except (csv.Error, UnicodeDecodeError) as error:
        where = f"line {reader.line_num + 1}"
        raise ValueError(f"{path!r}, {where}: is not CSV in UTF-8 ({error})") from error


def _parquet(path: str) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"{path!r}: parquet files need pyarrow; {INSTALL}") from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1000):
                # Plain lists and dicts: through pandas nested lists become arrays and an integer
                # column with a null becomes one of floats.
                for value in batch.to_pylist():
                    yield Row(place=f"row {number}", value=value)
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path!r} is no whole parquet file ({error})") from error


def _hub(name: str, subset: str, hub_split: str) -> Iterator[Row]:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"{name!r}: there is no such file, and data sets of the Hugging Face Hub need the "
            f"library datasets; {INSTALL}"
        ) from error
    try:
        rows = datasets.load_dataset(name, subset or None, split=hub_split)
    except Exception as error:  # the library raises a dozen types of its own and of its network
        raise ValueError(
            f"{name!r}: there is no such file, and the Hugging Face Hub gave no such data set "
            f"(subset {subset!r}, split {hub_split!r}: {type(error).__name__}: "
            f"{str(error)[:300]}); check these three, or download a file and name it by task.path"
        ) from error
    for number, value in enumerate(rows):
        yield Row(place=f"row {number}", value=value)
