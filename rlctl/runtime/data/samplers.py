"""Orders of the prompts in an epoch, and samplers with a state, selected by `data.sampler`.

An order is a function `(num_prompts, epoch, seed) -> order`, a permutation (num_prompts,) int64.
It must depend on these arguments only, so that a resumed run continues in the same order. A sampler
with a state is a class; see `StatefulSampler`. See `mixing` for files with weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rlctl.plugins import load, load_with_params
from rlctl.recipes import schema

Order = Callable[[int, int, int], Tensor]


class StatefulSampler(Protocol):
    """Source of prompts that depends on earlier scores.

    It is built as `Class(num_prompts, seed)`, and with the keyword `params` if it has settings.
    Its state is saved in checkpoints; the same state and observations must give the same draws.
    """

    def draw(self, count: int, avoid: Collection[int] = ()) -> list[int]:
        """Return the indices of `count` different prompts.

        Those in `avoid` are in the same batch already; they come last.
        """
        ...

    def observe(self, prompts: Sequence[int], scores: Sequence[float]) -> None:
        """Learn the mean score of the responses to each of `prompts`."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return what is known of the prompts' difficulty; `x` is logged as `sampler/x`."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        ...


@dataclass(frozen=True)
class Sampling:
    """The configured sampler: an order, or a class of stateful samplers."""

    order: Order
    stateful: Callable[[int, int], StatefulSampler] | None = None

    @classmethod
    def from_config(cls, data: schema.Data) -> Sampling:
        """Load `data.sampler`; without `data.shuffle` the prompts keep the order of the files."""
        if not data.shuffle:
            return cls(sequential_order)
        settings = data.sampler_params
        sampler = load_with_params("samplers", data.sampler, settings, "data.sampler_params")
        if isinstance(load("samplers", data.sampler), type):
            return cls(sequential_order, sampler)
        return cls(sampler)


def random_order(num_prompts: int, epoch: int, seed: int) -> Tensor:
    """Return a different random permutation (N,) of N = `num_prompts` for each epoch."""
    return torch.randperm(
        num_prompts, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    )


def sequential_order(num_prompts: int, epoch: int, seed: int) -> Tensor:
    """Return the order of the files, (N,) for N = `num_prompts`, in every epoch."""
    del epoch, seed
    return torch.arange(num_prompts)
