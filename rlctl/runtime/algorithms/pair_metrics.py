"""Figures of the scores of preference pairs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlctl.runtime.base.metrics import Mean, Metrics

NUM_BINS = 10


def pair_metrics(scores: Tensor, losses: Tensor, prefix: str) -> Metrics:
    """Return loss, accuracy, margin and calibration of P pairs from their scores (2·P,).

    The scores of a pair are adjacent, that of the chosen response first; `losses` is (P,). An equal
    score is half right. `ece` is `calibration_error`.
    """
    chosen = scores.double()[0::2]
    rejected = scores.double()[1::2]
    margin = chosen - rejected
    count = len(margin)
    if not count:
        return {}
    values = {
        "pair_loss": losses.double(),
        "accuracy": 0.5 + 0.5 * margin.sign(),
        "margin": margin,
        "score_chosen": chosen,
        "score_rejected": rejected,
    }
    means: Metrics = {
        f"{prefix}/{name}": Mean(float(value.sum()), count) for name, value in values.items()
    }
    return means | {f"{prefix}/ece": Mean(calibration_error(margin) * count, count)}


def calibration_error(margin: Tensor) -> float:
    """Return the expected calibration error of P differences of scores (P,), 0 to 0.5.

    The model prefers one response with confidence σ(|margin|), from 0.5 to 1. Pairs are put into
    ten bins of confidence of equal width; the error is the mean over pairs of the difference of
    confidence and share of right preferences of the bin (arXiv 1706.04599, eq. 3).
    """
    confidence = margin.abs().sigmoid()
    right = 0.5 + 0.5 * margin.sign()
    bins = ((confidence - 0.5) * 2 * NUM_BINS).long().clamp(max=NUM_BINS - 1)
    gaps = torch.zeros(NUM_BINS, dtype=torch.float64).index_add_(0, bins, confidence - right)
    return float(gaps.abs().sum() / len(margin))


def moments(state: Mapping[str, float]) -> tuple[float, float]:
    """Return mean and standard deviation of scores from means of them and of their squares.

    `state` has the means as `mean` and `second`, as checkpoints of a reward model store them.
    """
    return state["mean"], max(state["second"] - state["mean"] ** 2, 0.0) ** 0.5
