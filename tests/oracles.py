"""Float64 NumPy with plain loops, written from the specification's equations.

Nothing here imports xrpo_jax or vectorises, so that it cannot share the library's mistakes. Losses
take the current log-probs twice, `now` and `still`: the gradient is taken by moving `now` alone, so
`still` is what the equations call a stopped gradient.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """Real rollouts, no padding rows: N rows of S columns, `mask` 1 on trained tokens."""

    now: np.ndarray  # f64[N,S] log-probs of the current policy
    old: np.ndarray  # f64[N,S] of the policy that drew them
    mask: np.ndarray  # [N,S]
    reward: np.ndarray  # f64[N]
    group: np.ndarray  # i[N]
    correct: np.ndarray  # bool[N]
    still: np.ndarray | None = None  # f64[N,S] `now` without gradient
    reference: np.ndarray | None = None  # f64[N,S] of the initial policy
    kept: np.ndarray | None = None  # bool[N] rows of the loss; the others count in their group

    @property
    def number(self) -> int:
        return len(self.reward)

    def frozen(self) -> np.ndarray:
        return self.now if self.still is None else self.still

    def trained(self, i: int) -> list[int]:
        """Columns of row i that are in the loss."""
        return self.tokens(i) if self.kept is None or self.kept[i] else []

    def tokens(self, i: int) -> list[int]:
        """Columns of row i that the policy wrote."""
        return [t for t in range(self.mask.shape[1]) if self.mask[i, t] > 0]


# --- advantages ---------------------------------------------------------------------------------


def _members(group: np.ndarray, i: int) -> list[int]:
    return [j for j in range(len(group)) if group[j] == group[i]]


def group_z(reward, group, ddof: int = 1, eps: float = 1e-6) -> list[float]:
    """`(R - mean) / (std + eps)`; 0 in a group of one and where all rewards are the same."""
    advantages = []
    for i in range(len(reward)):
        values = [float(reward[j]) for j in _members(group, i)]
        if len(values) < 2 or max(values) == min(values):
            advantages.append(0.0)
            continue
        mean = sum(values) / len(values)
        variance = sum((value - mean) ** 2 for value in values) / (len(values) - ddof)
        advantages.append((float(reward[i]) - mean) / (math.sqrt(variance) + eps))
    return advantages


def group_mean(reward, group) -> list[float]:
    """`R - mean`."""
    advantages = []
    for i in range(len(reward)):
        values = [float(reward[j]) for j in _members(group, i)]
        equal = max(values) == min(values)
        advantages.append(0.0 if equal else float(reward[i]) - sum(values) / len(values))
    return advantages


def leave_one_out(reward, group) -> list[float]:
    """`R_i` minus the mean of the other rewards; 0 in a group of one."""
    advantages = []
    for i in range(len(reward)):
        others = [float(reward[j]) for j in _members(group, i) if j != i]
        equal = all(other == float(reward[i]) for other in others)
        advantages.append(0.0 if equal else float(reward[i]) - sum(others) / len(others))
    return advantages


def novelty(
    advantage, rows: Rows, weight: float = 2.5, cap: float = 0.5, average: str = "group"
) -> list[float]:
    """XRPO's `A + min(max(weight (1 - exp(s - mean s)), 0), cap A)` on full-reward rows.

    The cap of a negative advantage would turn the bonus into a penalty: such rows are left alone.
    """
    level = []
    for i in range(rows.number):
        tokens = rows.tokens(i)
        level.append(sum(rows.old[i, t] for t in tokens) / len(tokens) if tokens else 0.0)
    shaped = []
    for i in range(rows.number):
        if not rows.correct[i] or advantage[i] <= 0:
            shaped.append(advantage[i])
            continue
        among = [level[j] for j in _members(rows.group, i) if average == "group" or rows.correct[j]]
        eta = math.exp(level[i] - sum(among) / len(among))
        shaped.append(advantage[i] + min(max(weight * (1 - eta), 0.0), cap * advantage[i]))
    return shaped


# --- ratios, objectives, aggregations -----------------------------------------------------------


def token_ratio(rows: Rows) -> list[dict[int, float]]:
    """For each row the ratio of every token, by column."""
    return [
        {t: math.exp(rows.now[i, t] - rows.old[i, t]) for t in rows.tokens(i)}
        for i in range(rows.number)
    ]


def _mean_difference(values: np.ndarray, rows: Rows, i: int) -> float:
    tokens = rows.tokens(i)
    return sum(values[i, t] - rows.old[i, t] for t in tokens) / max(len(tokens), 1)


def sequence_ratio(rows: Rows) -> list[float]:
    """GSPO: one ratio a row."""
    return [math.exp(_mean_difference(rows.now, rows, i)) for i in range(rows.number)]


def sequence_token_ratio(rows: Rows) -> list[dict[int, float]]:
    """GSPO-token: `sg(s_i) π / sg(π)`."""
    still = rows.frozen()
    ratios = []
    for i in range(rows.number):
        level = math.exp(_mean_difference(still, rows, i))
        ratios.append({t: level * math.exp(rows.now[i, t] - still[i, t]) for t in rows.tokens(i)})
    return ratios


def ppo(ratio: float, advantage: float, low: float, high: float) -> float:
    return min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def dual(ratio: float, advantage: float, low: float, high: float, bound: float) -> float:
    plain = ppo(ratio, advantage, low, high)
    return max(plain, bound * advantage) if advantage < 0 else plain


def cispo(still_ratio: float, advantage: float, logp: float, cap: float) -> float:
    return min(still_ratio, cap) * advantage * logp


def token_mean(losses: list[dict[int, float]], group) -> float:
    """`losses` has one dict a row: column to the loss of that token."""
    count = sum(len(row) for row in losses)
    return sum(sum(row.values()) for row in losses) / count if count else 0.0


def sequence_mean(losses: list[dict[int, float]], group) -> float:
    means = [sum(row.values()) / len(row) for row in losses if row]
    return sum(means) / len(means) if means else 0.0


def constant_length(losses: list[dict[int, float]], group, limit: int) -> float:
    sums = [sum(row.values()) / limit for row in losses if row]
    return sum(sums) / len(sums) if sums else 0.0


def prompt_mean(losses: list[dict[int, float]], group) -> float:
    prompts: dict[int, list[float]] = {}
    for i, row in enumerate(losses):
        if row:
            prompts.setdefault(int(group[i]), []).append(sum(row.values()) / len(row))
    means = [sum(values) / len(values) for values in prompts.values()]
    return sum(means) / len(means) if means else 0.0


# --- KL -----------------------------------------------------------------------------------------


def k1(d: float) -> float:
    return -d


def k2(d: float) -> float:
    return d * d / 2


def k3(d: float) -> float:
    return math.exp(d) - 1 - d


def exact_kl(one: np.ndarray, other: np.ndarray) -> float:
    """KL(one || other) of two vectors of logits."""

    def log_softmax(logits):
        total = math.log(sum(math.exp(value) for value in logits))
        return [value - total for value in logits]

    first, second = log_softmax(one), log_softmax(other)
    return sum(math.exp(p) * (p - q) for p, q in zip(first, second, strict=True))


# --- algorithms ---------------------------------------------------------------------------------


def _losses(rows: Rows, objective) -> list[dict[int, float]]:
    """Minus `objective(row, column)` on every token of the loss."""
    return [{t: -objective(i, t) for t in rows.trained(i)} for i in range(rows.number)]


def grpo(
    rows: Rows, low=0.2, high=0.2, beta=0.0, estimator=k3, bound=None, advantage=None
) -> float:
    """DeepSeekMath 2402.03300; `bound` is the dual clip's."""
    if advantage is None:
        advantage = group_z(rows.reward, rows.group)
    ratio = token_ratio(rows)

    def objective(i, t):
        if bound is None:
            value = ppo(ratio[i][t], advantage[i], low, high)
        else:
            value = dual(ratio[i][t], advantage[i], low, high, bound)
        if beta:
            value -= beta * estimator(rows.reference[i, t] - rows.now[i, t])
        return value

    return sequence_mean(_losses(rows, objective), rows.group)


def drgrpo(rows: Rows, limit: int, low=0.2, high=0.2) -> float:
    advantage, ratio = group_mean(rows.reward, rows.group), token_ratio(rows)
    losses = _losses(rows, lambda i, t: ppo(ratio[i][t], advantage[i], low, high))
    return constant_length(losses, rows.group, limit)


def rloo(rows: Rows, low=0.2, high=0.2) -> float:
    return grpo(rows, low, high, advantage=leave_one_out(rows.reward, rows.group))


def dapo(rows: Rows, low=0.2, high=0.28) -> float:
    advantage, ratio = group_z(rows.reward, rows.group), token_ratio(rows)
    losses = _losses(rows, lambda i, t: ppo(ratio[i][t], advantage[i], low, high))
    return token_mean(losses, rows.group)


def gspo(rows: Rows, low=3e-4, high=4e-4, advantage=None) -> float:
    """2507.18071: the mean over rows of the row's clipped ratio times its advantage."""
    if advantage is None:
        advantage = group_z(rows.reward, rows.group)
    ratio = sequence_ratio(rows)
    values = [
        -ppo(ratio[i], advantage[i], low, high) for i in range(rows.number) if rows.trained(i)
    ]
    return sum(values) / len(values) if values else 0.0


def gspo_token(rows: Rows, low=3e-4, high=4e-4) -> float:
    advantage, ratio = group_z(rows.reward, rows.group), sequence_token_ratio(rows)
    losses = _losses(rows, lambda i, t: ppo(ratio[i][t], advantage[i], low, high))
    return sequence_mean(losses, rows.group)


def cispo_loss(rows: Rows, cap=5.0) -> float:
    advantage, still = group_z(rows.reward, rows.group), rows.frozen()

    def objective(i, t):
        ratio = math.exp(still[i, t] - rows.old[i, t])
        return cispo(ratio, advantage[i], rows.now[i, t], cap)

    return token_mean(_losses(rows, objective), rows.group)


def xrpo(rows: Rows, low=3e-4, high=4e-4, weight=2.5, cap=0.5, average="group") -> float:
    base = group_z(rows.reward, rows.group)
    return gspo(rows, low, high, advantage=novelty(base, rows, weight, cap, average))


def xrpo_token(rows: Rows, low=0.2, high=0.2, weight=2.5, cap=0.5, average="group") -> float:
    base = group_z(rows.reward, rows.group)
    return grpo(rows, low, high, advantage=novelty(base, rows, weight, cap, average))


LOSSES = {
    "grpo": grpo,
    "drgrpo": drgrpo,
    "rloo": rloo,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "cispo": cispo_loss,
    "dapo": dapo,
    "xrpo": xrpo,
    "xrpo_token": xrpo_token,
}


def gradient(loss, rows: Rows, step: float = 1e-6) -> np.ndarray:
    """Central differences of `loss(Rows)` by the current log-prob of every token: f64[N,S]."""
    out = np.zeros_like(rows.now)
    still = rows.now.copy()
    for i in range(rows.number):
        for t in rows.tokens(i):
            ends = []
            for sign in (1, -1):
                moved = rows.now.copy()
                moved[i, t] += sign * step
                ends.append(loss(dataclasses.replace(rows, now=moved, still=still)))
            out[i, t] = (ends[0] - ends[1]) / (2 * step)
    return out


# --- a policy whose log-probs can be differentiated by hand --------------------------------------


def bigram_logp(table: np.ndarray, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Log-probs f64[N,S] of a policy that looks at the token before only; `table` [V,V] logits."""
    logp = np.zeros(tokens.shape)
    for i in range(tokens.shape[0]):
        for t in range(1, tokens.shape[1]):
            if mask[i, t] > 0:
                logits = table[tokens[i, t - 1]].astype(np.float64)
                logp[i, t] = logits[tokens[i, t]] - math.log(sum(math.exp(x) for x in logits))
    return logp


def bigram_gradient(table: np.ndarray, tokens: np.ndarray, by_logp: np.ndarray) -> np.ndarray:
    """The gradient by `table` of a loss whose gradient by the log-probs is `by_logp` [N,S]."""
    out = np.zeros(table.shape)
    for i in range(tokens.shape[0]):
        for t in range(1, tokens.shape[1]):
            if by_logp[i, t]:
                before = tokens[i, t - 1]
                weights = np.exp(table[before].astype(np.float64))
                out[before] -= by_logp[i, t] * weights / weights.sum()
                out[before, tokens[i, t]] += by_logp[i, t]
    return out


# --- data ---------------------------------------------------------------------------------------


def toy() -> Rows:
    """The one prompt with four rollouts of shared_parts.md's golden numbers."""
    old = [[-0.5, -1, -0.2], [-2, -0.7], [-0.1, -0.3, -0.4, -0.9], [-1.5]]
    change = [[0.3, -0.1, 0], [-0.4, 0.25], [0.05, -0.02, 0.35, -0.3], [0.2]]

    def padded(lists):
        return np.array([row + [0.0] * (4 - len(row)) for row in lists], np.float64)

    return Rows(
        now=padded(old) + padded(change),
        old=padded(old),
        mask=padded([[1.0] * len(row) for row in old]),
        reward=np.array([1.0, 0.0, 0.0, 1.0]),
        correct=np.array([True, False, False, True]),
        group=np.zeros(4, int),
    )


def ragged(seed: int = 0) -> Rows:
    """Prompts of 5, 3, 1 and 4 rollouts of 1 to 7 tokens after 2 to 4 of the prompt, in 12 columns.

    One group is mixed and graded, one has equal rewards that float32 cannot hold, one is a group
    of one, one is mixed. The policy has moved far enough for some tokens to be clipped.
    """
    generator = np.random.default_rng(seed)
    group = np.repeat([0, 1, 2, 3], [5, 3, 1, 4])
    mask = np.zeros((len(group), 12))
    for row in mask:
        start = generator.integers(2, 5)
        row[start : start + generator.integers(1, 8)] = 1
    old = -generator.gamma(1.5, 0.8, mask.shape) * mask
    reward = np.array([1, 0, 0, 1, 0.75, 0.1, 0.1, 0.1, 1, 0.2, 1, 1, 1])
    # Rare rows that are not to be sharpened: one partly right, one right but punished for length.
    old[[4, 9]] *= 2
    return Rows(
        now=old + 0.3 * generator.standard_normal(mask.shape) * mask,
        old=old,
        mask=mask,
        reward=reward,
        group=group,
        correct=(reward == 1) | (np.arange(len(reward)) == 9),
        reference=old - 0.4 * generator.standard_normal(mask.shape) * mask,
    )
