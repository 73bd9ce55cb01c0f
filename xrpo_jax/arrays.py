"""Every record of device arrays that crosses a file: pytrees, carried through jit.

Shapes: N rollout rows · n = rows of one device or micro-batch · P prompt length · T new tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from flax import struct

Params = Any  # nested dict of arrays, see model/params.py


@dataclasses.dataclass(frozen=True, kw_only=True)
class Path:
    """Where the sampler left a row, to go on from there without computing what came before again.

    A path may be cut: `dataclasses.replace(path, tokens=path.tokens[:k])` with k >= 1.
    """

    cache: Any  # keys and values of all rows that ended in one lane together, on the device
    place: int  # of the row among them
    prompt_length: int
    tokens: np.ndarray  # i32[<=T] drawn so far


@struct.dataclass
class Samples:
    """Drawn completions: tokens i32[N,T], logp f32[N,T], length i32[N], stopped bool[N].

    `paths` is a tuple of one Path a row where that was asked for, else None.
    """

    tokens: Any
    logp: Any
    length: Any
    stopped: Any
    paths: Any = None


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
    old_logp: Any  # f32[N,T] policy before the update, trained context, the trainer's numerics
    reward: Any  # f32[N]
    correct: Any  # f32[N] 1 where the verifier said correct
    group: Any  # i32[N] prompt slot; rows of a group are compared with one another
    kind: Any  # i32[N]
    stopped: Any  # f32[N] 1 where a stop token ended the row within the limit
    valid: Any  # f32[N] 0 on padding rows
    baseline: Any = None  # f32[N] what was known of the prompt before the step: chance of success
    ancestors: Any = None  # i32[N,A] rows with one number in column d share their first d segments
    sampler_logp: Any = None  # f32[N,T] NaN where the sampler saw another context; host only
    old_entropy: Any = None  # f32[N,T] of the policy before the update
    ref_logp: Any = None  # f32[N,T] of the initial policy, only when a penalty asks for it
    ref_entropy: Any = None  # f32[N,T] likewise


@struct.dataclass
class Scores:
    """Constants of the loss, computed once on whole groups."""

    advantage: Any  # f32[N,T]
    weight: Any  # f32[N,T]
    accuracy: Any  # f32[N] share of correct rows of the whole batch, the same in every row
    report: Any = struct.field(default_factory=dict)  # name -> f32[N], for the log


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


# What sampler.make_draw returns: called with (params, list of prompts i32[<=P], row i[N], rng.Rows
# of N, limit i[N] or int, keep=False, finished=None) it gives NumPy Samples, and so does its
# `resume(params, paths, keys, limit, keep=False, finished=None)`. While others are still drawn it
# calls `finished(rows i[M], Samples of M rows)` every few tokens for those that have ended since,
# which may be none, each of the N rows once and in any order; what that raises ends the call.
Draw = Callable[..., Samples]
