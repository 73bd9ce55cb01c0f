"""The time that a work's matrix products alone would take at this machine's best rate.

Attention, norms, sampling and the optimizer count nothing: a floor, not a forecast.

Shapes: M rows of a product · K in · N out.
"""

from __future__ import annotations

import functools
import time

import jax
import jax.numpy as jnp
from bench_work import Work

from xrpo_jax.model.config import ModelConfig

TRAINED_ROWS = 1024  # tokens of a micro-batch of middling size


def shapes(model: ModelConfig) -> dict[str, tuple[int, int, int]]:
    """Weight matrices as name -> (K, N, how often in the model)."""
    wide = model.num_heads * model.head_dim
    narrow = model.num_kv_heads * model.head_dim
    width, inner, layers = model.hidden_size, model.intermediate_size, model.num_layers
    return {
        "query": (width, wide, layers),
        "key, value": (width, narrow, 2 * layers),
        "output": (wide, width, layers),
        "gate, up": (width, inner, 2 * layers),
        "down": (inner, width, layers),
        "head": (width, model.vocab_size, 1),
    }


def products(model: ModelConfig, work: Work) -> dict[str, float]:
    """Floating point operations of the work's products with weights by name, none computed twice.

    A prompt is computed once for all its rows, in sampling and in training, and the head only where
    a token is chosen. Backward costs twice what forward does; the old log-probs are the forward's.
    """
    prompts = sum(len(prompt) for prompt in work.prompts)
    fed = sum(limit - 1 for limit in work.limits)  # no token follows the last one
    body = prompts + fed
    sampled, trained = {"update": (0, 3), "step": (1, 3)}.get(work.kind, (1, 0))
    found = {}
    for name, (k, n, count) in shapes(model).items():
        tokens = (sampled + trained) * body
        if name == "head":
            tokens = sampled * (len(work.prompts) + fed) + trained * work.useful
        found[name] = 2.0 * k * n * count * tokens
    return found


def rates(model: ModelConfig, dtype: str, rows: int) -> dict[str, dict[int, float]]:
    """Operations a second of each product at M = `rows` and 1024 rows, the best of several tries.

    Sums are float32 whatever `dtype` is, as in the model.
    """
    found = {}
    for name, (k, n, _) in shapes(model).items():
        found[name] = {}
        for m in sorted({rows, TRAINED_ROWS}):
            left, right = jnp.ones((m, k), dtype), jnp.ones((k, n), dtype)
            found[name][m] = 2.0 * m * k * n / _fastest(left, right)
    return found


@jax.jit
def _product(left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.dot(left, right, preferred_element_type=jnp.float32)


def _fastest(left: jax.Array, right: jax.Array) -> float:
    """Seconds of one product: the best of tries that last about a tenth of a second in all."""
    once = functools.partial(_product, left, right)
    once().block_until_ready()
    best, end = float("inf"), time.perf_counter() + 0.1
    for _ in range(1000):
        begun = time.perf_counter()
        once().block_until_ready()
        now = time.perf_counter()
        best = min(best, now - begun)
        if now > end:
            break
    return best


def floor(model: ModelConfig, work: Work) -> dict:
    """Seconds of the work's products at the best rate of all, and with each at its own best."""
    measured = rates(model, work.dtype, work.rows)
    own = {name: max(at.values()) for name, at in measured.items()}
    best, operations = max(own.values()), products(model, work)
    return {
        "seconds": sum(operations.values()) / best,
        "own_seconds": sum(operations[name] / rate for name, rate in own.items()),
        "gflops": sum(operations.values()) / 1e9,
        "best_gflops_per_second": best / 1e9,
        "gflops_per_second": {
            name: {str(m): rate / 1e9 for m, rate in at.items()} for name, at in measured.items()
        },
    }
