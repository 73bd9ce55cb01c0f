"""The check of an export: its logits against those of the parameters that it was made from."""

import dataclasses
import functools
import importlib.util
import os

import jax
import jax.numpy as jnp
import numpy as np

from xrpo_jax.model import hf, transformer
from xrpo_jax.model.config import ModelConfig

_ROWS, _SLOTS = 2, 32
# Of the largest logit. The same program on the same numbers, and another program on them.
_RELOADED, _TRANSFORMERS = 1e-5, 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """What was compared: `tokens` tokens with logits up to `largest`, and how far apart they were.

    `transformers` is None where torch is not installed, or not in a version that it works with.
    """

    tokens: int
    largest: float
    reloaded: float
    transformers: float | None


def check(path: str | os.PathLike, config: ModelConfig, params: dict, dtype: str) -> Check:
    """Reads the directory that `save` wrote with `dtype`, and compares logits with `params`.

    It does so on the host, since beside a training state the device may have no room. Raises
    ValueError naming the directory when a logit differs or is not finite.
    """
    slots = min(_SLOTS, config.max_position_embeddings)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (_ROWS, slots))
    host = _host()
    with jax.default_device(host), jax.default_matmul_precision("highest"):
        expected = _logits(
            config,
            # A parameter in the export's dtype gives what reading it back as float32 gives.
            jax.tree.map(lambda leaf: jax.device_put(leaf, host).astype(dtype), params),
            tokens,
        )
        again, reloaded = hf.load(path)
        if again != config:
            raise ValueError(f"{path} reads back as another model: {again}, not {config}")
        found = _logits(config, reloaded, tokens)
        del reloaded
    largest = float(np.abs(expected).max())
    theirs = _transformers_logits(path, tokens)
    result = Check(
        tokens=tokens.size,
        largest=largest,
        reloaded=float(np.abs(found - expected).max()),
        transformers=None if theirs is None else float(np.abs(theirs - expected).max()),
    )
    for name, difference, bound in (
        ("when it is read again", result.reloaded, _RELOADED),
        ("in transformers", result.transformers, _TRANSFORMERS),
    ):
        if difference is not None and not difference <= bound * max(largest, 1.0):  # NaN too
            raise ValueError(
                f"{path} gives other logits {name}: they differ by {difference:.3g} and reach "
                f"{largest:.3g}; do not use it, and report the model it was made from"
            )
    return result


def describe(result: Check) -> str:
    """Says in a line what `check` found."""
    text = (
        f"{result.tokens} tokens, logits up to {result.largest:.4g}: read again they differ by "
        f"{result.reloaded:.2g}"
    )
    if result.transformers is None:
        return f"{text}; transformers was not asked (no torch that it works with)"
    return f"{text}, in transformers by {result.transformers:.2g}"


def _host() -> jax.Device | None:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS names the accelerator alone
        return None


@functools.partial(jax.jit, static_argnames=("config",))
def _run(config: ModelConfig, params: dict, tokens: jax.Array) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    valid = jnp.ones(tokens.shape, bool)
    hidden = transformer.forward(params, config, tokens, positions, valid, dtype=jnp.float32)
    return transformer.logits(params, config, hidden)


def _logits(config: ModelConfig, params: dict, tokens: np.ndarray) -> np.ndarray:
    return np.asarray(_run(config, params, jnp.asarray(tokens, jnp.int32)))


def _transformers_logits(path: str | os.PathLike, tokens: np.ndarray) -> np.ndarray | None:
    if not all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
        return None
    try:
        import torch
        import transformers

        transformers.AutoModelForCausalLM.from_pretrained  # noqa: B018 - needs a fitting torch
    except ImportError:
        return None
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(path, local_files_only=True)
    with torch.no_grad():
        return model.float().eval()(torch.from_numpy(tokens)).logits.numpy()
