"""Triton kernels of log-probs, entropies and Σ π²: one read of the logits, and one of the backward
pass, which may write the gradient in their place.

Formulas and limits are those of `log_probs_and_entropy` in `base/ops.py`, which is the reference.
"""

# Without the extra `triton` its decorator has no type.
# pyright: reportMissingImports=false, reportIndexIssue=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

_BLOCK = 4096  # logits of a row that a program processes at a time
# Operations that do not keep the tensor that they return, and views.
_FORGETFUL = {"MmBackward0", "AddmmBackward0", "AddBackward0", "MulBackward0", "DivBackward0"}
_FORGETFUL |= {"ToCopyBackward0"}
_VIEWS = {"SqueezeBackward1", "UnsafeViewBackward0", "ViewBackward0", "AliasBackward0"}


@triton.jit
def _forward(logits, targets, outputs, num_rows, size, temperature, BLOCK: tl.constexpr):
    """Write log-prob, log Σ exp, entropy and Σ π² of a row to `outputs` (4, T)."""
    row = tl.program_id(0).to(tl.int64)
    first = logits + row * size
    # With d = z − max z: Σ exp d, Σ exp d · d and Σ exp 2d, of the columns so far.
    top = -1e30
    total = 0.0
    weighted = 0.0
    squared = 0.0
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        z = tl.load(first + columns, mask=columns < size, other=-float("inf"))
        z = z.to(tl.float32) / temperature
        new_top = tl.maximum(top, tl.max(z, 0))
        shift = top - new_top
        scale = tl.exp(shift)
        d = tl.maximum(z - new_top, -1e4)  # so that 0 · d is no NaN
        weights = tl.exp(d)
        weighted = scale * (weighted + total * shift) + tl.sum(weights * d, 0)
        total = scale * total + tl.sum(weights, 0)
        squared = scale * scale * squared + tl.sum(weights * weights, 0)
        top = new_top
    target = tl.load(targets + row)
    log_total = tl.log(total)
    picked = tl.load(first + target).to(tl.float32) / temperature
    tl.store(outputs + row, picked - (top + log_total))
    tl.store(outputs + num_rows + row, top + log_total)
    tl.store(outputs + 2 * num_rows + row, log_total - weighted / total)
    tl.store(outputs + 3 * num_rows + row, squared / (total * total))


@triton.jit
def _backward(
    logits, targets, outputs, grads, grad, num_rows, size, temperature, BLOCK: tl.constexpr
):
    """Write the gradient of a row's logits to `grad` (T, V), which may be the logits."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    log_norm = tl.load(outputs + num_rows + row)
    entropy = tl.load(outputs + 2 * num_rows + row)
    of_log_prob = tl.load(grads + row) / temperature
    of_entropy = tl.load(grads + num_rows + row) / temperature
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < size
        z = tl.load(logits + row * size + columns, mask=inside, other=-float("inf"))
        log_p = tl.maximum(z.to(tl.float32) / temperature - log_norm, -1e4)
        g = of_log_prob + of_entropy * (log_p + entropy)
        dz = tl.where(columns == target, of_log_prob, 0.0) - tl.exp(log_p) * g
        tl.store(grad + row * size + columns, dz.to(z.dtype), mask=inside)


def may_overwrite(logits: Tensor) -> bool:
    """Return True if the operation that computed `logits` (T, V) does not keep them."""
    node = logits.grad_fn
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    return node is not None and node.name() in _FORGETFUL


class FusedScore(torch.autograd.Function):
    """Log-probs, entropies and Σ π², (T,) float32 each, of logits (T, V) and targets (T,).

    Logits have at most 32 bits and are contiguous. With `overwrite` the backward pass writes
    their gradient in their place. Σ π² has no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, overwrite: bool
    ) -> tuple[Tensor, ...]:
        """Map logits (T, V) and targets (T,) to the results (T,), a program for each row."""
        num_rows, size = logits.shape
        outputs = torch.empty(4, num_rows, dtype=torch.float32, device=logits.device)
        sizes = (num_rows, size, temperature)
        block = min(_BLOCK, triton.next_power_of_2(size))
        launch: Any = _forward[(num_rows,)]  # its type lacks Triton's parameters
        launch(logits, targets, outputs, *sizes, BLOCK=block, num_warps=8)
        ctx.save_for_backward(logits, targets, outputs)
        ctx.sizes = sizes
        ctx.block = block
        ctx.overwrite = overwrite
        log_probs, _, entropy, squares = (each.clone() for each in outputs)
        ctx.mark_non_differentiable(squares)
        return log_probs, entropy, squares

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor, None, None, None]:
        """Map gradients (T,) each to the gradient (T, V) of the logits."""
        logits, targets, outputs = ctx.saved_tensors
        grad = logits.detach() if ctx.overwrite else torch.empty_like(logits)
        given = logits, targets, outputs, torch.stack(grads[:2]), grad
        launch: Any = _backward[(len(logits),)]
        launch(*given, *ctx.sizes, BLOCK=ctx.block, num_warps=8)
        if ctx.overwrite:
            increment_version(logits)  # whoever else reads them in the backward pass fails
        return grad, None, None, None
