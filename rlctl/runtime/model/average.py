"""Exponential moving average of a model's weights, on each rank for its shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rlctl.runtime.model.sharding import local_part, reshard


class Average:
    """The average of the trained parameters; it starts as a copy of them.

    It is float32, sharded as they are. Frozen parameters never differ, so they have none.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.values: dict[str, Any] = {
            name: parameter.detach().to(torch.float32, copy=True)
            for name, parameter in self._parameters()
        }

    @torch.no_grad()
    def update(self, decay: float) -> None:
        """Replace the average by `decay`·average + (1 − `decay`)·weights."""
        for name, parameter in self._parameters():
            local_part(self.values[name]).lerp_(local_part(parameter).float(), 1 - decay)

    @torch.no_grad()
    def restart(self) -> None:
        """Make the average equal to the weights."""
        self.update(0.0)

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Give the model the averaged weights within the block; a copy keeps the other ones."""
        weights = {
            name: local_part(parameter.detach()).clone() for name, parameter in self._parameters()
        }
        self._set(self.values)
        try:
            yield
        finally:
            self._set(weights)

    @torch.no_grad()
    def _set(self, values: Mapping[str, Any]) -> None:
        for name, parameter in self._parameters():
            local_part(parameter).copy_(local_part(values[name]))

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        reshard(self.model)  # else FSDP would use the weights that it has gathered
        return (pair for pair in self.model.named_parameters() if pair[1].requires_grad)
