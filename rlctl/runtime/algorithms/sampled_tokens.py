"""Difference between the log-probs of rollout engine and trainer, for the tokens of responses.

Metrics of the mismatch have verl's names and definitions. They are computed for the complete global
batch, on the controller.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from rlctl.runtime.algorithms.policy_losses.base import MAX_LOG_RATIO
from rlctl.runtime.base.batch import Rollouts
from rlctl.runtime.base.metrics import Max, Mean, Metrics, Min, Std
from rlctl.runtime.base.ops import row_mean, row_sum

PROBS_DIFF = "training/rollout_probs_diff_mean"


@dataclass(frozen=True, eq=False)
class SampledTokens:
    """The response tokens of complete rows, concatenated: (T,) each."""

    old_log_probs: Tensor  # computed by the trainer
    rollout_log_probs: Tensor  # computed by the engine that sampled the tokens
    mask: Tensor  # float, 1 where the policy wrote the token
    row: Tensor  # int64, the row of each token
    num_rows: int
    staleness: Tensor | None = None  # int64, steps; None if all rollouts are of the present step

    @classmethod
    def from_rollouts(cls, rollouts: Rollouts, log_probs: Tensor) -> Self:
        """Build from rollouts; `log_probs` (T,) are the trainer's, without a graph."""
        mask = rollouts.response_mask.values
        row = rollouts.response_ids.row_of_token
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
    d = trainer - engine
    diff = probs_diff(tokens)
    _, row = tokens.row[keep].unique(return_inverse=True)
    num_rows = int(row.max()) + 1
    ones = torch.ones_like(d)
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
