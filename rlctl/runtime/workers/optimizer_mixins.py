"""Mixins of optimizers whose state is not that of float32 weights, for any number of ranks.

`RowBlocks`: quantized state of torchao (Dettmers et al. 2022, arXiv 2110.02861). torchao cuts each
rank's shard of a weight into blocks of 256 values with one scale each, which depend on the number
of ranks. Here no block crosses a row of a weight: FSDP shards rows, so a checkpoint can be loaded
on any number of ranks.

`SplitWeights`: weights in bfloat16 that train like float32 ones, whose other 16 bits are optimizer
state. An update at a learning rate of 1e-6 is below half the distance between two values of
bfloat16 for nearly all weights, so rounding would discard it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from rlctl.runtime.model.sharding import is_quantized, local_part

_FEWEST_ROWS = 256  # of a quantized weight: each rank has some


class RowBlocks(Optimizer):
    """Mixin for optimizers of torchao: quantize only weights whose rows are whole blocks."""

    block_size: int

    def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
        """Return the zeros that one moment of `p` (N, ...) starts from."""
        local = local_part(p.detach())
        whole = all(
            tensor.dim() > 1 and tensor[0].numel() % self.block_size == 0 for tensor in (p, local)
        )
        if not whole or p.shape[0] < _FEWEST_ROWS:
            return torch.zeros_like(p)
        subclass: Any = self
        zeros: Tensor = subclass._subclass_zeros(local, signed, self.block_size)
        return _like(p, zeros, p.shape)


class Eager(Optimizer):
    """Mixin: step without torch.compile, which needs a compiler and minutes on a CPU."""

    def step(self, closure: Any = None) -> Any:
        """Update all parameters."""
        with torch.compiler.set_stance("force_eager"):
            super().step(closure)


def without_subclasses(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of one parameter with codes and scales in place of quantized tensors.

    They share memory with the state, so that a checkpoint loaded into them is in it.
    """
    found: dict[str, Any] = {}
    for name, value in state.items():
        if is_quantized(value):
            quantized: Any = local_part(value)
            rows = value.shape[0]
            scale = quantized.scale.view(quantized.shape[0], -1)
            found[f"{name}.codes"] = _like(value, quantized.codes, value.shape)
            found[f"{name}.scale"] = _like(value, scale, torch.Size((rows, scale.shape[1])))
        else:
            found[name] = value
    return found


def _like(value: Tensor, local: Tensor, shape: torch.Size) -> Tensor:
    """Return `local` (N, ...), this rank's part of a tensor of `shape`, sharded as `value` is."""
    if not isinstance(value, DTensor):
        return local
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, value.device_mesh, value.placements, run_check=False, shape=shape, stride=strides
    )


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
                group["params"] = [value]
                self.param_groups = [group]
                try:
                    super().step(closure)
                finally:
                    group["params"] = parameters
                    self.param_groups = groups
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
