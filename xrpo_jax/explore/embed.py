"""Text embeddings for retrieval that need no download: hashed word and character n-grams.

An embedder is any `embed(list[str]) -> f32[n, d]` with rows of unit norm.
"""

from __future__ import annotations

import functools
import re
import zlib

import numpy as np

DIMENSIONS = 1024
CHARACTERS = (3, 4)


@functools.lru_cache(maxsize=65536)
def _features(text: str) -> tuple[tuple[int, float], ...]:
    text = normalise(text)
    counts: dict[int, float] = {}
    words = re.findall(r"\w+|[^\w\s]", text)
    grams = [f"w:{word}" for word in words]
    grams += [f"c:{text[i : i + n]}" for n in CHARACTERS for i in range(len(text) - n + 1)]
    for gram in grams:
        hashed = zlib.crc32(gram.encode())
        sign = 1.0 if hashed & 1 else -1.0  # signed hashing: collisions cancel in expectation
        place = (hashed >> 1) % DIMENSIONS
        counts[place] = counts.get(place, 0.0) + sign
    return tuple((place, np.sign(value) * np.sqrt(abs(value))) for place, value in counts.items())


def normalise(text: str) -> str:
    """Lower case with single spaces: what "the same text" means in retrieval."""
    return " ".join(text.lower().split())


def ngrams(texts: list[str]) -> np.ndarray:
    """Unit-norm embeddings f32[n, DIMENSIONS] of hashed word and character n-grams."""
    vectors = np.zeros((len(texts), DIMENSIONS), np.float32)
    for row, text in enumerate(texts):
        for place, value in _features(text):
            vectors[row, place] = value
    norm = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.maximum(norm, 1e-12)
