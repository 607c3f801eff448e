"""Matrix products of linear layers by oneDNN, on AMD processors with AVX-512.

torch computes float32 products on a CPU by MKL, which uses AVX2 on processors that are not Intel's:
half the throughput. torch also ships oneDNN, which uses AVX-512 on both, and calls it for other
types. Results differ by rounding.

Axes: T tokens, I and O input and output features.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_CPU_INFO = Path("/proc/cpuinfo")
_OPERATORS = ("_linear_pointwise", "_reorder_linear_weight")
# Smaller products gain nothing: a new shape takes 0.3 ms to prepare.
_MIN_SIZE = 2**25  # of T x I x O
_MIN_FEATURES = 16
# oneDNN and torch keep what they prepared for a shape, by default for 1,024 shapes each. Packed
# batches have ever new numbers of tokens: a process grew to 2 GB.
_SHAPES_KEPT = "16"
_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


@cache
def is_faster() -> bool:
    """Return True if oneDNN is faster than MKL on this machine."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()):
        return False
    if not all(hasattr(torch.ops.mkldnn, name) for name in _OPERATORS) or not _CPU_INFO.exists():
        return False
    text = _CPU_INFO.read_text(encoding="utf-8")
    return "AuthenticAMD" in text and re.search(r"\bavx512f\b", text) is not None


def use_onednn(model: nn.Module) -> None:
    """Switch the linear layers of `model` to oneDNN, in place, where it is faster; idempotent."""
    if not is_faster():
        return
    for name in _CACHES:
        os.environ.setdefault(name, _SHAPES_KEPT)
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear


class Linear(nn.Linear):
    """Linear layer in which oneDNN computes large float32 products on a CPU."""

    def forward(self, input: Tensor) -> Tensor:
        """Return x Wᵀ + b for x (B, T, I) or (T, I): (B, T, O) or (T, O)."""
        if not _is_suitable(input, self.weight):
            return F.linear(input, self.weight, self.bias)
        flat = _Product.apply(input.flatten(0, -2), self.weight, self.bias)
        return flat.unflatten(0, input.shape[:-1])


def _is_suitable(x: Tensor, weight: Tensor) -> bool:
    """Return True if `product` accepts x (..., I) and W (O, I), and is faster with them."""
    return (
        not isinstance(x, DTensor)
        and not isinstance(weight, DTensor)
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and x.numel() * len(weight) >= _MIN_SIZE
        and min(weight.shape) >= _MIN_FEATURES
        and not torch.is_autocast_enabled("cpu")
    )


def prepared(weight: Tensor, num_rows: int) -> Tensor:
    """Return a copy of W (O, I) for `product` alone, in oneDNN's layout for few rows of x.

    With 16 rows products take about 0.7 of the time; from 256 on the layout does not matter.
    """
    return torch.ops.mkldnn._reorder_linear_weight(weight, num_rows)


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, add: Tensor | None = None
) -> Tensor:
    """Return x Wᵀ + b + a, without a gradient: (T, I), (O, I), (O,), (T, O) -> (T, O).

    The weight may be `prepared`.
    """
    if add is not None:
        return torch.ops.mkldnn._linear_pointwise.binary(x, add, weight, bias, "add")
    if torch.compiler.is_compiling():
        return _in_graphs(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@torch.library.custom_op("rlctl::product", mutates_args=())
def _in_graphs(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `product(x, weight, bias)`. `torch.compile` requires constants of oneDNN."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@_in_graphs.register_fake
def _shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    del bias
    return x.new_empty(x.shape[0], weight.shape[0])


class _Product(torch.autograd.Function):
    """x Wᵀ + b: (T, I), (O, I), (O,) -> (T, O)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grad = grad_outputs[0].contiguous()  # (T, O)
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            product(grad, weight.t()) if of_x else None,
            _weight_gradient(grad, x) if of_weight else None,
            grad.sum(0) if of_bias else None,
        )


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Return gᵀ x: (T, O), (T, I) -> (O, I). The smaller matrix comes first: that is faster."""
    if grad.shape[1] <= x.shape[1]:
        return product(grad.t(), x.t())
    return product(x.t(), grad.t()).t()
