"""Operations on plain tensors that the layers above share: masked moments, statistics of groups, log-probs and entropies of logits.

B is the number of rows, R the length of the longest response, T the number of tokens of all rows end to end, V the size of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

EPS = 1e-8

# Elements of one chunk's fp32 working copy of the logits. A GPU wants large chunks (64 MiB), a CPU ones that stay in its cache (4 MiB).
_CHUNK_GPU = 2**24
_CHUNK_CPU = 2**20

# The log-prob of a token that a logit of −inf forbids. Its p is 0 all the same, and p·log p is 0 and not NaN.
_LOG_ZERO = -1e4


def ceil_div(a: int, b: int) -> int:
    """Return a / b rounded up."""
    return -(-a // b)


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Σ x·mask as a scalar; what stands where the mask is 0 does not count, be it NaN or infinite. Same shapes."""
    return (torch.where(mask > 0, x, 0.0) * mask).sum()


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Σ x·mask / (Σ mask + 1e-8) as a scalar: 0 when nothing is unmasked. Same shapes."""
    return masked_sum(x, mask) / (mask.sum() + EPS)


def masked_var(x: Tensor, mask: Tensor) -> Tensor:
    """The unbiased variance of the n unmasked entries of `x`, as a scalar. `ValueError` when n ≤ 1, where there is none."""
    n = float(mask.sum())
    if n <= 1:
        raise ValueError(f"a variance needs at least two unmasked tokens, given: {n:g}")
    return masked_mean((x - masked_mean(x, mask)).square(), mask) * (n / (n - 1))


def masked_whiten(x: Tensor, mask: Tensor) -> Tensor:
    """(x − μ)·rsqrt(σ² + 1e-8) with the moments of the unmasked entries, applied to all entries: the result is not masked again."""
    return (x - masked_mean(x, mask)) * torch.rsqrt(masked_var(x, mask) + EPS)


@dataclass(frozen=True, eq=False)
class GroupStats:
    """What each row's group is like: (B,) each. A group of one has mean 0 and std 1, as GRPO's family of estimators wants it."""

    mean: Tensor
    std: Tensor
    size: Tensor  # int64


def dense_groups(group: Tensor) -> tuple[Tensor, int]:
    """Group ids of any value as 0 … G−1, and G. `group` is (B,) int64; rows of a group need not be neighbours."""
    unique, dense = group.unique(return_inverse=True)
    return dense, len(unique)


def group_sum(x: Tensor, dense: Tensor, num_groups: int) -> Tensor:
    """Sums of the rows of each group: x (B, ...) -> (G, ...). `dense` (B,) as `dense_groups` gives it."""
    return x.new_zeros(num_groups, *x.shape[1:]).index_add_(0, dense, x)


def group_stats(scores: Tensor, group: Tensor) -> GroupStats:
    """Mean and unbiased std of `scores` (B,) over the rows that share a `group` (B,) id, given back per row.

    In float64, so that equal scores have a std of 0 and not of some rounding, which 1e-6 in a denominator would not hide.
    """
    dense, num_groups = dense_groups(group)
    exact = scores.double()
    size = torch.bincount(dense, minlength=num_groups)
    mean = group_sum(exact, dense, num_groups) / size
    var = group_sum((exact - mean[dense]).square(), dense, num_groups) / (size - 1).clamp(min=1)
    single = size == 1
    mean, std = mean.masked_fill(single, 0.0), var.sqrt().masked_fill(single, 1.0)
    return GroupStats(mean[dense].to(scores.dtype), std[dense].to(scores.dtype), size[dense])


def row_sum(x: Tensor, row: Tensor, num_rows: int) -> Tensor:
    """Sums of the tokens of each row: x (T,), row (T,) int64 -> (num_rows,). Rows without tokens give 0. Differentiable."""
    return x.new_zeros(num_rows).index_add(0, row, x)


def row_mean(x: Tensor, mask: Tensor, row: Tensor, num_rows: int) -> Tensor:
    """Means over the unmasked tokens of each row: x, mask, row (T,) -> (num_rows,). Rows without any give 0."""
    return row_sum(x * mask, row, num_rows) / row_sum(mask, row, num_rows).clamp(min=1.0)


def _chunk_rows(logits: Tensor) -> int:
    return max(1, (_CHUNK_GPU if logits.is_cuda else _CHUNK_CPU) // max(1, logits.shape[-1]))


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """In fp32 or better, divided by the temperature; `logits` itself (no copy) when there is nothing to do."""
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return exact if temperature == 1.0 else exact / temperature


class _Score(torch.autograd.Function):
    """Log-probs and entropies, chunk by chunk over T. Keeps logits and one number a token for the backward pass, no (T, V) of its own.

    With p = softmax(z), z = logits/τ: ∂log p_y/∂z_v = 1[v = y] − p_v and ∂H/∂z_v = −p_v·(log p_v + H).
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        log_norm = torch.empty(len(logits), dtype=dtype, device=logits.device)
        entropy = torch.empty_like(log_norm if with_entropy else log_norm[:0])
        rows = _chunk_rows(logits)
        for start in range(0, len(logits), rows):
            part = slice(start, start + rows)
            z = _scaled(logits[part], temperature)
            log_norm[part] = z.logsumexp(-1)
            if with_entropy:
                log_p = (z - log_norm[part, None]).clamp_(min=_LOG_ZERO)
                entropy[part] = -log_p.exp().mul_(log_p).sum(-1)
        picked = logits.gather(-1, targets[:, None]).squeeze(-1)
        ctx.save_for_backward(logits, targets, log_norm, entropy)
        ctx.temperature, ctx.with_entropy = temperature, with_entropy
        return _scaled(picked, temperature) - log_norm, entropy

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor
    ) -> tuple[Tensor, None, None, None]:
        logits, targets, log_norm, entropy = ctx.saved_tensors
        grad = torch.empty_like(logits)
        in_place = grad.dtype == log_norm.dtype
        rows = _chunk_rows(logits)
        for start in range(0, len(logits), rows):
            part = slice(start, start + rows)
            z = _scaled(logits[part], ctx.temperature)
            g = grad_log_probs[part, None] / ctx.temperature
            dz = torch.sub(
                z, log_norm[part, None], out=grad[part] if in_place else torch.empty_like(z)
            )  # log p
            if ctx.with_entropy:
                p = dz.clamp_(min=_LOG_ZERO).exp()
                dz.add_(entropy[part, None]).mul_(grad_entropy[part, None] / ctx.temperature).add_(
                    g
                ).mul_(p).neg_()
            else:
                dz.exp_().mul_(-g)
            dz.scatter_add_(-1, targets[part, None], g)
            if not in_place:
                grad[part] = dz
        return grad, None, None, None


def log_probs_and_entropy(
    logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """log softmax(logits/τ)[target] and the entropy of softmax(logits/τ) in nats: (T,) each, in fp32 or better, both differentiable once.

    `logits` (T, V) of any float type, `targets` (T,) int64 in [0, V), `temperature` τ > 0. Never holds a second (T, V); the gradient of the
    logits, in their own type, is the one that the backward pass makes. A logit of −inf forbids its token and has no gradient.
    """
    log_probs, entropy = _Score.apply(logits, targets, temperature, with_entropy)  # pyright: ignore[reportGeneralTypeIssues]
    return log_probs, entropy if with_entropy else None


def log_probs_from_logits(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits/τ)[target]: logits (T, V), targets (T,) int64 -> (T,). See `log_probs_and_entropy`."""
    return log_probs_and_entropy(logits, targets, temperature, with_entropy=False)[0]


@torch.no_grad()
def sum_of_squared_probs(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Σ_v π(v)², the chance that two samples agree: logits (T, V) -> (T,), without a graph. What the optimal token baseline needs."""
    parts = (_scaled(part, temperature) for part in logits.split(_chunk_rows(logits)))
    return torch.cat([((2 * z).logsumexp(-1) - 2 * z.logsumexp(-1)).exp() for z in parts])
