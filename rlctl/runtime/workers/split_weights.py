"""Weights in bfloat16 that train like float32 ones: their other 16 bits are optimizer state.

An update at a learning rate of 1e-6 is below half the distance between two values of bfloat16 for
nearly all weights, so rounding would discard it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from rlctl.runtime.model.sharding import local_part

_LOW = "low_bits"  # of a float32 weight, minus those of the bfloat16 weight nearest to it
_SPACING = 2**16  # of bfloat16, in bits of float32


class SplitWeights(Optimizer):
    """Mixin: the optimizer updates float32 weights, of which the model has the nearest bfloat16.

    Moments are float32. A parameter is float32 only while it is updated, one after another.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters."""
        groups = self.param_groups
        for group in groups:
            parameters = group["params"]
            for weight in parameters:
                if weight.grad is None:
                    continue
                state = self.state.pop(weight, {})
                low = state.pop(_LOW, None)
                if low is None:
                    low = torch.zeros_like(weight, dtype=torch.int16)
                value = _joined(weight, low)
                if state:
                    self.state[value] = state
                group["params"], self.param_groups = [value], [group]
                try:
                    super().step(closure)
                finally:
                    group["params"], self.param_groups = parameters, groups
                _split(value, weight, low)
                self.state[weight] = {**self.state.pop(value), _LOW: low}


def _joined(weight: Tensor, low: Tensor) -> Tensor:
    """Return the float32 value (N, ...) of a weight (N, ...), with its gradient."""
    assert weight.grad is not None
    value = weight.detach().to(torch.float32, copy=True)
    value.grad = weight.grad.float()
    local_part(value).view(torch.int32).add_(local_part(low))
    return value


def _split(value: Tensor, weight: Tensor, low: Tensor) -> None:
    """Write a float32 `value` (N, ...) to its `weight` and its `low` bits; it is used up."""
    value.grad = None
    bits = local_part(value).view(torch.int32)
    nearest = bits.add(_SPACING // 2).bitwise_and_(-_SPACING)
    local_part(weight).copy_(nearest.view(torch.float32))
    local_part(low).copy_(bits.sub_(nearest))
