"""Importance weights π_train/π_rollout of rollout correction, and their metrics.

Metrics have verl's names and definitions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlctl.runtime.algorithms.bounds import Bounds, Level
from rlctl.runtime.algorithms.policy_losses.base import MAX_LOG_RATIO
from rlctl.runtime.algorithms.sampled_tokens import SampledTokens
from rlctl.runtime.base.metrics import EffectiveSampleSize, Max, Mean, Metrics, Min, Std
from rlctl.runtime.base.ops import EPS, row_mean, row_sum


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
    mask = tokens.mask
    log_ratio = tokens.log_ratio
    if level == "sequence":
        log_ratio = row_sum(log_ratio * mask, tokens.row, tokens.num_rows)[tokens.row]
    raw = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    weights = raw.clamp(max=bounds.high)
    if bounds.low is not None:
        weights = raw.masked_fill((raw > bounds.high) | (raw < bounds.low), 0.0)
    metrics = _metrics(tokens, log_ratio, weights, level, bounds)
    if batch_normalize:
        if level == "token":
            each = weights[mask > 0]
        else:
            by_row = row_mean(weights, mask, tokens.row, tokens.num_rows)
            each = by_row[_has_tokens(tokens)]
        factor = 1.0
        if len(each) and (mean := float(each.double().mean())) > EPS:
            factor = mean
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
    mask = tokens.mask
    row = tokens.row
    num_rows = tokens.num_rows
    keep = mask > 0
    rows = _has_tokens(tokens)
    if not bool(keep.any()):
        return {}
    low = 1 / bounds.high if bounds.low is None else bounds.low
    raw = log_ratio.double().clamp(max=MAX_LOG_RATIO).exp()
    bounded = weights.double()
    row_raw = row_mean(raw, mask.double(), row, num_rows)[rows]
    row_bounded = row_mean(bounded, mask.double(), row, num_rows)[rows]
    each = bounded[keep]
    units = extremes = row_raw
    if level == "token":
        units = raw[keep]
        extremes = each
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
