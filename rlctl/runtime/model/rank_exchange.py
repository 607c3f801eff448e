"""Exchanges of rows between ranks and sums over them, with gradients.

torch's public version (`torch.distributed.nn.functional`) is deprecated, its successor private.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def exchange(
    rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    """Exchange rows (N, …), sorted by rank, for rows (R, …).

    `sent[i]` of them go to rank i of the group, `received[i]` come from there.
    """
    apply: Any = _Exchange.apply
    return apply(rows, sent, received, group)


class _Exchange(torch.autograd.Function):
    """See `exchange`. Its transpose is the exchange in the other direction."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        """Exchange rows (N, …) for rows (R, …)."""
        ctx.sizes = (sent, received)
        ctx.group = group
        return _exchanged(rows, sent, received, group)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, None, None, None]:
        """Return the gradient (R, …) to where its rows came from: (N, …)."""
        sent, received = ctx.sizes
        return _exchanged(gradient, received, sent, ctx.group), None, None, None


def _exchanged(
    rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    """Send rows (N, …); return the received ones (R, …)."""
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out


def summed(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of the values (N, …) of all ranks, which then compute the same loss."""
    apply: Any = _Sum.apply
    return apply(value, group)


def with_summed_gradient(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return `value` (N, …), whose gradient is the sum of the gradients of all ranks."""
    apply: Any = _SumGradients.apply
    return apply(value, group)


class _Sum(torch.autograd.Function):
    """See `summed`: each rank's gradient is that of the sum."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the sum of the values (N, …)."""
        del ctx
        value = value.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(value, group=group)
        return value

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, None]:
        """Return the gradient (N, …)."""
        del ctx
        return gradient, None


class _SumGradients(torch.autograd.Function):
    """See `with_summed_gradient`."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return `value` (N, …)."""
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, None]:
        """Sum the gradients (N, …) of all ranks."""
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None
