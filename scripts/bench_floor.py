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


def products(model: ModelConfig, work: Work) -> float:
    """Floating point operations of the work's products with weights, none computed twice.

    A prompt is computed once for all its rows, in sampling and in training, and the head only where
    a token is chosen. Backward costs twice what forward does; the old log-probs are the forward's.
    """
    sizes = {name: 2.0 * k * n * count for name, (k, n, count) in shapes(model).items()}
    head = sizes.pop("head")
    body = sum(sizes.values())
    prompts = sum(len(prompt) for prompt in work.prompts)
    fed = sum(limit - 1 for limit in work.limits)  # no token follows the last one
    sampling = body * (prompts + fed) + head * (len(work.prompts) + fed)
    training = 3 * (body * (prompts + fed) + head * work.useful)
    return {"update": training, "step": sampling + training}.get(work.kind, sampling)


def rates(model: ModelConfig, dtype: str, rows: int) -> dict[str, float]:
    """Operations a second of each product at M = `rows` and 1024, the best of several tries.

    Sums are float32 whatever `dtype` is, as in the model.
    """
    found = {}
    for name, (k, n, _) in shapes(model).items():
        for m in sorted({rows, TRAINED_ROWS}):
            left, right = jnp.ones((m, k), dtype), jnp.ones((k, n), dtype)
            seconds = _fastest(left, right)
            found[f"{name} [{m},{k}]x[{k},{n}]"] = 2.0 * m * k * n / seconds
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
    """`seconds` at the best rate of all products, that rate, and what was measured."""
    measured = rates(model, work.dtype, work.rows)
    best = max(measured.values())
    operations = products(model, work)
    return {
        "seconds": operations / best,
        "gflops": operations / 1e9,
        "best_gflops_per_second": best / 1e9,
        "gflops_per_second": {name: rate / 1e9 for name, rate in measured.items()},
    }
