"""The format of a GGUF file: its metadata, where its tensors lie, and their values.

The header is read here, in one pass and without mapping the file: the reader of the `gguf` package
keeps an array for every token and every merge, which takes hundreds of megabytes. Dequantisation
is the package's own.
"""

import dataclasses
import math
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_FLOAT32, _STRING, _ARRAY = 6, 8, 9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """Where a tensor lies in the file: its quantisation, shape [rows, columns] and bytes."""

    kind: int
    shape: tuple[int, ...]
    offset: int
    size: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Header:
    """All of a GGUF file but the weights; `fields` are its metadata by full name."""

    file: Path
    fields: dict[str, Any]
    tensors: dict[str, Entry]


def read(file: Path) -> Header:
    """Reads the header of a whole file; ValueError names a damaged one, or a tensor in it.

    ValueError also when the `gguf` package is not there or too old for a quantisation, since the
    weights could not be read later.
    """
    size = file.stat().st_size
    package(file)
    with open(file, "rb") as stream:
        try:
            header = _header(file, stream, size)
        except (EOFError, struct.error, UnicodeDecodeError, KeyError) as error:
            raise ValueError(f"{file} is damaged ({error}); copy or download it again") from error
    sized = {
        name: dataclasses.replace(entry, size=_size(file, name, entry))
        for name, entry in header.tensors.items()
    }
    for name, entry in sized.items():
        if entry.offset + entry.size > size:
            raise ValueError(
                f"{file} is damaged (it ends before {name} does); copy or download it again"
            )
    return dataclasses.replace(header, tensors=sized)


def tensor(header: Header, name: str) -> np.ndarray:
    """Returns a tensor f32[rows, columns], dequantised."""
    entry = header.tensors[name]
    with open(header.file, "rb") as stream:
        stream.seek(entry.offset)
        data = np.frombuffer(stream.read(entry.size), np.uint8)
    rows = data.reshape(*entry.shape[:-1], -1)
    return package(header.file).dequantize(rows, _kind(header.file, entry))


def package(file: Path):
    """Returns the `gguf` package; ValueError names `file` and what to install without it."""
    try:
        import gguf
    except ImportError as error:
        raise ValueError(f"{file} needs the gguf package to be read; pip install gguf") from error
    return gguf


def _header(file: Path, stream: BinaryIO, size: int) -> Header:
    def take(form: str) -> tuple:
        return struct.unpack(f"<{form}", stream.read(many(struct.calcsize(f"<{form}"))))

    def many(count: int) -> int:
        if count > size:
            raise EOFError(f"it promises {count} of something and has {size} bytes")
        return count

    def text() -> str:
        length = many(take("Q")[0])
        found = stream.read(length)
        if len(found) < length:
            raise EOFError("it ends within a text")
        return found.decode()

    def value(kind: int):
        if kind == _STRING:
            return text()
        if kind == _ARRAY:
            kind, count = take("IQ")
            if kind in _SCALARS:
                return list(take(f"{count}{_SCALARS[kind]}"))
            return [value(kind) for _ in range(many(count))]
        number = take(_SCALARS[kind])[0]
        # The shortest decimal with these bits: 1e-05 rather than 9.999999747378752e-06.
        return float(str(np.float32(number))) if kind == _FLOAT32 else number

    magic, version = stream.read(4), take("I")[0]
    if magic != b"GGUF" or version not in (2, 3):
        raise EOFError(f"it begins with {magic!r}, version {version}; allowed: b'GGUF', 2 or 3")
    tensor_count, field_count = take("QQ")
    fields = {}
    for _ in range(many(field_count)):
        name = text()
        fields[name] = value(take("I")[0])
    entries = {}
    for _ in range(many(tensor_count)):
        name = text()
        shape = take(f"{take('I')[0]}Q")[::-1]
        kind, offset = take("IQ")
        if name in entries:
            raise ValueError(f"{name} is stored twice in {file}; download it again")
        entries[name] = Entry(kind=kind, shape=shape, offset=offset)
    alignment = fields.get("general.alignment", 32)
    start = -(-stream.tell() // alignment) * alignment
    return Header(
        file=file,
        fields=fields,
        tensors={
            name: dataclasses.replace(entry, offset=start + entry.offset)
            for name, entry in entries.items()
        },
    )


def _kind(file: Path, entry: Entry):
    return package(file).GGMLQuantizationType(entry.kind)


def _size(file: Path, name: str, entry: Entry) -> int:
    """Returns the bytes of a tensor; ValueError when its quantisation cannot be read."""
    try:
        kind = _kind(file, entry)
        block, size = package(file).GGML_QUANT_SIZES[kind]
        package(file).dequantize(np.zeros((1, size), np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise ValueError(
            f"{name} in {file} is quantized in a way that the installed gguf package cannot read "
            f"({error}); update it, or take another quantization such as Q8_0"
        ) from error
    return math.prod(entry.shape) // block * size
