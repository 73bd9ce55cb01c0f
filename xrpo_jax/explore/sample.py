"""Requests and their contexts turned into rollouts with verdicts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from xrpo_jax import rng
from xrpo_jax.arrays import Draw, Params, Samples
from xrpo_jax.log import Clock
from xrpo_jax.types import Context, Draft, Progress, Request, Rollout, Tools


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Asked:
    """A request with its context, as text for the sampler and for the learner."""

    request: Request
    context: Context
    sampled: np.ndarray
    trained: np.ndarray


def sample(
    tools: Tools,
    draw: Draw,
    params: Params,
    progress: Progress,
    requests: list[Request],
    contexts: list[Context],
    pauses: bool,
    round: int,
    clock: Clock,
) -> list[Rollout]:
    """Draw what was requested, in the requests' order; no row has a reward.

    A row is turned into text and handed to its verifier as soon as it has ended, while others are
    drawn; drafts are not graded. With `pauses` the drafts, and rows that might have become one,
    have a path to go on from.
    """
    with clock("plan"):
        asked, index = [], []
        begun = [len(a) + len(b) for a, b in zip(progress.rollouts, progress.drafts, strict=True)]
        for request, context in zip(requests, contexts, strict=True):
            each = _Asked(request=request, context=context, **_encoded(tools, context))
            asked += [each] * request.n
            index += range(begun[request.slot], begun[request.slot] + request.n)
            begun[request.slot] += request.n
        ways: dict[tuple[bool, bool], list[int]] = {}
        for row, each in enumerate(asked):
            keep = pauses and each.request.draft is not Draft.NONE
            ways.setdefault((each.request.resume, keep), []).append(row)
    rollouts: dict[int, Rollout] = {}
    answers: list[int] = []  # rows in the order in which they ended
    with tools.grading() as grading:
        for (resume, keep), rows in ways.items():

            def finished(places: np.ndarray, samples: Samples, rows: list[int] = rows) -> None:
                with clock("verify"):
                    for i, row in enumerate(rows[place] for place in places.tolist()):
                        found = _rollout(tools, progress, asked[row], index[row], samples, i, round)
                        rollouts[row] = found
                        if not found.draft:
                            answers.append(row)
                            grading.add(found.prompt, found.text)

            these, numbers = [asked[row] for row in rows], [index[row] for row in rows]
            with clock("sample"):
                _draw(draw, params, progress, these, numbers, resume, keep, finished)
        with clock("verify"):
            for row, verdict in zip(answers, grading.verdicts(), strict=True):
                rollouts[row] = dataclasses.replace(rollouts[row], verdict=verdict)
    hidden = clock.seconds.get("verify_hidden", 0.0) + grading.hidden
    clock.seconds["verify_hidden"] = hidden
    return [rollouts[row] for row in range(len(asked))]


def _encoded(tools: Tools, context: Context) -> dict[str, np.ndarray]:
    def tokens(conversation) -> np.ndarray:
        words = list(tools.encode(conversation))
        begin = len(tools.begin) if tuple(words[: len(tools.begin)]) == tools.begin else 0
        words = [*words[:begin], *context.before, *words[begin:], *context.after]
        return np.array(words, np.int32)

    sampled = tokens(context.sampled)
    trained = sampled if context.trained == context.sampled else tokens(context.trained)
    return {"sampled": sampled, "trained": trained}


def _draw(
    draw: Draw,
    params: Params,
    progress: Progress,
    asked: list[_Asked],
    index: list[int],
    resume: bool,
    keep: bool,
    finished: Callable[[np.ndarray, Samples], None],
) -> None:
    """Draw the rows of `asked`, which are all begun or all resumed."""
    keys = rng.Rows(
        step_key=rng.key(progress.seed, progress.step, "rollout"),
        prompt=np.array([progress.prompts[each.request.slot] for each in asked]),
        index=np.array(index),
    )
    limit = np.array([each.request.limit or progress.max_new_tokens for each in asked])
    if resume:
        paths = [each.request.source.path for each in asked]
        draw.resume(params, paths, keys, limit, keep=keep, finished=finished)
        return
    # Rows of one request share their prompt's array.
    place: dict[int, int] = {}
    row = [place.setdefault(id(each.sampled), len(place)) for each in asked]
    prompts = list({id(each.sampled): each.sampled for each in asked}.values())
    draw(params, prompts, np.array(row), keys, limit, keep=keep, finished=finished)


def _rollout(
    tools: Tools,
    progress: Progress,
    asked: _Asked,
    index: int,
    samples: Samples,
    i: int,
    round: int,
) -> Rollout:
    request, source = asked.request, asked.request.source
    tokens, logp = (values[i, : samples.length[i]] for values in (samples.tokens, samples.logp))
    stopped = bool(samples.stopped[i])
    goes_on = request.resume and not asked.context.after  # else they stand in the prompt
    if goes_on:
        tokens = np.concatenate([source.tokens, tokens])
        logp = np.concatenate([source.logp, logp])
    unended = not stopped and len(tokens) < progress.max_new_tokens
    return Rollout(
        prompt=progress.prompts[request.slot],
        slot=request.slot,
        index=index,
        round=source.round if goes_on else round,
        kind=asked.context.kind,
        sampled_prompt=asked.sampled,
        trained_prompt=asked.trained,
        tokens=tokens,
        logp=logp,
        stopped=stopped,
        text=tools.decode([*asked.context.after, *tokens]),  # the answer with its beginning
        verdict=None,
        reward=float("nan"),
        source=source,
        resumed=goes_on,
        draft=request.draft is Draft.ALL or (request.draft is Draft.UNENDED and unended),
        path=None if samples.paths is None else samples.paths[i],
    )
