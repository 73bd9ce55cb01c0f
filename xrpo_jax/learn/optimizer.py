"""AdamW as every algorithm uses it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW; the warm-up counts updates."""

    learning_rate: float = 3e-4
    warmup: int = 5
    clip_norm: float = 1.0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95


def make_optimizer(settings: OptimizerSettings) -> optax.GradientTransformation:
    """AdamW with a linear warm-up (in updates) and clipping by global norm."""
    rate = optax.linear_schedule(
        settings.learning_rate / (settings.warmup + 1), settings.learning_rate, settings.warmup
    )
    return optax.chain(
        clipped(settings.clip_norm),
        optax.adamw(rate, b1=settings.beta1, b2=settings.beta2, weight_decay=settings.weight_decay),
    )


def clipped(limit: float) -> optax.GradientTransformation:
    """Gradients of a global norm up to `limit`.

    A product with one number, where optax divides: XLA then makes the optimizer's step in one pass
    over each array, without a clipped copy of the gradient.
    """

    def scaled(gradient, params=None):
        factor = limit / jnp.maximum(optax.tree.norm(gradient), limit)
        return jax.tree.map(lambda leaf: leaf * factor, gradient)

    return optax.stateless(scaled)
