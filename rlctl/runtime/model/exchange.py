"""All-to-all exchange of rows between ranks, with a gradient.

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
        ctx.sizes, ctx.group = (sent, received), group
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
