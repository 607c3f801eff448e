"""One token for each row of logits."""

from __future__ import annotations

import torch
from torch import Tensor

from rlctl.runtime.rollout.engine import SamplingParams


def sample(
    logits: Tensor, uniforms: Tensor | None, params: SamplingParams
) -> tuple[Tensor, Tensor]:
    """Tokens and their log-probs, (R,) each, from logits (R, V) and one uniform number in [0, 1) a row (None for greedy).

    Sampling inverts the cumulative distribution: one random number a row, where Gumbel noise needs one a token of the vocabulary. In
    float32 that is exact to 1e-7 of probability mass. Log-probs are those of `log_softmax(logits / temperature)` over all tokens.
    """
    if params.temperature == 0 or uniforms is None:
        best, tokens = logits.float().max(-1)
        return tokens, best - logits.float().logsumexp(-1)
    probs = torch.softmax(
        logits / params.temperature if params.temperature != 1 else logits, -1, dtype=torch.float32
    )
    if params.top_p == 1 and not 0 < params.top_k < probs.shape[1]:
        cumulative = probs.cumsum(-1)
        tokens = _invert(cumulative, uniforms * cumulative[:, -1])
    else:
        tokens = _sample_top(probs, uniforms, params)
    return tokens, probs.gather(1, tokens[:, None]).squeeze(1).log()


def _sample_top(probs: Tensor, uniforms: Tensor, params: SamplingParams) -> Tensor:
    """From the `top_k` likeliest tokens (R, V) -> (R,), and of those from the fewest that hold at least `top_p` of their mass."""
    top_k = min(params.top_k, probs.shape[1]) if params.top_k > 0 else probs.shape[1]
    likeliest, ids = probs.topk(top_k, sorted=True)
    cumulative = likeliest.cumsum(-1)
    enough = params.top_p * cumulative[:, -1:]
    last = torch.searchsorted(cumulative, enough).clamp_max(
        top_k - 1
    )  # the first token at which the mass is reached
    mass = cumulative.gather(1, last).squeeze(1)
    return ids.gather(1, _invert(cumulative, uniforms * mass)[:, None]).squeeze(1)


def _invert(cumulative: Tensor, mass: Tensor) -> Tensor:
    """The first column at which `cumulative` (R, V) exceeds `mass` (R,): (R,). A token without probability is never that column.

    `mass` may round up to all there is, where no column exceeds it: it is held just below.
    """
    mass = torch.minimum(mass, torch.nextafter(cumulative[:, -1], mass.new_zeros(())))
    return (
        torch.searchsorted(cumulative, mass[:, None], right=True)
        .squeeze(1)
        .clamp_max(cumulative.shape[1] - 1)
    )
