"""Tensor operations shared by all layers: masked moments, group statistics, log-probs, entropies.

Axes: B rows, R tokens of the longest response, T tokens of all rows, V vocabulary, G groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

EPS = 1e-8

# Elements per fp32 chunk of the logits: 64 MiB amortizes kernel launches on a GPU, 4 MiB fits the
# cache of a CPU.
_CHUNK_GPU = 2**24
_CHUNK_CPU = 2**20

# Replaces log p = −inf of a forbidden token, so that p·log p is 0 instead of NaN.
LOG_ZERO = -1e4


class PolicyOutputs(NamedTuple):
    """Outputs for T response tokens; None if not requested.

    A tuple, because FSDP of torch before 2.13 finds no tensors in a dataclass, and then does not
    gather the weights of the outermost module for the backward pass.
    """

    log_probs: Tensor  # (T,)
    entropy: Tensor | None  # (T,), nats
    sum_pi_squared: Tensor | None = None  # (T,): Σ_v π(v)², without a gradient
    candidates: Tensor | None = None  # (T, K): those of the sequences, or the most probable tokens
    candidate_log_probs: Tensor | None = None  # (T, K)


def ceil_div(a: int, b: int) -> int:
    """Return a / b rounded up."""
    return -(-a // b)


def to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """Return `x` (N, ...) on `device`.

    A copy to a GPU goes through pinned memory, so that the host does not wait for earlier work.
    """
    if torch.device(device).type == "cuda" and x.device.type == "cpu":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


@contextmanager
def any_algorithms() -> Iterator[None]:
    """Allow algorithms within the block that `trainer.deterministic` does not: see each use."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Return Σ x·mask, a scalar, for the same shapes; masked NaN or inf is ignored."""
    return (torch.where(mask > 0, x, 0.0) * mask).sum()


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Return Σ x·mask / (Σ mask + 1e-8), a scalar, for the same shapes; 0 if all is masked."""
    return masked_sum(x, mask) / (mask.sum() + EPS)


def masked_var(x: Tensor, mask: Tensor) -> Tensor:
    """Return the unbiased variance of the n unmasked entries of `x` as a scalar.

    `x` and `mask` have the same shape. Raises ValueError for n ≤ 1.
    """
    n = float(mask.sum())
    if n <= 1:
        raise ValueError(f"a variance needs at least two unmasked tokens, got {n:g}")
    return masked_mean((x - masked_mean(x, mask)).square(), mask) * (n / (n - 1))


def masked_whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Return (x − μ)·rsqrt(σ² + 1e-8) with the moments of unmasked entries.

    `x`, `mask` and the result have the same shape, such as (B, R); masked entries are transformed
    too, not zeroed. Fewer than two unmasked entries have no deviation: they are not divided.
    """
    if float(mask.sum()) <= 1:
        return x - masked_mean(x, mask)
    return (x - masked_mean(x, mask)) * torch.rsqrt(masked_var(x, mask) + EPS)


@dataclass(frozen=True, eq=False)
class GroupStats:
    """Statistics of each row's group. A group of one row has mean 0 and std 1, as in GRPO."""

    mean: Tensor  # (B,)
    std: Tensor  # (B,), unbiased
    size: Tensor  # (B,) int64


def dense_groups(group: Tensor) -> tuple[Tensor, int]:
    """Map group ids (B,) int64 to 0 … G−1 (B,) int64; also return G.

    Rows of a group need not be adjacent.
    """
    unique, dense = group.unique(return_inverse=True)
    return dense, len(unique)


def group_sum(x: Tensor, dense: Tensor, num_groups: int) -> Tensor:
    """Sum the rows of each group: x (B, ...), dense (B,) from `dense_groups` -> (G, ...)."""
    return x.new_zeros(num_groups, *x.shape[1:]).index_add_(0, dense, x)


def group_stats(scores: Tensor, group: Tensor, counted: Tensor | None = None) -> GroupStats:
    """Return mean, unbiased std and size of each row's group, (B,) each.

    `scores` (B,) float, `group` (B,) int64 ids, `counted` (B,) bool: rows without a part in the
    statistics are False, at least one of each group is True; None is all rows. Computed in float64
    so that equal scores give a std of exactly 0: rounding errors would not be hidden by the 1e-6 in
    GRPO's denominator.
    """
    dense, num_groups = dense_groups(group)
    exact = scores.double()
    weight = torch.ones_like(exact) if counted is None else counted.double()
    size = group_sum(weight, dense, num_groups).long()
    mean = group_sum(weight * exact, dense, num_groups) / size
    squares = weight * (exact - mean[dense]).square()
    var = group_sum(squares, dense, num_groups) / (size - 1).clamp(min=1)
    single = size == 1
    mean = mean.masked_fill(single, 0.0)
    std = var.sqrt().masked_fill(single, 1.0)
    return GroupStats(mean[dense].to(scores.dtype), std[dense].to(scores.dtype), size[dense])


def lowest_if_missing(values: Tensor, group: Tensor) -> Tensor:
    """Return `values` (B,) with the lowest of its group (B,) for each NaN; 0 if it has no other."""
    dense, num_groups = dense_groups(group)
    lowest = values.new_full((num_groups,), torch.inf)
    lowest = lowest.scatter_reduce(0, dense, values.nan_to_num(nan=torch.inf), "amin")
    lowest = lowest.masked_fill(lowest.isinf(), 0.0)
    return torch.where(values.isnan(), lowest[dense], values)


def first_rows(group: Tensor) -> Tensor:
    """Return a mask (B,) of the first row of each of the groups (B,) int64 from 0."""
    rows = torch.arange(len(group), device=group.device)
    first = torch.full_like(rows, len(group)).scatter_reduce(0, group, rows, "amin")
    return first[group] == rows


def row_sum(x: Tensor, row: Tensor, num_rows: int) -> Tensor:
    """Sum the tokens of each row: x (T,), row (T,) int64 -> (num_rows,). Differentiable.

    Empty rows give 0.
    """
    return x.new_zeros(num_rows).index_add(0, row, x)


def row_mean(x: Tensor, mask: Tensor, row: Tensor, num_rows: int) -> Tensor:
    """Average the unmasked tokens of each row: x, mask, row (T,) -> (num_rows,).

    Rows without unmasked tokens give 0.
    """
    return row_sum(x * mask, row, num_rows) / row_sum(mask, row, num_rows).clamp(min=1.0)


def chunks_of(logits: Tensor) -> Iterator[slice]:
    """Yield slices of the rows of `logits` (T, V) to process at once; one if there are none."""
    rows = max(1, (_CHUNK_GPU if logits.is_cuda else _CHUNK_CPU) // max(1, logits.shape[-1]))
    return (slice(start, start + rows) for start in range(0, max(1, len(logits)), rows))


def scaled(logits: Tensor, temperature: float) -> Tensor:
    """Divide logits, such as (T, V), by the temperature in fp32 or better; copy only if needed."""
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return exact if temperature == 1.0 else exact / temperature


class _Score(torch.autograd.Function):
    """Chunked log-probs and entropies. Saves the logits and one number per token for backward.

    With p = softmax(z) and z = logits/τ:
    ∂log p_y/∂z_v = 1[v = y] − p_v and ∂H/∂z_v = −p_v·(log p_v + H).
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        """Map logits (T, V) and targets (T,) to log-probs (T,) and entropies (T,) or (0,)."""
        dtype = torch.promote_types(logits.dtype, torch.float32)
        log_norm = torch.empty(len(logits), dtype=dtype, device=logits.device)
        entropy = torch.empty_like(log_norm if with_entropy else log_norm[:0])
        for part in chunks_of(logits):
            z = scaled(logits[part], temperature)
            if not with_entropy:
                log_norm[part] = z.logsumexp(-1)
                continue
            # With d = z − max z: log Σ exp z = max z + log Σ exp d, and H = log Σ exp d − Σ p·d.
            top = z.amax(-1)
            d = (z - top[:, None]).clamp_(min=LOG_ZERO)
            weights = d.exp()
            total = weights.sum(-1)
            log_total = total.log()
            log_norm[part] = top + log_total
            entropy[part] = log_total - weights.mul_(d).sum(-1) / total
        picked = logits.gather(-1, targets[:, None]).squeeze(-1)
        ctx.save_for_backward(logits, targets, log_norm, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)  # an entropy that no loss uses costs nothing in backward
        return scaled(picked, temperature) - log_norm, entropy

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor, None, None, None]:
        """Map gradients (T,) each, or None, to the gradient (T, V) of the logits."""
        logits, targets, log_norm, entropy = ctx.saved_tensors
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_norm)
        grad = torch.empty_like(logits)
        in_place = grad.dtype == log_norm.dtype
        for part in chunks_of(logits):
            z = scaled(logits[part], ctx.temperature)
            g = grad_log_probs[part, None] / ctx.temperature
            out = grad[part] if in_place else torch.empty_like(z)
            if grad_entropy is not None:
                dz = torch.sub(z, log_norm[part, None], out=out)  # log p
                p = dz.clamp_(min=LOG_ZERO).exp()
                dz.add_(entropy[part, None]).mul_(grad_entropy[part, None] / ctx.temperature).add_(
                    g
                ).mul_(p).neg_()
            else:
                dz = torch.softmax(z, -1, out=out).mul_(-g)  # a single pass for p
            dz.scatter_add_(-1, targets[part, None], g)
            if not in_place:
                grad[part] = dz
        return grad, None, None, None


def log_probs_and_entropy(
    logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Return log softmax(logits/τ)[target] and the entropy of softmax(logits/τ) in nats, (T,) each.

    `logits` (T, V) of any float type, `targets` (T,) int64 in [0, V), `temperature` τ > 0. Results
    are in fp32 or better and differentiable once. No second (T, V) tensor is allocated, except the
    gradient of the logits in the backward pass. A logit of −inf forbids its token and receives no
    gradient. The entropy is None unless `with_entropy`.
    """
    apply: Any = _Score.apply  # its declared result is no tuple
    log_probs, entropy = apply(logits, targets, temperature, with_entropy)
    return log_probs, entropy if with_entropy else None


def log_probs_from_logits(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """Return log softmax(logits/τ)[target]: logits (T, V), targets (T,) int64 -> (T,).

    See `log_probs_and_entropy`.
    """
    return log_probs_and_entropy(logits, targets, temperature, with_entropy=False)[0]


def log_probs_of(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Return log softmax(logits/τ) of K tokens: logits (T, V), `ids` (T, K) int64 -> (T, K)."""
    z = scaled(logits, temperature)
    return z.gather(-1, ids) - z.logsumexp(-1, keepdim=True)


@torch.no_grad()
def sum_of_squared_probs(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return Σ_v π(v)²: logits (T, V) -> (T,), without a graph.

    The probability that two samples agree; used by the optimal token baseline (arXiv 2602.07078).
    """
    parts = (scaled(logits[part], temperature) for part in chunks_of(logits))
    return torch.cat([((2 * z).logsumexp(-1) - 2 * z.logsumexp(-1)).exp() for z in parts])


def divisors(number: int, below: int | None = None) -> list[int]:
    """Return the divisors of a number, those less than `below` if given."""
    small = [k for k in range(1, math.isqrt(number) + 1) if number % k == 0]
    return sorted(k for k in {*small, *(number // k for k in small)} if below is None or k < below)
