"""In which order an epoch goes through the prompts: `data.sampler` names a function `(num_prompts, epoch, seed) -> order (num_prompts,)`.

It must depend on nothing else: a resumed run asks again for the order of the epoch that it stopped in.
"""

from __future__ import annotations

import torch
from torch import Tensor


def random_order(num_prompts: int, epoch: int, seed: int) -> Tensor:
    """Another permutation for each epoch."""
    return torch.randperm(
        num_prompts, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    )


def sequential_order(num_prompts: int, epoch: int, seed: int) -> Tensor:  # noqa: ARG001
    """As they stand in the files."""
    return torch.arange(num_prompts)
