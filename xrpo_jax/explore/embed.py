"""Text embeddings for retrieval that need no download: hashed word and character n-grams.

An embedder is any `embed(list[str]) -> f32[n, d]` with rows of unit norm.
"""

from __future__ import annotations

import functools
import re
import zlib

import numpy as np

from xrpo_jax.types import normal

DIMENSIONS = 512
CHARACTERS = (3, 4)


@functools.lru_cache(maxsize=8192)
def _vector(text: str) -> np.ndarray:
    text = normal(text)
    words = re.findall(r"\w+|[^\w\s]", text)
    grams = [f"w:{word}" for word in words]
    grams += [f"c:{text[i : i + n]}" for n in CHARACTERS for i in range(len(text) - n + 1)]
    vector = np.zeros(DIMENSIONS, np.float32)
    for gram in grams:
        hashed = zlib.crc32(gram.encode())
        # Signed hashing: collisions cancel in expectation.
        vector[(hashed >> 1) % DIMENSIONS] += 1.0 if hashed & 1 else -1.0
    vector = np.sign(vector) * np.sqrt(np.abs(vector))
    return vector / max(float(np.linalg.norm(vector)), 1e-12)


def ngrams(texts: list[str]) -> np.ndarray:
    """Unit-norm embeddings f32[n, DIMENSIONS] of hashed word and character n-grams."""
    return np.stack([_vector(text) for text in texts])
