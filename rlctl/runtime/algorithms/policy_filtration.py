"""Policy filtration (PF-PPO, arXiv 2409.06957): rows of a step drawn again by their scores."""

from __future__ import annotations

import torch
from torch import Tensor

from rlctl.recipes import schema

_SMALLEST = 1e-8  # so that every row may be drawn
_BEST = 0.4  # weight of max_random
_OTHER = 0.1  # its weight of other rows


def draw_rows(scores: Tensor, config: schema.PFPPO, seed: int) -> Tensor:
    """Return B row numbers drawn with replacement from `scores` (B,): (B,) int64."""
    match config.reweight_method:
        case "pow":
            weights = scores.abs() ** config.weight_pow
        case "max_min":
            weights = ((scores == scores.max()) | (scores == scores.min())).float()
        case "max_random":
            weights = torch.where(scores == scores.max(), _BEST, _OTHER)
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(
        weights.float() + _SMALLEST, len(scores), replacement=True, generator=generator
    )
