"""Reference loops of all advantage estimators in plain Python; masked tokens are not compared."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

from rlctl.runtime.algorithms.advantages.base import AdvantageConfig, AdvantageInputs

Table = list[list[float]]

# The settings with which the estimators are compared with the loops.
GDPO_WEIGHTS = {"correct": 2.0, "format": 0.5}
SETTINGS = {
    "gdpo": {
        "reward_keys": list(GDPO_WEIGHTS),
        "reward_weights": list(GDPO_WEIGHTS.values()),
    },
    "grpo_turns": {"turn_discount": 0.9},
    "vapo": {"alpha": 0.4, "critic_lambda": 0.95},
}


def _groups(rows: AdvantageInputs) -> list[list[int]]:
    ids = rows.group.tolist()
    return [[i for i, g in enumerate(ids) if g == group] for group in sorted(set(ids))]


def _spread(rows: AdvantageInputs, by_row: dict[int, float]) -> Table:
    return [[by_row[i] * m for m in mask] for i, mask in enumerate(rows.mask.tolist())]


def _whiten(rows: AdvantageInputs, table: Table, remask: bool) -> Table:
    mask = rows.mask.tolist()
    kept = [
        x
        for line, m in zip(table, mask, strict=True)
        for x, keep in zip(line, m, strict=True)
        if keep
    ]
    mean, scale = statistics.mean(kept), math.sqrt(statistics.variance(kept) + 1e-8)
    return [
        [(x - mean) / scale * (keep if remask else 1) for x, keep in zip(line, m, strict=True)]
        for line, m in zip(table, mask, strict=True)
    ]


def _grpo_rows(rows: AdvantageInputs, scores: list[float], by_std: bool) -> dict[int, float]:
    out = {}
    for members in _groups(rows):
        values = [scores[i] for i in members]
        mean, std = (
            (statistics.mean(values), statistics.stdev(values)) if len(values) > 1 else (0.0, 1.0)
        )
        out |= {i: (scores[i] - mean) / (std + 1e-6 if by_std else 1.0) for i in members}
    return out


def _loop_gae(rows: AdvantageInputs, config: AdvantageConfig) -> Table:
    return _whiten(rows, gae_sums(rows, config.gamma, lambda _: config.lam), remask=True)


def _loop_vapo(rows: AdvantageInputs, config: AdvantageConfig) -> Table:
    alpha = SETTINGS["vapo"]["alpha"]
    table = gae_sums(rows, config.gamma, lambda length: max(0.0, 1 - 1 / (alpha * length)))
    return _whiten(rows, table, remask=True)


def gae_sums(rows: AdvantageInputs, gamma: float, lam: Callable[[int], float]) -> Table:
    """Return Σ_l (γλ)^l δ_{t+l} over the tokens that the policy wrote; λ by their number."""
    table = [[0.0] * rows.mask.shape[1] for _ in range(len(rows.mask))]
    for i, (r, v, m) in enumerate(
        zip(rows.rewards.tolist(), rows.given("values").tolist(), rows.mask.tolist(), strict=True)
    ):
        steps = [t for t, keep in enumerate(m) if keep]
        deltas = [
            r[t] + (gamma * v[steps[k + 1]] if k + 1 < len(steps) else 0.0) - v[t]
            for k, t in enumerate(steps)
        ]
        for k, t in enumerate(steps):
            table[i][t] = sum(
                (gamma * lam(len(steps))) ** (j - k) * deltas[j] for j in range(k, len(steps))
            )
    return table


def _loop_grpo(rows: AdvantageInputs, config: AdvantageConfig) -> Table:
    return _spread(rows, _grpo_rows(rows, rows.scores.tolist(), config.norm_by_std))


def _loop_maxrl(rows: AdvantageInputs, config: AdvantageConfig) -> Table:
    s, out = rows.scores.tolist(), {}
    for members in _groups(rows):
        mean = statistics.mean(s[i] for i in members) if len(members) > 1 else 0.0
        out |= {i: (s[i] - mean) / (mean + 1e-6 if mean > 0 else 1.0) for i in members}
    return _spread(rows, out)


def _loop_rloo(rows: AdvantageInputs, config: AdvantageConfig) -> Table:
    s, out = rows.scores.tolist(), {}
    for members in _groups(rows):
        for i in members:
            others = [s[j] for j in members if j != i]
            out[i] = s[i] - (statistics.mean(others) if others else 0.0)
    return _spread(rows, out)


def _loop_rf_baseline(rows: AdvantageInputs, config: AdvantageConfig) -> Table:
    return _whiten(
        rows, _spread(rows, _grpo_rows(rows, rows.scores.tolist(), by_std=False)), remask=True
    )


def _loop_rf(rows: AdvantageInputs, config: AdvantageConfig) -> Table:
    table = [[0.0] * rows.mask.shape[1] for _ in range(len(rows.mask))]
    for i, (r, m) in enumerate(zip(rows.rewards.tolist(), rows.mask.tolist(), strict=True)):
        steps = [t for t, keep in enumerate(m) if keep]
        for k, t in enumerate(steps):
            table[i][t] = sum(config.gamma ** (j - k) * r[steps[j]] for j in range(k, len(steps)))
    return _whiten(rows, table, remask=True)


def _loop_remax(rows: AdvantageInputs, config: AdvantageConfig) -> Table:
    greedy = rows.given("greedy_scores").tolist()
    tables = zip(rows.rewards.tolist(), rows.mask.tolist(), greedy, strict=True)
    return [
        [sum(x * k for x, k in zip(r[t:], m[t:], strict=True)) - g * m[t] for t in range(len(r))]
        for r, m, g in tables
    ]


def _loop_opo(rows: AdvantageInputs, config: AdvantageConfig) -> Table:
    s, n, out = rows.scores.tolist(), rows.mask.sum(-1).tolist(), {}
    for members in _groups(rows):
        baseline = (
            sum(n[i] * s[i] for i in members) / sum(n[i] for i in members)
            if len(members) > 1
            else 0.0
        )
        out |= {i: s[i] - baseline for i in members}
    return _spread(rows, out)


def _loop_gpg(rows: AdvantageInputs, config: AdvantageConfig) -> Table:
    s = rows.scores.tolist()
    alpha = len(s) / max(1, sum(x != 0 for x in s))
    return _spread(rows, {i: alpha * a for i, a in _grpo_rows(rows, s, by_std=False).items()})


def _loop_passk(rows: AdvantageInputs, config: AdvantageConfig) -> Table:
    s, out = rows.scores.tolist(), {}
    for members in _groups(rows):
        best, second = sorted(members, key=lambda i: -s[i])[:2]
        std = statistics.stdev([s[i] for i in members]) + 1e-6 if config.norm_by_std else 1.0
        out |= dict.fromkeys(members, 0.0) | {best: (s[best] - s[second]) / std}
    return _spread(rows, out)


def _loop_gdpo(rows: AdvantageInputs, config: AdvantageConfig) -> Table:
    parts = {
        name: _grpo_rows(rows, scores.tolist(), config.norm_by_std)
        for name, scores in rows.components.items()
    }
    total = {
        i: sum(GDPO_WEIGHTS[name] * part[i] for name, part in parts.items())
        for i in range(len(rows.mask))
    }
    return _whiten(rows, _spread(rows, total), remask=True)


def _loop_otb(rows: AdvantageInputs, config: AdvantageConfig) -> Table:
    r, m = rows.rewards.tolist(), rows.mask.tolist()
    lp, sq = rows.given("log_probs").tolist(), rows.given("sum_pi_squared").tolist()
    width = len(r[0])
    to_go = [
        [sum(x * k for x, k in zip(r[i][t:], m[i][t:], strict=True)) for t in range(width)]
        for i in range(len(r))
    ]
    energy = [
        [
            sum((1 - 2 * math.exp(lp[i][j]) + sq[i][j]) * m[i][j] for j in range(t + 1))
            for t in range(width)
        ]
        for i in range(len(r))
    ]
    table = [[0.0] * width for _ in r]
    for members in _groups(rows):
        for t in range(width):
            reaching = [i for i in members if m[i][t]]
            baseline = 0.0
            if len(reaching) > 1:
                baseline = sum(to_go[i][t] * energy[i][t] for i in reaching) / (
                    sum(energy[i][t] for i in reaching) + 1e-8
                )
            for i in reaching:
                table[i][t] = to_go[i][t] - baseline
    return table


def _loop_tir(rows: AdvantageInputs, config: AdvantageConfig) -> Table:
    """Compare the k-th tokens that the policy wrote, in lists without those of tools."""
    r, lp = rows.rewards.tolist(), rows.given("log_probs").tolist()
    sq = rows.given("sum_pi_squared").tolist()
    written = [[t for t, m in enumerate(line) if m] for line in rows.mask.tolist()]
    table = [[0.0] * len(line) for line in r]
    for members in _groups(rows):
        for k in range(max(len(written[i]) for i in members)):
            reaching = [i for i in members if k < len(written[i])]
            to_go, energy = {}, {}
            for i in reaching:
                to_go[i] = sum(r[i][t] for t in written[i][k:])
                energy[i] = sum(1 - 2 * math.exp(lp[i][t]) + sq[i][t] for t in written[i][: k + 1])
            baseline = 0.0
            if len(reaching) > 1:
                weighted = sum(to_go[i] * energy[i] for i in reaching)
                baseline = weighted / (sum(energy.values()) + 1e-8)
            for i in reaching:
                table[i][written[i][k]] = to_go[i] - baseline
    return table


def _loop_turns(rows: AdvantageInputs, config: AdvantageConfig) -> Table:
    assert rows.turn is not None
    turns, mask, rewards = rows.turn.tolist(), rows.mask.tolist(), rows.rewards.tolist()
    discount = SETTINGS["grpo_turns"]["turn_discount"]

    def value(i: int, first: int) -> float:
        """Return the discounted return of row i from turn `first`."""
        return sum(
            discount ** (turn - first) * reward
            for turn, reward in zip(turns[i], rewards[i], strict=True)
            if turn >= first
        )

    table = [[0.0] * len(line) for line in mask]
    for group in _groups(rows):
        written = {(i, turn) for i in group for turn, m in zip(turns[i], mask[i], strict=True) if m}
        found = {each: value(*each) for each in written}
        alone = len(found) == 1
        mean = 0.0 if alone else statistics.mean(found.values())
        scale = 1.0 if alone else statistics.stdev(found.values())
        for i in group:
            for t, (turn, m) in enumerate(zip(turns[i], mask[i], strict=True)):
                if m:
                    raw = found[i, turn] - mean
                    table[i][t] = raw / (scale + 1e-6) if config.norm_by_std else raw
    return table


LOOPS: dict[str, Callable[[AdvantageInputs, AdvantageConfig], Table]] = {
    "gae": _loop_gae,
    "vapo": _loop_vapo,
    "maxrl": _loop_maxrl,
    "grpo": _loop_grpo,
    "rloo": _loop_rloo,
    "reinforce_plus_plus": _loop_rf,
    "reinforce_plus_plus_baseline": _loop_rf_baseline,
    "remax": _loop_remax,
    "opo": _loop_opo,
    "gpg": _loop_gpg,
    "grpo_passk": _loop_passk,
    "gdpo": _loop_gdpo,
    "optimal_token_baseline": _loop_otb,
    "tir_optimal_token_baseline": _loop_tir,
    "grpo_turns": _loop_turns,
}
