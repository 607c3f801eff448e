"""Orders of the prompts in an epoch, selected by `data.sampler`.

A sampler is a function `(num_prompts, epoch, seed) -> order`, a permutation (num_prompts,) int64.
It must depend on these arguments only, so that a resumed run continues in the same order.
"""

from __future__ import annotations

import torch
from torch import Tensor


def random_order(num_prompts: int, epoch: int, seed: int) -> Tensor:
    """Return a different random permutation (N,) of N = `num_prompts` for each epoch."""
    return torch.randperm(
        num_prompts, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    )


def sequential_order(num_prompts: int, epoch: int, seed: int) -> Tensor:
    """Return the order of the files, (N,) for N = `num_prompts`, in every epoch."""
    del epoch, seed
    return torch.arange(num_prompts)
