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
    entropy: np.ndarray | None = None  # f64[N,S] of the current policy
    old_entropy: np.ndarray | None = None  # f64[N,S] of the policy that drew them
    reference_entropy: np.ndarray | None = None  # f64[N,S] of the initial policy
    baseline: np.ndarray | None = None  # f64[N] what was known of the prompt, from 0 to 1
    ancestors: np.ndarray | None = None  # i[N,A] column d: rows with one number share d segments
    kind: np.ndarray | None = None  # i[N] of types.Kind; None: all plain
    sampled: np.ndarray | None = None  # f64[N,S] of the sampler; NaN: it saw another context
    correction: tuple[str, float] | None = None  # level and cap of the importance weights

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
    """Minus `objective(row, column)` on every token of the loss, times its importance."""
    weight = importance(rows)
    return [
        {t: -weight[i][t] * objective(i, t) for t in rows.trained(i)} for i in range(rows.number)
    ]


def importance(rows: Rows) -> list[dict[int, float]]:
    """min(π_old / μ, cap) of a token or of the whole row; 1 where μ is not known."""
    level, cap = rows.correction or ("none", 1.0)
    weights = []
    for i in range(rows.number):
        ratios = {t: 1.0 for t in rows.tokens(i)}
        for t in ratios:
            if level != "none" and not math.isnan(rows.sampled[i, t]):
                ratios[t] = math.exp(rows.old[i, t]) / math.exp(rows.sampled[i, t])
        if level == "sequence":
            ratios = dict.fromkeys(ratios, math.prod(ratios.values()))
        capped = {t: min(ratio, cap) for t, ratio in ratios.items()}
        weights.append(ratios if level == "none" else capped)
    return weights


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


def grpo_entropy(rows: Rows, low=0.2, high=0.2, coefficient=1e-3) -> float:
    """GRPO's loss minus the coefficient times the mean entropy."""
    if coefficient == 0:  # the toy has no entropies
        return grpo(rows, low, high)
    bonus = [{t: rows.entropy[i, t] for t in rows.trained(i)} for i in range(rows.number)]
    return grpo(rows, low, high) - coefficient * sequence_mean(bonus, rows.group)


def tepo(
    rows: Rows,
    low=3e-4,
    high=4e-4,
    beta=1.0,
    entropy_drop="old",
    entropy_band=1e-4,
    by_sequence=True,
    masked=True,
    token_level=True,
    token_low=0.2,
    token_high=0.28,
) -> float:
    """2510.09369: `min(s A, clip(s) A) - beta M k3` on every token."""
    advantage = group_z(rows.reward, rows.group)
    level, ratio, still = sequence_ratio(rows), token_ratio(rows), rows.frozen()

    def falls(i, t):
        if entropy_drop == "old":
            return rows.entropy[i, t] - rows.old_entropy[i, t] < -entropy_band
        if entropy_drop == "ref":
            return rows.entropy[i, t] - rows.reference_entropy[i, t] < -entropy_band
        return -still[i, t] < rows.entropy[i, t]

    def objective(i, t):
        if by_sequence:
            value = ppo(level[i], advantage[i], low, high)
        else:
            value = ppo(ratio[i][t], advantage[i], token_low, token_high)
        if beta and (not masked or (advantage[i] > 0 and falls(i, t))):
            other = rows.reference if entropy_drop == "ref" else rows.old
            value -= beta * k3(other[i, t] - rows.now[i, t])
        return value

    losses = _losses(rows, objective)
    return token_mean(losses, rows.group) if token_level else sequence_mean(losses, rows.group)


def response_weights(
    rows: Rows, cap=5.0, mean_weights=False, positive_only=False
) -> dict[int, float]:
    """ReCo's `w_i` of every row of the loss: `min(1 / (G π̄), cap / G)`."""
    advantage = group_z(rows.reward, rows.group)
    present = [i for i in range(rows.number) if rows.trained(i)]
    group = {i: [j for j in present if rows.group[j] == rows.group[i]] for i in present}
    weights = {}
    for i in present:
        tokens = rows.trained(i)
        likely = math.exp(sum(rows.old[i, t] for t in tokens) / len(tokens))
        weights[i] = min(1 / (len(group[i]) * likely), cap / len(group[i]))
        if positive_only and advantage[i] <= 0:
            weights[i] = 1 / len(group[i])
    if mean_weights:
        return {i: weights[i] / sum(weights[j] for j in group[i]) for i in present}
    return weights


def variance(logp: float) -> float:
    """`p (1 - p)` with p kept 1e-5 away from 0 and 1."""
    p = min(max(math.exp(min(logp, 0.0)), 1e-5), 1 - 1e-5)
    return p * (1 - p)


def reco(
    rows: Rows,
    low=0.2,
    high=0.2,
    clip_mode="clamp_ratio_mask",
    cap=5.0,
    response=True,
    token=True,
    mean_weights=False,
    positive_only=False,
    absolute=False,
    token_level=False,
    beta=0.0,
) -> float:
    """2607.26862: the gradient is `w_i v_it A_i ∇ log π`, v the ratio of variances."""
    advantage, still = group_z(rows.reward, rows.group), rows.frozen()

    def kept(ratio, i):
        above, below = advantage[i] > 0 and ratio > 1 + high, advantage[i] < 0 and ratio < 1 - low
        return 0.0 if above or below else 1.0

    def objective(i, t):
        if not token:
            value = ppo(math.exp(rows.now[i, t] - rows.old[i, t]), advantage[i], low, high)
        else:
            true = math.exp(still[i, t] - rows.old[i, t])
            own = variance(still[i, t]) / variance(rows.old[i, t])
            bounded = min(max(own, 1 - low), 1 + high)
            if absolute:
                bounded = 4 * variance(still[i, t])
            if clip_mode == "clamp_ratio_mask":
                scale = bounded * kept(true, i)
            elif clip_mode == "ppo_on_rvar":
                scale = min(own, 10.0) * kept(own, i)
            else:
                scale = bounded
            value = scale * advantage[i] * rows.now[i, t]
        if beta:
            value -= beta * k3(rows.reference[i, t] - rows.now[i, t])
        return value

    losses = _losses(rows, objective)
    if not response:
        return token_mean(losses, rows.group) if token_level else sequence_mean(losses, rows.group)
    weights = response_weights(rows, cap, mean_weights, positive_only)
    total = 0.0
    for i in weights:
        size = len([j for j in weights if rows.group[j] == rows.group[i]])
        if token_level:
            count = sum(len(row) for row in losses)
            total += size * weights[i] * sum(losses[i].values()) / count
        else:
            prompts = len({int(rows.group[j]) for j in weights})
            total += weights[i] * sum(losses[i].values()) / len(losses[i]) / prompts
    return total


def batch_accuracy(rows: Rows) -> float:
    """Share of correct rows among those that could be graded."""
    graded = [i for i in range(rows.number) if math.isfinite(rows.reward[i])]
    return sum(bool(rows.correct[i]) for i in graded) / len(graded)


def expo(rows: Rows, low=0.2, high=0.2, beta=0.02, beta_rule="accuracy", tokens=True) -> float:
    """2605.11403: clipped surrogate minus `beta_eff` k3, over all tokens; population std."""
    advantage, ratio = group_z(rows.reward, rows.group, ddof=0), token_ratio(rows)
    factor = {"akl_matched_const": 0.7, "constant": 1.0}.get(beta_rule)
    if factor is None:
        factor = (math.tanh(batch_accuracy(rows)) + 1) / 2

    def objective(i, t):
        value = ppo(ratio[i][t], advantage[i], low, high)
        return value - beta * factor * k3(rows.reference[i, t] - rows.now[i, t]) if beta else value

    return (token_mean if tokens else sequence_mean)(_losses(rows, objective), rows.group)


UPSTREAM = 3  # the kind of a row that is the beginning of answers


def skpo_advantage(rows: Rows) -> list[float]:
    """2604.08690: beginnings against the tracker, whitened over the batch; the rest in groups."""
    upstream = [i for i in range(rows.number) if rows.kind is not None and rows.kind[i] == UPSTREAM]
    advantage = [0.0] * rows.number
    gap = {i: float(rows.reward[i]) - (2 * float(rows.baseline[i]) - 1) for i in upstream}
    if gap and max(gap.values()) != min(gap.values()):
        mean = sum(gap.values()) / len(gap)
        std = math.sqrt(sum((value - mean) ** 2 for value in gap.values()) / len(gap))
        for i in upstream:
            advantage[i] = (gap[i] - mean) / (std + 1e-8)
    rest = [i for i in range(rows.number) if i not in upstream]
    for i, value in zip(
        rest, group_z([rows.reward[i] for i in rest], [rows.group[i] for i in rest]), strict=True
    ):
        advantage[i] = value
    return advantage


def skpo(rows: Rows, share=0.5, low=0.2, high=0.2, floor=0.8, cap=1.28) -> float:
    """2604.08690, Eq. 4 to 6: PPO on beginnings, each a mean; CISPO's form over answers' tokens."""
    advantage, still = skpo_advantage(rows), rows.frozen()
    beginnings, tokens = [], []
    for i in range(rows.number):
        values = []
        for t in rows.trained(i):
            if rows.kind is not None and rows.kind[i] == UPSTREAM:
                ratio = math.exp(rows.now[i, t] - rows.old[i, t])
                values.append(-ppo(ratio, advantage[i], low, high))
            else:
                ratio = min(max(math.exp(still[i, t] - rows.old[i, t]), floor), cap)
                tokens.append(-ratio * advantage[i] * rows.now[i, t])
        beginnings += [sum(values) / len(values)] if values else []
    upstream = sum(beginnings) / len(beginnings) if beginnings else 0.0
    downstream = sum(tokens) / len(tokens) if tokens else 0.0
    return share * upstream + (1 - share) * downstream


REFINED = 2  # the kind of a row that answers again, after a critique of an earlier answer


def critique_grpo(rows: Rows, limit: int, low=0.2, high=0.2, gamma=0.1) -> float:
    """2506.03106: one mean baseline; `p / (p + gamma)` for the ratio where a row is a refinement.

    Token sums over the constant, then the mean over prompts.
    """
    advantage = group_mean(rows.reward, rows.group)
    prompts: dict[int, float] = {}
    for i in range(rows.number):
        for t in rows.trained(i):
            if rows.kind is not None and rows.kind[i] == REFINED:
                p = math.exp(rows.now[i, t])
                value = p / (p + gamma) * advantage[i]
            else:
                ratio = math.exp(rows.now[i, t] - rows.old[i, t])
                value = ppo(ratio, advantage[i], low, high)
            prompt = int(rows.group[i])
            prompts[prompt] = prompts.get(prompt, 0.0) - value / limit
    return sum(prompts.values()) / len(prompts) if prompts else 0.0


def spo_advantage(rows: Rows) -> list[float]:
    """2509.13232: reward minus tracker, whitened over all rows that could be graded."""
    graded = [i for i in range(rows.number) if math.isfinite(rows.reward[i])]
    gap = {i: float(rows.reward[i]) - float(rows.baseline[i]) for i in graded}
    advantage = [0.0] * rows.number
    if len(gap) > 1 and max(gap.values()) > min(gap.values()):
        mean = sum(gap.values()) / len(gap)
        variance = sum((value - mean) ** 2 for value in gap.values()) / (len(gap) - 1)
        for i in graded:
            advantage[i] = (gap[i] - mean) / (math.sqrt(variance) + 1e-8)
    return advantage


def spo(rows: Rows, low=0.2, high=0.28) -> float:
    advantage, ratio = spo_advantage(rows), token_ratio(rows)
    losses = _losses(rows, lambda i, t: ppo(ratio[i][t], advantage[i], low, high))
    return token_mean(losses, rows.group)


def treepo_advantage(rows: Rows, subgroups=True, depth_average="plain", whiten=True) -> list[float]:
    """2508.17445: the mean over depths of `R - mean` among leaves of one beginning, whitened."""
    graded = [i for i in range(rows.number) if math.isfinite(rows.reward[i])]
    advantage = [0.0] * rows.number
    for i in graded:
        total, weights = 0.0, 0.0
        for depth in range(rows.ancestors.shape[1] if subgroups else 1):
            same = rows.group if depth == 0 else rows.ancestors[:, depth]
            members = [j for j in graded if same[j] == same[i]]
            if depth > 0 and len(members) < 2:
                continue
            rewards = [float(rows.reward[j]) for j in members]
            equal = max(rewards) == min(rewards)
            gap = 0.0 if equal else float(rows.reward[i]) - sum(rewards) / len(rewards)
            weight = len(members) if depth_average == "size" else 1
            total, weights = total + weight * gap, weights + weight
        advantage[i] = total / weights
    if not whiten:
        return advantage
    tokens = [advantage[i] for i in graded for _ in rows.tokens(i)]
    white = [0.0] * rows.number
    if tokens and max(tokens) > min(tokens):
        mean = sum(tokens) / len(tokens)
        variance = sum((value - mean) ** 2 for value in tokens) / (len(tokens) - 1)
        for i in graded:
            white[i] = (advantage[i] - mean) / (math.sqrt(variance) + 1e-8)
    return white


def treepo(
    rows: Rows, low=0.2, high=0.28, subgroups=True, depth_average="plain", whiten=True
) -> float:
    advantage, ratio = treepo_advantage(rows, subgroups, depth_average, whiten), token_ratio(rows)
    losses = _losses(rows, lambda i, t: ppo(ratio[i][t], advantage[i], low, high))
    return token_mean(losses, rows.group)


LOSSES = {
    "critique_grpo": critique_grpo,
    "spo": spo,
    "skpo": skpo,
    "grpo": grpo,
    "drgrpo": drgrpo,
    "rloo": rloo,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "cispo": cispo_loss,
    "dapo": dapo,
    "xrpo": xrpo,
    "xrpo_token": xrpo_token,
    "grpo_entropy": grpo_entropy,
    "tepo": tepo,
    "reco": reco,
    "expo": expo,
    "treepo": treepo,
}


def entropy_gradient(loss, rows: Rows, step: float = 1e-6) -> np.ndarray:
    """Central differences of `loss(Rows)` by the current entropy at every token: f64[N,S]."""
    out = np.zeros_like(rows.entropy)
    for i in range(rows.number):
        for t in rows.tokens(i):
            ends = []
            for sign in (1, -1):
                moved = rows.entropy.copy()
                moved[i, t] += sign * step
                ends.append(loss(dataclasses.replace(rows, entropy=moved)))
            out[i, t] = (ends[0] - ends[1]) / (2 * step)
    return out


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


# --- drawing a token ----------------------------------------------------------------------------


def token_chances(logits, temperature: float, top_k: int, top_p: float) -> list[float]:
    """Probabilities of one row's tokens by a sort: temperature, then top-k, then top-p.

    Top-k keeps the k likeliest, top-p the likeliest until their mass reaches p, each with all that
    ties with the last one kept; what is left is made to sum to 1 after each.
    """
    logits = [float(logit) for logit in logits]
    most = max(logits)
    chances = [math.exp((logit - most) / temperature) for logit in logits]
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    kept = order
    if 0 < top_k < len(logits):
        last = logits[order[top_k - 1]]
        kept = [token for token in order if logits[token] >= last]
    total = math.fsum(chances[token] for token in kept)
    if top_p < 1:
        mass, last = 0.0, most
        for token in kept:
            if mass >= top_p:
                break
            mass, last = mass + chances[token] / total, logits[token]
        kept = [token for token in kept if logits[token] >= last]
        total = math.fsum(chances[token] for token in kept)
    found = [0.0] * len(logits)
    for token in kept:
        found[token] = chances[token] / total
    return found


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


def entropy_of(logits) -> float:
    """The entropy of a softmax of logits."""
    total = math.log(sum(math.exp(x) for x in logits))
    return -sum(math.exp(x - total) * (x - total) for x in logits)


def entropy_by_logits(logits) -> np.ndarray:
    """`∂H/∂z = -p (log p + H)`."""
    total = math.log(sum(math.exp(x) for x in logits))
    entropy = entropy_of(logits)
    return np.array([-math.exp(x - total) * (x - total + entropy) for x in logits])


def logits_gradient(logits, tokens, by_logp, by_entropy=None) -> np.ndarray:
    """The gradient by logits [N,S,V] of a loss with given gradients by log-probs and entropies."""
    out = np.zeros(logits.shape)
    for i, t in zip(*np.nonzero(by_logp), strict=True):
        weights = np.exp(logits[i, t])
        out[i, t] -= by_logp[i, t] * weights / weights.sum()
        out[i, t, tokens[i, t]] += by_logp[i, t]
    for i, t in [] if by_entropy is None else zip(*np.nonzero(by_entropy), strict=True):
        out[i, t] += by_entropy[i, t] * entropy_by_logits(logits[i, t])
    return out


def bigram_entropy(table: np.ndarray, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Entropies f64[N,S] of the bigram policy where it drew each token."""
    out = np.zeros(tokens.shape)
    for i in range(tokens.shape[0]):
        for t in range(1, tokens.shape[1]):
            if mask[i, t] > 0:
                out[i, t] = entropy_of(table[tokens[i, t - 1]].astype(np.float64))
    return out


def bigram_entropy_gradient(
    table: np.ndarray, tokens: np.ndarray, by_entropy: np.ndarray
) -> np.ndarray:
    """The gradient by `table` of a loss whose gradient by the entropies is `by_entropy` [N,S]."""
    out = np.zeros(table.shape)
    for i in range(tokens.shape[0]):
        for t in range(1, tokens.shape[1]):
            if by_entropy[i, t]:
                before = tokens[i, t - 1]
                out[before] += by_entropy[i, t] * entropy_by_logits(table[before])
    return out


# --- data ---------------------------------------------------------------------------------------


def tiny_softmax(seed: int = 0) -> tuple[np.ndarray, np.ndarray, Rows]:
    """Logits [5,3,5] of a policy with some for every token, the tokens [5,3] and their Rows."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(0, 5, (5, 3))
    mask = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0]])
    logits = generator.standard_normal((5, 3, 5))
    found = []
    for moved in (0.0, 0.4, 0.6):
        policy = logits + moved * generator.standard_normal(logits.shape)
        logp, entropy = np.zeros(mask.shape), np.zeros(mask.shape)
        for i, t in zip(*np.nonzero(mask), strict=True):
            total = math.log(sum(math.exp(x) for x in policy[i, t]))
            logp[i, t], entropy[i, t] = policy[i, t, tokens[i, t]] - total, entropy_of(policy[i, t])
        found.append((logp, entropy))
    rows = Rows(
        now=found[0][0],
        old=found[1][0],
        reference=found[2][0],
        entropy=found[0][1],
        old_entropy=found[1][1],
        reference_entropy=found[2][1],
        mask=mask,
        reward=np.array([1.0, 0.0, 0.0, 1.0, 0.0]),
        correct=np.array([1, 0, 0, 1, 0]) > 0,
        group=np.array([0, 0, 0, 1, 1]),
    )
    return logits, tokens, rows


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
    of one, one is mixed. The policy has moved far enough for some tokens to be clipped. Rows are of
    several kinds, and branched from one another after one segment or two.
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
        entropy=generator.gamma(2.0, 0.5, mask.shape) * mask,
        old_entropy=generator.gamma(2.0, 0.5, mask.shape) * mask,
        reference_entropy=generator.gamma(2.0, 0.5, mask.shape) * mask,
        baseline=np.array([0.3, 0.9, 0.5, 0.6])[group],
        ancestors=np.array(
            [
                group,
                [0, 0, 0, 1, 1, 2, 2, 3, 4, 5, 5, 5, 6],
                [0, 0, 1, 2, 2, 3, 4, 5, 6, 7, 7, 8, 9],
            ]
        ).T,
        kind=np.array([0, 0, 0, 2, 3, 0, 0, 4, 0, 3, 0, 4, 2]),
    )
