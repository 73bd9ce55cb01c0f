"""An algorithm is a record of parts: what to sample next, and what to learn from it.

Every other file of this folder is an algorithm: its name is the module's, its settings are the
keyword arguments of its `make`.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
import pkgutil

import xrpo_jax.algorithms
from xrpo_jax.explore.collect import Explore
from xrpo_jax.learn.advantage import Tracker
from xrpo_jax.learn.keep import Mixed, Stopped
from xrpo_jax.learn.objective import Learn

SIGNED = ("min_similarity", "max_similarity")  # cosines; no other number may be negative


@dataclasses.dataclass(frozen=True, kw_only=True)
class Algorithm:
    """Only `learn` is static under jit: another planner never retraces the update."""

    explore: Explore
    learn: Learn


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """What the run gives every algorithm: rollouts per prompt on average, new tokens at most."""

    group: int
    max_new_tokens: int


def names() -> tuple[str, ...]:
    """The algorithms there are, by file name."""
    found = (module.name for module in pkgutil.iter_modules(xrpo_jax.algorithms.__path__))
    return tuple(sorted(name for name in found if name != "base"))


def settings(name: str) -> dict[str, object]:
    """The settings of an algorithm with their defaults; ValueError on an unknown name."""
    if name not in names():
        raise ValueError(f"algorithm.name={name!r}; allowed: {', '.join(names())}")
    module = importlib.import_module(f"xrpo_jax.algorithms.{name}")
    # `compose`, where a module has it, takes what `make` passes on.
    functions = [module.make, *([module.compose] if hasattr(module, "compose") else [])]
    return {
        key: parameter.default
        for function in functions
        for key, parameter in inspect.signature(function).parameters.items()
        if parameter.default is not parameter.empty
    }


def make(name: str, budget: Budget, **given) -> Algorithm:
    """The algorithm `name` with settings `given`; ValueError names what is unknown or allowed."""
    known = settings(name)
    for key, value in given.items():
        if key not in known:
            raise ValueError(
                f"algorithm.{key} is no setting of {name!r}; allowed: {', '.join(sorted(known))}"
            )
        if isinstance(value, int | float) and key not in SIGNED and not 0 <= value < math.inf:
            raise ValueError(f"algorithm.{key}={value}; allowed: 0 or more")
    module = importlib.import_module(f"xrpo_jax.algorithms.{name}")
    return module.make(budget, **given)


def keeping(algorithm: Algorithm, *, stopped: bool, mixed: bool) -> Algorithm:
    """The algorithm trained on completed rows only, on unequally rewarded groups only, or both."""
    if mixed and isinstance(algorithm.learn.advantage, Tracker):
        raise ValueError(
            "train.drop_zero_variance=True; allowed: False where a prompt has one rollout, which "
            "is never mixed"
        )
    more = ((Stopped(),) if stopped else ()) + ((Mixed(),) if mixed else ())
    learn = dataclasses.replace(algorithm.learn, keep=algorithm.learn.keep + more)
    return dataclasses.replace(algorithm, learn=learn)
