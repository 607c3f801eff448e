"""Exponential moving average of a model's weights, on each rank for its own shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rlctl.runtime.model.sharding import local_part, reshard


class Average:
    """The average of the trained parameters; it starts as a copy of them.

    It has their dtype and shards. Frozen parameters never differ, so they have none.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.values: dict[str, Any] = {
            name: parameter.detach().clone() for name, parameter in self._parameters()
        }

    @torch.no_grad()
    def update(self, decay: float) -> None:
        """Replace the average by `decay`·average + (1 − `decay`)·weights."""
        reshard(self.model)
        for name, parameter in self._parameters():
            local_part(self.values[name]).lerp_(local_part(parameter), 1 - decay)

    @torch.no_grad()
    def restart(self) -> None:
        """Make the average equal to the weights."""
        self.update(0.0)

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Give the model the averaged weights within the block; no second copy is made."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        reshard(self.model)  # else FSDP would use the weights that it has gathered
        for name, parameter in self._parameters():
            own, other = local_part(parameter), local_part(self.values[name])
            weights = own.clone()
            own.copy_(other)
            other.copy_(weights)

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return (pair for pair in self.model.named_parameters() if pair[1].requires_grad)
