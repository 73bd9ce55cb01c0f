"""Test cases of code problems as LiveCodeBench packs them, read without running anything."""

from __future__ import annotations

import base64
import binascii
import io
import json
import pickle
import zlib

MAX_UNPACKED = 2**30  # bytes of one problem's test cases; the largest published ones are 100 MB


class _TextOnly(pickle.Unpickler):
    """An unpickler for plain text: a pickle that names any class or function is refused."""

    def find_class(self, module: str, name: str):
        raise pickle.UnpicklingError(f"names {module}.{name}; only plain text is read")


def decode_tests(text: str) -> list[dict]:
    """Test cases given as JSON, or as base64 of zlib of a pickled JSON text; raises ValueError."""
    try:
        tests = json.loads(text)
    except (ValueError, RecursionError):
        tests = _unpack(text)
    if not isinstance(tests, list) or not all(isinstance(test, dict) for test in tests):
        raise ValueError("is no list of test cases")
    for test in tests:
        if not {"input", "output"} <= test.keys():
            raise ValueError("holds a test case without input or output")
    return tests


def _unpack(text: str) -> object:
    try:
        packed = zlib.decompressobj().decompress(
            base64.b64decode(text, validate=True), MAX_UNPACKED
        )
    except (binascii.Error, ValueError, zlib.error) as error:
        raise ValueError("is neither JSON nor base64 of zlib") from error
    try:
        return json.loads(_TextOnly(io.BytesIO(packed)).load())
    except Exception as error:  # a damaged pickle may raise nearly anything
        raise ValueError(f"holds no pickled JSON text ({error})") from error
