"""Every record of device arrays that crosses a file: pytrees, carried through jit.

Shapes: N rollout rows · n = rows of one device or micro-batch · P prompt length · T new tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import struct

Params = Any  # nested dict of arrays, see model/params.py


@struct.dataclass
class Samples:
    """Drawn completions: tokens i32[N,T], logp f32[N,T], length i32[N], stopped bool[N]."""

    tokens: Any
    logp: Any
    length: Any
    stopped: Any


@struct.dataclass
class Batch:
    """One learner step; fields that no part asked for are None.

    Prompts and completions are apart: column t of an array [N,T] is about completion token t.
    `mask` is 1 on trained tokens.
    """

    prompt: Any  # i32[N,P] the prompt that the learner sees
    prompt_length: Any  # i32[N]
    tokens: Any  # i32[N,T] completions
    length: Any  # i32[N] tokens of the completion
    mask: Any  # f32[N,T] all zero on a padding row
    old_logp: Any  # f32[N,T] behaviour policy, trained context, the trainer's numerics
    reward: Any  # f32[N]
    correct: Any  # f32[N] 1 where the verifier said correct
    group: Any  # i32[N] prompt slot; rows of a group are compared with one another
    kind: Any  # i32[N]
    stopped: Any  # f32[N] 1 where a stop token ended the row within the limit
    valid: Any  # f32[N] 0 on padding rows
    sampler_logp: Any = None  # f32[N,T] NaN where the sampler saw another context; host only
    ref_logp: Any = None  # f32[N,T] only when a penalty asks for it


@struct.dataclass
class Scores:
    """Constants of the loss, computed once on whole groups: advantage and weight f32[N,T]."""

    advantage: Any
    weight: Any


@struct.dataclass
class TokenStats:
    """The current policy on the batch: logp f32[n,T], entropy f32[n,T]; 0 on padding."""

    logp: Any
    entropy: Any


@struct.dataclass
class TrainState:
    """Float32 master parameters and the optimizer's state; its step number is the checkpoint's."""

    params: Any
    optimizer: Any


# (params, list of prompts i32[<=P], row i[N], rng.Rows of N, limit i[N] or int) -> NumPy Samples
Draw = Callable[..., Samples]
