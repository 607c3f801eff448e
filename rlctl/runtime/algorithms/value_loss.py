"""Clipped loss of the value function."""

from __future__ import annotations

import torch
from torch import Tensor

from rlctl.runtime.base.metrics import ExplainedVariance, Mean, Metrics


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, cliprange: float
) -> tuple[Tensor, Metrics]:
    """Return ½·max((V − ret)², (clip(V, old ± cliprange) − ret)²) of each token, and metrics.

    All tensors are (T,). This is the clipped loss of OpenAI's baselines; the PPO paper has none.
    Metrics: `critic/vf_clipfrac` (share of tokens whose clipped side is the larger),
    `critic/vpred_mean` and `critic/vf_explained_var`, 1 − Var(ret − old)/Var(ret).
    """
    held = values.clamp(old_values - cliprange, old_values + cliprange)
    free_error = (values - returns).square()
    held_error = (held - returns).square()
    return torch.maximum(free_error, held_error) / 2, _metrics(
        values, old_values, returns, mask, held_error > free_error
    )


@torch.no_grad()
def _metrics(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, is_clipped: Tensor
) -> Metrics:
    """Return the metrics of `value_loss`; all tensors are (T,). Waits for the device once.

    The sums of squares need float64.
    """
    rets = returns.double()
    error = (returns - old_values).double()
    columns = [
        torch.ones_like(rets),
        is_clipped.double(),
        values.double(),
        rets,
        rets.square(),
        error,
        error.square(),
    ]
    n, clips, vpreds, *moments = (torch.stack(columns) @ mask.double()).tolist()
    return {
        "critic/vf_clipfrac": Mean(clips, n),
        "critic/vpred_mean": Mean(vpreds, n),
        "critic/vf_explained_var": ExplainedVariance(n, *moments),
    }
