"""Held-out evaluation: pass@1, pass@k and cons@k with bootstrap intervals over problems."""

from __future__ import annotations

import numpy as np

from xrpo_jax import rng
from xrpo_jax.arrays import Draw, Params, Samples
from xrpo_jax.explore.reward import FAILED
from xrpo_jax.types import Tools, Verdict


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased chance that one of k samples is correct, `1 - C(n-c, k) / C(n, k)` (2107.03374).

    Raises ValueError unless 1 <= k <= n and 0 <= correct <= n.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} samples; allowed: k from 1 to {n}")
    if not 0 <= correct <= n:
        raise ValueError(f"{correct} of {n} samples correct; allowed: 0 to {n}")
    if n - correct < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(n - correct + 1, n + 1)))


def consensus(answers: list[str | None], correct: list[bool]) -> float:
    """1 when the most frequent answer is correct; unparsed answers (None) never win, ties go to the
    first that appeared."""
    counts: dict[str, int] = {}
    first: dict[str, int] = {}
    for place, answer in enumerate(answers):
        if answer is not None:
            counts[answer] = counts.get(answer, 0) + 1
            first.setdefault(answer, place)
    if not counts:
        return 0.0
    winner = max(counts, key=lambda answer: (counts[answer], -first[answer]))
    return float(correct[first[winner]])


def cons_at_k(
    answers: list[str | None], correct: list[bool], k: int, seed: int = 0, draws: int = 64
) -> float:
    """Expected consensus of k of the samples: exact for k = n, else over seeded random subsets."""
    n = len(answers)
    if not 1 <= k <= n:
        raise ValueError(f"cons@{k} of {n} samples; allowed: k from 1 to {n}")
    if k == n:
        return consensus(answers, correct)
    generator = np.random.default_rng(seed)
    votes = []
    for _ in range(draws):
        chosen = np.sort(generator.choice(n, k, replace=False))
        votes.append(consensus([answers[i] for i in chosen], [correct[i] for i in chosen]))
    return float(np.mean(votes))


def interval(values: np.ndarray, seed: int = 0, draws: int = 1000) -> tuple[float, float]:
    """95 % bootstrap interval of the mean of `values` f64[problems], resampling problems."""
    values = np.asarray(values, np.float64)
    chosen = np.random.default_rng(seed).integers(0, len(values), (draws, len(values)))
    low, high = np.percentile(values[chosen].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


def answers(
    tools: Tools,
    draw: Draw,
    params: Params,
    problems: np.ndarray,
    samples: int,
    max_new_tokens: int,
    step_key,
) -> tuple[Samples, list[str], list[Verdict]]:
    """`samples` completions in a row for each of `problems` i[n], their texts and verdicts.

    `step_key` is that of rng.key.
    """
    encoded = [np.array(tools.encode(tools.task.prompt(i)), np.int32) for i in problems.tolist()]
    row = np.repeat(np.arange(len(problems)), samples)
    keys = rng.Rows(
        step_key=step_key,
        prompt=problems[row],
        index=np.tile(np.arange(samples), len(problems)),
    )
    texts: dict[int, str] = {}
    with tools.grading() as grading:

        def finished(rows: np.ndarray, samples: Samples) -> None:
            for i, one in enumerate(rows.tolist()):
                texts[one] = tools.decode(samples.tokens[i, : samples.length[i]])
                grading.add(int(keys.prompt[one]), texts[one])

        drawn = draw(params, encoded, row, keys, max_new_tokens, finished=finished)
        verdicts = dict(zip(texts, grading.verdicts(), strict=True))
    everyone = range(len(row))
    return drawn, [texts[i] for i in everyone], [verdicts[i] for i in everyone]


def evaluate(
    tools: Tools,
    draw: Draw,
    params: Params,
    *,
    samples: int,
    max_new_tokens: int,
    seed: int,
    step: int,
) -> tuple[dict[str, float], list[dict]]:
    """Metrics of `samples` completions for every problem of `tools.task`, and one record each.

    All are drawn in one call, so that no row waits for a longer one. Names: `pass@1`, `pass@k` and
    `cons@k` with k = samples, `pass@1/<level>`, `length`, `truncated`, and `verifier_failed` where
    it happened, each with `_low` and `_high` of its 95 % interval.
    """
    task = tools.task
    problems = np.arange(len(task))
    drawn, texts, verdicts = answers(
        tools, draw, params, problems, samples, max_new_tokens, rng.key(seed, step, "evaluate")
    )
    records = []
    asked = np.repeat(problems, samples).tolist()
    for i, (problem, text, verdict) in enumerate(zip(asked, texts, verdicts, strict=True)):
        graded = verdict.status not in FAILED
        records.append(
            {
                "prompt": problem,
                "level": task.level(problem),
                "question": task.prompt(problem)[-1].content,
                "text": text,
                "correct": verdict.correct,
                "status": verdict.status,
                "reason": verdict.reason,
                "answer": task.answer(problem, text) if graded else None,
                "length": int(drawn.length[i]),
                "stopped": bool(drawn.stopped[i]),
            }
        )
    return summarise(records, [task.level(i) for i in range(len(task))], samples), records


def summarise(records: list[dict], levels: list[str], samples: int) -> dict[str, float]:
    """The metrics of `evaluate` from its records, `samples` in a row for each problem."""
    metrics: dict[str, float] = {}

    def add(name: str, values: list[float] | np.ndarray) -> None:
        metrics[name] = float(np.mean(values))
        metrics[f"{name}_low"], metrics[f"{name}_high"] = interval(values)

    def each(name: str) -> np.ndarray:
        return np.array([r[name] for r in records], np.float64).reshape(-1, samples)

    correct = each("correct")
    add("pass@1", correct.mean(axis=1))
    if samples > 1:
        add(f"pass@{samples}", [pass_at_k(samples, int(row.sum()), samples) for row in correct])
        votes = []
        for start in range(0, len(records), samples):
            rows = records[start : start + samples]
            answers, right = [r["answer"] for r in rows], [r["correct"] for r in rows]
            votes.append(cons_at_k(answers, right, samples))
        add(f"cons@{samples}", votes)
    for level in dict.fromkeys(levels):
        add(f"pass@1/{level}", correct[[one == level for one in levels]].mean(axis=1))
    add("length", each("length").mean(axis=1))
    add("truncated", 1.0 - each("stopped").mean(axis=1))
    failed = np.array([record["status"] in FAILED for record in records])
    if failed.any():  # they count as not correct
        add("verifier_failed", failed.reshape(-1, samples).mean(axis=1))
    return metrics
