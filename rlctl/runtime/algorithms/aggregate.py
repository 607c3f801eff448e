"""From the losses of tokens to the loss of a mini-batch, whatever pieces it was cut into.

A loss is Σ_parts `aggregate` / Σ_parts `count`, the parts being the micro-batches of all ranks. Both are plain sums over rows or tokens, so
the quotient and its gradient do not depend on the cut; rows are never cut. `token-sum` is not divided at all: its count is None.
Both functions take the same description of a part, whether or not the mode looks at all of it.
"""

from __future__ import annotations

from torch import Tensor

from rlctl.errors import ConfigError
from rlctl.plugins import suggestion
from rlctl.runtime.ops import masked_sum, row_sum

MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


def check_mode(mode: str) -> str:
    """`mode` itself if it is one of `MODES`; `ConfigError` otherwise."""
    if mode not in MODES:
        raise ConfigError(
            f"unknown aggregation of losses {mode!r}",
            where="actor_rollout_ref.actor.loss_agg_mode",
            hint=suggestion(mode, MODES),
        )
    return mode


def aggregate(
    token_losses: Tensor,
    mask: Tensor,
    row: Tensor,
    num_rows: int,
    mode: str,
    width: float | None = None,
) -> Tensor:
    """This part's share of the sum, a scalar with a graph. Losses, mask (1 where a token counts) and row (each token's row, int64): (T,).

    Σ_rows Σ_t L for all modes but seq-mean-token-mean, where a token weighs one over the number of unmasked tokens of its row.
    """
    if check_mode(mode) == "seq-mean-token-mean":
        length = row_sum(mask, row, num_rows).clamp(min=1.0)  # (num_rows,)
        token_losses = token_losses / length[row]
    return masked_sum(token_losses, mask)


def count(
    mask: Tensor, row: Tensor, num_rows: int, mode: str, width: float | None = None
) -> float | None:
    """This part's share of what the sum is divided by; None where it is not divided (token-sum).

    Unmasked tokens for token-mean, rows for the seq-mean modes (a row without unmasked tokens counts, with a loss of 0), rows × `width`
    for seq-mean-token-sum-norm. `width` is a number of the configuration (Dr.GRPO, arXiv 2503.20783), not of the batch; `ValueError`
    without it.
    """
    match check_mode(mode):
        case "token-mean":
            return float(mask.sum())
        case "token-sum":
            return None
        case "seq-mean-token-sum-norm":
            if width is None:
                raise ValueError(
                    "seq-mean-token-sum-norm needs a width: loss_scale_factor or max_response_length"
                )
            return float(num_rows * width)
        case _:
            return float(num_rows)
