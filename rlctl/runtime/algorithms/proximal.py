"""Approximate proximal policy between those of the engine and in training."""

from __future__ import annotations

import torch
from torch import Tensor

from rlctl.runtime.algorithms.sampled_tokens import SampledTokens


@torch.no_grad()
def proximal(tokens: SampledTokens) -> Tensor:
    """Return the log-probs of an approximate proximal policy: (T,), without a graph.

    log π_prox = log π_rollout + α·(log π_train − log π_rollout) with α = s/(s + 1), where s is the
    staleness of a token and π_train the policy in training (A-3PO: arXiv 2512.06547, and AReaL's
    `loglinear`). It takes the update as one step: the weights before it are s of s + 1 steps from
    those of the engine to those in training. A token of the newest weights (s = 0) has π_rollout.
    """
    assert tokens.staleness is not None
    alpha = tokens.staleness / (tokens.staleness + 1)
    return tokens.rollout_log_probs + alpha * tokens.log_ratio
