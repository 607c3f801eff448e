"""verl's metrics of a criterion of rejection, for runs that reject tokens."""

from __future__ import annotations

import math

from torch import Tensor

from rlctl.runtime.algorithms.bounds import Bounds
from rlctl.runtime.algorithms.sampled_tokens import SampledTokens
from rlctl.runtime.base.metrics import Max, Mean, Metrics, Min, Std
from rlctl.runtime.base.ops import row_mean, row_sum


def criterion_metrics(
    kind: str, bounds: Bounds, value: Tensor, passed: Tensor, tokens: SampledTokens
) -> Metrics:
    """Return metrics of the divergence `value` of a criterion; an empty dict without tokens.

    `value` and `passed`, 1 for tokens that meet the criterion, are (T,). Bounds of a ratio (k1) are
    taken logarithmically, as `value`. `std` is that of the clamped divergence, over tokens. max,
    min and fractions are over tokens of a criterion for tokens, else over rows; `seq_*` over rows.
    """
    mask = tokens.mask
    row = tokens.row
    num_rows = tokens.num_rows
    keep = mask > 0
    rows = row_sum(mask, row, num_rows) > 0
    if not bool(keep.any()):
        return {}
    low = 0.0
    high = bounds.high
    if bounds.low is not None:
        low = math.log(bounds.low)
        high = math.log(bounds.high)
    each = value[keep].double()
    of_rows = row_mean(value.double(), mask.double(), row, num_rows)[rows]
    clamped = each.clamp(low, high)
    units = each if kind.startswith("token") else of_rows
    rejected = row_sum((1 - passed) * mask, row, num_rows)[rows] > 0
    metrics: Metrics = {
        "masked_fraction": _share(passed[keep] == 0),
        "seq_masked_fraction": _share(rejected),
        "mean": Mean(float(each.sum()), len(each)),
        "max": Max(float(units.max())),
        "min": Min(float(units.min())),
        "std": _spread(clamped, unbiased=False),
        "fraction_high": _share(units > high),
        "fraction_low": _share(units < low),
        "seq_mean": Mean(float(of_rows.sum()), len(of_rows)),
        "seq_std": _spread(of_rows),
        "seq_max": Max(float(of_rows.max())),
        "seq_min": Min(float(of_rows.min())),
        "seq_max_deviation": Max(float(of_rows.abs().max())),
        "seq_fraction_high": _share(of_rows > high),
    }
    if bounds.low is not None:
        metrics["seq_fraction_low"] = _share(of_rows < low)
    return {f"rollout_corr/rollout_rs_{kind}_{name}": metric for name, metric in metrics.items()}


def _share(hit: Tensor) -> Mean:
    return Mean(float(hit.sum()), len(hit))


def _spread(values: Tensor, unbiased: bool = True) -> Std:
    return Std(len(values), float(values.sum()), float(values.square().sum()), unbiased)
