"""Importance weights π_train/π_rollout of rollout correction, their bounds and metrics.

Metrics of the mismatch between rollout engine and trainer have verl's names and definitions. They
are computed for the complete global batch, on the controller.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from rlctl.errors import ConfigError
from rlctl.runtime.algorithms.policy_losses.base import MAX_LOG_RATIO
from rlctl.runtime.batch import Rollouts
from rlctl.runtime.ops import EPS, row_mean, row_sum
from rlctl.tracking.metrics import EffectiveSampleSize, Max, Mean, Metrics, Min, Std

_KEY = "algorithm.rollout_correction"
Level = Literal["token", "sequence"]


@dataclass(frozen=True)
class Bounds:
    """Bounds 0 < low < high; `low` is None if there is only an upper bound."""

    low: float | None
    high: float

    @classmethod
    def parse(cls, given: str | float, key: str) -> Bounds:
        """Parse `2.0` or `"0.5_2.0"`. Raises ConfigError for anything else."""
        try:
            *low, high = [float(part) for part in str(given).split("_")]
        except ValueError:
            low, high = [], 0.0
        if len(low) > 1 or not 0 < (low[0] if low else high / 2) < high:
            raise ConfigError(
                f"{key}={given!r} is no bound",
                where=_KEY,
                hint='give one positive number, or two as in "0.5_2.0"',
            )
        return cls(low[0] if low else None, high)

    def around_one(self, key: str) -> Bounds:
        """Return these bounds. Raises ConfigError if they exclude 1, the ratio without mismatch.

        The usual cause is YAML, which reads 0.5_2 as the number 0.52.
        """
        if not (self.low or 0.0) <= 1 <= self.high:
            low = "" if self.low is None else f"{self.low:g}_"
            hint = (
                'write two bounds with a point in each, as in "0.5_2.0": YAML reads 0.5_2 as 0.52'
            )
            raise ConfigError(
                f"{key}={low}{self.high:g} leaves out a ratio of 1", where=_KEY, hint=hint
            )
        return self


@torch.no_grad()
def importance_weights(
    tokens: SampledTokens, level: Level, bounds: Bounds, batch_normalize: bool = False
) -> tuple[Tensor, Metrics]:
    """Return weights w = π_train/π_rollout of unmasked tokens, 0 elsewhere: (T,), without a graph.

    At level "sequence", w is the product over the row. With an upper bound only: min(w, high), TIS.
    With two bounds: 0 where w is outside, IcePop. The log-ratio is clamped to ±20 first. With
    `batch_normalize` the bounded weights are divided by their mean over all unmasked tokens, or
    over rows at level "sequence". The metrics are those of the weights before that.
    """
    mask, log_ratio = tokens.mask, tokens.log_ratio
    if level == "sequence":
        log_ratio = row_sum(log_ratio * mask, tokens.row, tokens.num_rows)[tokens.row]
    raw = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    weights = raw.clamp(max=bounds.high)
    if bounds.low is not None:
        weights = raw.masked_fill((raw > bounds.high) | (raw < bounds.low), 0.0)
    metrics = _metrics(tokens, log_ratio, weights, level, bounds)
    if batch_normalize:
        by_row = row_mean(weights, mask, tokens.row, tokens.num_rows)
        each = weights[mask > 0] if level == "token" else by_row[_has_tokens(tokens)]
        mean = float(each.double().mean()) if len(each) else 0.0
        factor = mean if mean > EPS else 1.0
        weights = weights / factor
        metrics["rollout_corr/rollout_is_batch_norm_factor"] = Mean(factor)
    return weights * mask, metrics


def _has_tokens(tokens: SampledTokens) -> Tensor:
    """Return True for each row with an unmasked token: (num_rows,)."""
    return row_sum(tokens.mask, tokens.row, tokens.num_rows) > 0


def _metrics(
    tokens: SampledTokens, log_ratio: Tensor, weights: Tensor, level: Level, bounds: Bounds
) -> Metrics:
    """Return verl's metrics of the weights; an empty dict without unmasked tokens.

    `log_ratio` (T,) are the raw log-weights and `weights` (T,) the bounded ones. Mean, deviation
    and sample size are those of the bounded weights over tokens. The fractions outside the bounds
    are of raw weights, the extremes of bounded ones, both over tokens; at level "sequence" all four
    are of raw weights over rows. `*_seq_*` are of the mean weight of each row.
    """
    mask, row, num_rows = tokens.mask, tokens.row, tokens.num_rows
    keep, rows = mask > 0, _has_tokens(tokens)
    if not bool(keep.any()):
        return {}
    low = 1 / bounds.high if bounds.low is None else bounds.low
    raw = log_ratio.double().clamp(max=MAX_LOG_RATIO).exp()
    bounded = weights.double()
    row_raw = row_mean(raw, mask.double(), row, num_rows)[rows]
    row_bounded = row_mean(bounded, mask.double(), row, num_rows)[rows]
    each = bounded[keep]
    units = raw[keep] if level == "token" else row_raw
    extremes = each if level == "token" else row_raw
    sums = float(len(each)), float(each.sum()), float(each.square().sum())
    metrics: Metrics = {
        "mean": Mean(sums[1], sums[0]),
        "max": Max(float(extremes.max())),
        "min": Min(float(extremes.min())),
        "std": Std(*sums, unbiased=False),
        "eff_sample_size": EffectiveSampleSize(*sums),
        "ratio_fraction_high": _share(units > bounds.high),
        "ratio_fraction_low": _share(units < low),
        "seq_mean": Mean(float(row_bounded.sum()), len(row_bounded)),
        "seq_std": Std(
            len(row_bounded), float(row_bounded.sum()), float(row_bounded.square().sum())
        ),
        "seq_max": Max(float(row_bounded.max())),
        "seq_min": Min(float(row_bounded.min())),
        "seq_max_deviation": Max(float((row_bounded - 1).abs().max())),
        "seq_fraction_high": _share(row_raw > bounds.high),
        "seq_fraction_low": _share(row_raw < low),
    }
    if bounds.low is not None:
        outside = (raw > bounds.high) | (raw < bounds.low)
        metrics["oob_ratio"] = _share(outside[keep])
    return {f"rollout_corr/rollout_is_{name}": metric for name, metric in metrics.items()}


def _share(hit: Tensor) -> Mean:
    """Return the share of True in `hit` (N,)."""
    return Mean(float(hit.sum()), len(hit))


PROBS_DIFF = "training/rollout_probs_diff_mean"


@dataclass(frozen=True, eq=False)
class SampledTokens:
    """The response tokens of complete rows, concatenated: (T,) each."""

    old_log_probs: Tensor  # computed by the trainer
    rollout_log_probs: Tensor  # computed by the engine that sampled the tokens
    mask: Tensor  # float, 1 where the policy wrote the token
    row: Tensor  # int64, the row of each token
    num_rows: int
    staleness: Tensor | None = None  # int64, steps; None if all rollouts are of their own step

    @classmethod
    def from_rollouts(cls, rollouts: Rollouts, log_probs: Tensor) -> Self:
        """Build from rollouts; `log_probs` (T,) are the trainer's, without a graph."""
        mask, row = rollouts.response_mask.values, rollouts.response_ids.row_of_token
        staleness = rollouts.staleness.values if rollouts.staleness is not None else None
        engine = rollouts.rollout_log_probs.values
        return cls(log_probs, engine, mask, row, len(rollouts), staleness)

    @property
    def log_ratio(self) -> Tensor:
        """log π_train/π_rollout: (T,)."""
        return self.old_log_probs - self.rollout_log_probs


def probs_diff(tokens: SampledTokens) -> Tensor:
    """Return |π_train − π_rollout| of the N unmasked tokens, in float64: (N,)."""
    keep = tokens.mask > 0
    return (
        tokens.old_log_probs[keep].double().exp() - tokens.rollout_log_probs[keep].double().exp()
    ).abs()


@torch.no_grad()
def mismatch(tokens: SampledTokens) -> Metrics:
    """Return metrics of the difference between engine and trainer, before any correction.

    `training/rollout_probs_diff_*`: |π_train − π_rollout| of the sampled tokens. `rollout_corr/kl`,
    `k3_kl`: estimates of KL(π_rollout ‖ π_train). `*_ppl`: perplexity of a response, mean over
    rows. `chi2_*`: the mean of ρ² − 1 over tokens, and over rows with ρ the product over the row.
    Rows without unmasked tokens do not count. The fields of `tokens` are (T,).
    """
    keep = tokens.mask > 0
    trainer = tokens.old_log_probs[keep].double()  # (N,)
    engine = tokens.rollout_log_probs[keep].double()  # (N,)
    n = len(trainer)
    if not n:
        return {}
    d, diff = trainer - engine, probs_diff(tokens)
    _, row = tokens.row[keep].unique(return_inverse=True)
    num_rows, ones = int(row.max()) + 1, torch.ones_like(d)
    trainer_row = row_mean(trainer, ones, row, num_rows)  # (num_rows,)
    engine_row = row_mean(engine, ones, row, num_rows)  # (num_rows,)
    ppl_diff = engine_row - trainer_row
    d_row = row_sum(d, row, num_rows).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    rho = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    of_tokens = {
        PROBS_DIFF: diff,
        "rollout_corr/kl": -d,
        "rollout_corr/k3_kl": d.exp() - d - 1,
        "rollout_corr/chi2_token": rho.square() - 1,
    }
    of_rows = {
        "rollout_corr/training_ppl": (-trainer_row).exp(),
        "rollout_corr/rollout_ppl": (-engine_row).exp(),
        "rollout_corr/training_log_ppl": -trainer_row,
        "rollout_corr/rollout_log_ppl": -engine_row,
        "rollout_corr/log_ppl_diff": ppl_diff,
        "rollout_corr/log_ppl_abs_diff": ppl_diff.abs(),
        "rollout_corr/ppl_ratio": ppl_diff.exp(),
        "rollout_corr/chi2_seq": (2 * d_row).exp() - 1,
    }
    values = of_tokens | of_rows
    others = [diff.square().sum(), diff.max(), ppl_diff.max(), ppl_diff.min()]
    sums = torch.stack([*(value.sum() for value in values.values()), *others])
    *totals, squares, largest, most, least = sums.tolist()  # waits for the device once
    counts = [n] * len(of_tokens) + [num_rows] * len(of_rows)
    metrics: Metrics = {
        name: Mean(*pair)
        for name, pair in zip(values, zip(totals, counts, strict=True), strict=True)
    }
    metrics["rollout_corr/log_ppl_diff_max"] = Max(most)
    metrics["rollout_corr/log_ppl_diff_min"] = Min(least)
    metrics["training/rollout_probs_diff_max"] = Max(largest)
    metrics["training/rollout_probs_diff_std"] = Std(n, totals[0], squares)
    return metrics
