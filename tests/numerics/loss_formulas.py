"""Reference formulas of all policy losses in plain Python.

Each returns the value, and the gradient by the token's log-prob, of each unmasked token.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from rlctl.runtime.algorithms.policy_losses.base import ClipRange, PolicyTokens

CLIP = ClipRange(low=0.2, high=0.3, c=2.0)
COV_LOW, COV_HIGH, KL_COEF, BETA = 0.1, 2.0, 0.3, 0.4
# The settings with which the losses are compared with the formulas.
SETTINGS: dict[str, dict[str, float]] = {
    "clip_cov": {"clip_cov_ratio": 1.0, "clip_cov_lb": COV_LOW, "clip_cov_ub": COV_HIGH},
    "kl_cov": {"kl_cov_ratio": 1.0, "ppo_kl_coef": KL_COEF},
    "dro": {"beta": BETA},
}
Pairs = dict[int, tuple[float, float]]


class Plain:
    """The unmasked tokens of a batch as Python numbers."""

    def __init__(self, tokens: PolicyTokens) -> None:
        self.kept = [t for t, m in enumerate(tokens.mask.tolist()) if m]
        self.lp, self.old, self.adv = (
            tokens.log_probs.tolist(),
            tokens.old_log_probs.tolist(),
            tokens.advantages.tolist(),
        )
        self.row = tokens.row.tolist()
        self.d = {t: min(max(self.lp[t] - self.old[t], -20.0), 20.0) for t in self.kept}

    def row_mean(self, values: dict[int, float], t: int) -> float:
        mates = [values[u] for u in self.kept if self.row[u] == self.row[t]]
        return sum(mates) / len(mates)

    def covariance(self) -> dict[int, float]:
        mean_a, mean_l = (
            sum(x[t] for t in self.kept) / len(self.kept) for x in (self.adv, self.lp)
        )
        return {t: (self.adv[t] - mean_a) * (self.lp[t] - mean_l) for t in self.kept}


def _ppo(adv: float, ratio: float) -> tuple[float, float]:
    free, held = -adv * ratio, -adv * min(max(ratio, 1 - CLIP.low), 1 + CLIP.high)
    return (held, 0.0) if held > free else (free, free)  # d ratio / d lp = ratio


def _vanilla(x: Plain) -> Pairs:
    out = {}
    for t in x.kept:
        value, slope = _ppo(x.adv[t], math.exp(x.d[t]))
        ceiling = -x.adv[t] * CLIP.c
        out[t] = (ceiling, 0.0) if x.adv[t] < 0 and value > ceiling else (value, slope)
    return out


def _gspo(x: Plain) -> Pairs:
    return {t: _ppo(x.adv[t], math.exp(min(x.row_mean(x.d, t), 10.0))) for t in x.kept}


def _cispo(x: Plain) -> Pairs:
    weight = {t: min(max(math.exp(x.d[t]), 1 - CLIP.low), 1 + CLIP.high) for t in x.kept}
    return {t: (-weight[t] * x.adv[t] * x.lp[t], -weight[t] * x.adv[t]) for t in x.kept}


def _sapo(x: Plain) -> Pairs:
    out = {}
    for t in x.kept:
        tau, ratio = (1.0 if x.adv[t] > 0 else 1.05), math.exp(x.d[t])
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        out[t] = (-x.adv[t] * 4 / tau * gate, -x.adv[t] * 4 * gate * (1 - gate) * ratio)
    return out


def _gpg(x: Plain) -> Pairs:
    return {t: (-x.adv[t] * x.lp[t], -x.adv[t]) for t in x.kept}


def _geo_mean(x: Plain) -> Pairs:
    """Return the row's loss on each token.

    The gradient of the sum over tokens is the row's length times the gradient of the row's loss.
    """
    pessimistic, slope = {}, {}
    for t in x.kept:
        held = min(max(x.d[t], -CLIP.low), CLIP.high)
        value = min(x.d[t], held) if x.adv[t] > 0 else max(x.d[t], held) if x.adv[t] < 0 else 0.0
        pessimistic[t], slope[t] = value, float(value == x.d[t])
    out = {}
    for t in x.kept:
        loss = -x.row_mean({u: x.adv[u] for u in x.kept}, t) * math.exp(x.row_mean(pessimistic, t))
        out[t] = (loss, loss * slope[t])
    return out


def _dro(x: Plain) -> Pairs:
    return {
        t: (
            -(x.adv[t] * x.lp[t] - BETA / 2 * x.d[t] ** 2),
            -(x.adv[t] - BETA * x.d[t]),
        )
        for t in x.kept
    }


def _clip_cov(x: Plain) -> Pairs:
    """Return the loss for a share of 1, so that every eligible token is drawn."""
    covariance, out = x.covariance(), {}
    for t in x.kept:
        value, slope = _ppo(x.adv[t], math.exp(x.d[t]))
        is_clipped = slope == 0.0 and x.adv[t] != 0
        drawn = not is_clipped and COV_LOW < covariance[t] < COV_HIGH
        out[t] = (0.0, 0.0) if drawn else (value, slope)
    return out


def _kl_cov(x: Plain) -> Pairs:
    """Return the loss for a share of 1, so that every token has the penalty."""
    return {
        t: (
            -x.adv[t] * math.exp(x.d[t]) + KL_COEF * abs(x.d[t]),
            -x.adv[t] * math.exp(x.d[t]) + KL_COEF * math.copysign(1, x.d[t]),
        )
        for t in x.kept
    }


def _dppo(x: Plain, keeps: Callable[[float, float, float], bool]) -> Pairs:
    out = {}
    for t in x.kept:
        slope = (
            -x.adv[t]
            * min(math.exp(x.d[t]), CLIP.c)
            * keeps(x.adv[t], math.exp(x.lp[t]), math.exp(x.old[t]))
        )
        out[t] = (slope * x.lp[t], slope)
    return out


def _dppo_tv(x: Plain) -> Pairs:
    return _dppo(x, lambda adv, p, q: p - q <= CLIP.high if adv > 0 else q - p <= CLIP.low)


def _dppo_kl(x: Plain) -> Pairs:
    def keeps(adv: float, p: float, q: float) -> bool:
        if (adv > 0 and p <= q) or (adv <= 0 and p >= q):
            return True
        kl = q * math.log(q / p) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8))
        return kl <= (CLIP.high if adv > 0 else CLIP.low)

    return _dppo(x, keeps)


FORMULAS: dict[str, Callable[[Plain], Pairs]] = {
    "vanilla": _vanilla,
    "gspo": _gspo,
    "cispo": _cispo,
    "sapo": _sapo,
    "gpg": _gpg,
    "geo_mean": _geo_mean,
    "dro": _dro,
    "clip_cov": _clip_cov,
    "kl_cov": _kl_cov,
    "dppo_tv": _dppo_tv,
    "dppo_kl": _dppo_kl,
}
