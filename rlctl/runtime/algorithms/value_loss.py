"""The value function's loss."""

from __future__ import annotations

import torch
from torch import Tensor

from rlctl.tracking.metrics import ExplainedVariance, Mean, Metrics


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, cliprange: float
) -> tuple[Tensor, Metrics]:
    """½·max((V − ret)², (clip(V, old ± cliprange) − ret)²) for each token: (T,) all. To be aggregated like a policy loss.

    PPO's clipped value loss, as introduced by OpenAI's baselines, not by the paper. Metrics: `critic/vf_clipfrac` (the clipped side is the
    larger), `critic/vpred_mean`, `critic/vf_explained_var` (1 − Var(ret − old)/Var(ret): of the values that made the advantages).
    """
    held = values.clamp(old_values - cliprange, old_values + cliprange)
    free_error, held_error = (values - returns).square(), (held - returns).square()
    return torch.maximum(free_error, held_error) / 2, _metrics(
        values, old_values, returns, mask, held_error > free_error
    )


@torch.no_grad()
def _metrics(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, is_clipped: Tensor
) -> Metrics:
    """In float64, for sums of squares; one wait for the device in all."""
    rets, error = returns.double(), (returns - old_values).double()
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
