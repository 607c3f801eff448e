"""Aggregation of token losses to the loss of a mini-batch that is split into micro-batches.

A loss is Σ `aggregate` / Σ `count`, summed over the micro-batches of all ranks. Both are plain sums
over rows or tokens and rows are never split, so the quotient and its gradient do not depend on the
split. `token-sum` is not divided: its count is None. Both functions take the same arguments, though
not every mode uses all of them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rlctl.errors import ConfigError
from rlctl.plugins import suggestion
from rlctl.runtime.base.batch import Experience
from rlctl.runtime.base.metrics import Mean, Sum
from rlctl.runtime.base.ops import masked_sum, row_sum
from rlctl.runtime.base.roles import Total

MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


def check_mode(mode: str) -> str:
    """Return `mode`. Raises ConfigError if it is not one of `MODES`."""
    if mode not in MODES:
        raise ConfigError(
            f"unknown aggregation of losses: {mode!r}",
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
    """Return the numerator of a micro-batch's loss, a scalar with a graph.

    It is Σ_rows Σ_t L over the unmasked tokens; for seq-mean-token-mean each token is divided by
    the number of unmasked tokens of its row. `token_losses`, `mask` (1 where a token counts) and
    `row` (the row of each token, int64): (T,). Raises ConfigError for an unknown mode.
    """
    if check_mode(mode) == "seq-mean-token-mean":
        length = row_sum(mask, row, num_rows).clamp(min=1.0)  # (num_rows,)
        token_losses = token_losses / length[row]
    return masked_sum(token_losses, mask)


def divided(total: Tensor, divisor: float | None) -> Mean | Sum:
    """Return the metric of a numerator (a scalar) and its denominator from `count`."""
    value = float(total.detach())
    return Sum(value) if divisor is None else Mean(value, divisor)


def count(
    mask: Tensor, row: Tensor, num_rows: int, mode: str, width: float | None = None
) -> float | None:
    """Return the denominator of a micro-batch's loss; None for token-sum, which is not divided.

    token-mean: the number of unmasked tokens. seq-mean modes: the number of rows, including rows
    without unmasked tokens, whose loss is 0. seq-mean-token-sum-norm: rows × `width`, a constant of
    the configuration (Dr.GRPO, arXiv 2503.20783). `mask` and `row`: (T,). Raises ConfigError for an
    unknown mode, ValueError if `width` is missing.
    """
    return _divisor(mask.sum(), num_rows, mode, width)


def with_sizes(batch: Experience, total: Total) -> Experience:
    """Return this rank's rows of a mini-batch with the `sizes` of the whole mini-batch."""
    counts = [float(len(batch)), float(batch.response_mask.values.sum())]
    sizes = total(torch.tensor(counts, dtype=torch.float64))
    return replace(batch, sizes=sizes.expand(len(batch), 2))


def conversion(
    mode: str, into: str, num_rows: float, num_tokens: float, width: float | None = None
) -> float:
    """Return the factor of a numerator of `mode` that is divided by the count of `into`.

    Both counts are those of a mini-batch of `num_rows` rows with `num_tokens` unmasked tokens.
    """
    before = _divisor(num_tokens, num_rows, mode, width)
    after = _divisor(num_tokens, num_rows, into, width)
    if before is None:
        before = 1.0
    if after is None:
        after = 1.0
    return after / max(before, 1.0)


def _divisor(
    num_tokens: Tensor | float, num_rows: float, mode: str, width: float | None
) -> float | None:
    match check_mode(mode):
        case "token-mean":
            return float(num_tokens)
        case "token-sum":
            return None
        case "seq-mean-token-sum-norm":
            if width is None:
                raise ValueError(f"{mode} needs a width: loss_scale_factor or max_response_length")
            return float(num_rows * width)
        case _:
            return float(num_rows)
