"""Sampling of one token per row of logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rlctl.runtime.base.ops import any_algorithms
from rlctl.runtime.rollout.requests import Decoding

_BLOCK = 64  # tokens
_MIN_BLOCKED = 2**16  # elements from which on two small sums are faster than one large


def sample(logits: Tensor, uniforms: Tensor | None, params: Decoding) -> tuple[Tensor, Tensor]:
    """Sample tokens (R,) int64 and their log-probs (R,) float32 from logits (R, V).

    `uniforms` (R,) are random numbers in [0, 1), None for greedy decoding. Inverts the cumulative
    distribution, which needs one random number per row instead of V for Gumbel noise; in float32 it
    is exact to 1e-7 of probability mass. Log-probs are those of `log_softmax(logits / temperature)`
    over all V tokens.
    """
    logits = logits.float()  # before the division: half precision would round its result
    if params.temperature == 0 or uniforms is None:
        best, tokens = logits.max(-1)
        return tokens, best - logits.logsumexp(-1)
    if params.temperature != 1:
        logits = logits / params.temperature
    probs = torch.softmax(logits, -1)
    if params.top_p == 1 and not 0 < params.top_k < probs.shape[1]:
        tokens = _sample_all(probs, uniforms)
    else:
        tokens = _sample_top(probs, uniforms, params)
    return tokens, probs.gather(1, tokens[:, None]).squeeze(1).log()


def _sample_all(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Sample tokens from probs (R, V) with uniforms (R,): (R,) int64.

    With many tokens it samples a block of them, then a token of that block: a cumulative sum of all
    adds them one by one.
    """
    num_rows, size = probs.shape
    if probs.numel() < _MIN_BLOCKED:
        cumulative = _cumulative(probs)
        return _invert(cumulative, uniforms * cumulative[:, -1])
    if size % _BLOCK:
        probs = F.pad(probs, (0, -size % _BLOCK))
    blocks = probs.view(num_rows, -1, _BLOCK)
    cumulative = _cumulative(blocks.sum(-1))  # (R, V / block)
    mass = uniforms * cumulative[:, -1]
    block = _invert(cumulative, mass)
    before = F.pad(cumulative, (1, 0)).gather(1, block[:, None]).squeeze(1)
    inside = _cumulative(blocks[torch.arange(num_rows, device=block.device), block])
    return (block * _BLOCK + _invert(inside, mass - before)).clamp_max(size - 1)


def _sample_top(probs: Tensor, uniforms: Tensor, params: Decoding) -> Tensor:
    """Sample tokens with top-k, then top-p: probs (R, V), uniforms (R,) -> (R,) int64.

    Top-p keeps the fewest of the top-k tokens that hold at least `top_p` of their mass.
    """
    top_k = probs.shape[1]
    if params.top_k > 0:
        top_k = min(params.top_k, top_k)
    top_probs, ids = probs.topk(top_k, sorted=True)
    cumulative = _cumulative(top_probs)
    enough = params.top_p * cumulative[:, -1:]
    last = torch.searchsorted(cumulative, enough).clamp_max(
        top_k - 1
    )  # token that reaches the mass
    mass = cumulative.gather(1, last).squeeze(1)
    return ids.gather(1, _invert(cumulative, uniforms * mass)[:, None]).squeeze(1)


def _cumulative(probs: Tensor) -> Tensor:
    """Return the sums of each row up to each column, (R, V), always the same for the same row.

    torch refuses cumulative sums on a GPU with `trainer.deterministic`, because those of a single
    row may be added up in any order. Several rows are added up by one block of threads each.
    """
    if not probs.is_cuda or not torch.are_deterministic_algorithms_enabled():
        return probs.cumsum(-1)
    with any_algorithms():
        rows = probs if len(probs) > 1 else probs.expand(2, -1)
        return rows.cumsum(-1)[: len(probs)]


def _invert(cumulative: Tensor, mass: Tensor) -> Tensor:
    """Return the first column where `cumulative` (R, V) exceeds `mass` (R,): (R,) int64.

    Tokens of probability 0 are never selected. `mass` is kept just below the total, which it may
    reach by rounding: no column would exceed it.
    """
    mass = torch.minimum(mass, torch.nextafter(cumulative[:, -1], mass.new_zeros(())))
    column = torch.searchsorted(cumulative, mass[:, None], right=True).squeeze(1)
    return column.clamp_max(cumulative.shape[1] - 1)
