"""Errors of packed attention against softmax row by row, in float64 on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from rlctl.runtime.model.attention import Packing
from rlctl.runtime.model.kernels import Reach

LENGTHS = (5, 1, 40, 17, 3, 290, 64, 129)
LIMIT = 1e-4  # of a relative error in float32
_WINDOW = 32


def relative(value: Tensor, reference: Tensor) -> float:
    """Return the norm of the difference (N, ...) divided by that of `reference`."""
    value, reference = value.detach().cpu().double(), reference.detach().cpu().double()
    return float((value - reference).norm() / reference.norm())


def attention_error(device: str, dtype: torch.dtype) -> tuple[float, float]:
    """Return the error of packed attention and of its gradients against softmax row by row."""
    return _attention_error(device, dtype, None, with_sinks=False)


def window_error(device: str, dtype: torch.dtype) -> tuple[float, float]:
    """Return the error of attention in a window: see `attention_error`."""
    return _attention_error(device, dtype, _WINDOW, with_sinks=False)


def sinks_error(device: str, dtype: torch.dtype) -> tuple[float, float]:
    """Return the error of attention in a window with sinks: see `attention_error`."""
    return _attention_error(device, dtype, _WINDOW, with_sinks=True)


def _attention_error(
    device: str, dtype: torch.dtype, window: int | None, with_sinks: bool
) -> tuple[float, float]:
    draw = torch.Generator().manual_seed(2)
    total, heads, kv_heads, size = sum(LENGTHS), 8, 2, 64
    shapes = ((total, heads, size), (total, kv_heads, size), (total, kv_heads, size), (heads,))
    exact = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]
    weights = torch.randn(shapes[0], generator=draw, dtype=torch.float64)
    rounded = [each.to(device, dtype).requires_grad_() for each in exact]
    exact = [each.detach().cpu().double().requires_grad_() for each in rounded]
    packing = Packing.from_lengths(torch.tensor(LENGTHS), device)
    query, key, value, sinks = rounded
    reach = Reach(0.2, window, sinks if with_sinks else None)
    out = packing.attend(0, query, key, value, reach)
    (out.float() * weights.to(device, torch.float32)).sum().backward()
    query, key, value, sinks = exact
    reach = Reach(0.2, window, sinks if with_sinks else None)
    expected = _attend_by_row(query, key, value, reach)
    (expected * weights).sum().backward()
    pairs = [(out, expected), *((a.grad, b.grad) for a, b in zip(rounded, exact, strict=True))]
    errors = [relative(a, b) for a, b in pairs if a is not None and b is not None]
    return max(errors), LIMIT if dtype == torch.float32 else 2e-2


def _attend_by_row(query: Tensor, key: Tensor, value: Tensor, reach: Reach) -> Tensor:
    """Attend by the definition: (T, H, D), (T, K, D), (T, K, D) -> (T, H, D)."""
    parts = []
    repeat = query.shape[1] // key.shape[1]
    for q, k, v in zip(*(x.split(LENGTHS) for x in (query, key, value)), strict=True):
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        scores = reach.scale * torch.einsum("qhd,khd->hqk", q, k)
        position = torch.arange(len(q))
        distance = position[:, None] - position
        hidden = (distance < 0) | (distance >= (reach.window or len(q)))
        scores = scores.masked_fill(hidden, -torch.inf)
        if reach.sinks is not None:
            column = reach.sinks[:, None, None].expand(-1, len(q), 1)
            scores = torch.cat([scores, column], -1)
        weights = scores.softmax(-1)[..., : len(q)]
        parts.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(parts)
