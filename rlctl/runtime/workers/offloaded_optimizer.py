"""Optimizer whose state is in host memory between updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from rlctl.runtime.model.activation_offload import Lane
from rlctl.runtime.model.sharding import local_part
from rlctl.runtime.workers.optimizers import BLOCK


class Offloaded(Optimizer):
    """Mixin: the state is in host memory between steps.

    Blocks of parameters are updated one after another by the optimizer's step, so the results
    are bitwise those without offload, as long as the update of a parameter depends on no other one.
    On CUDA the state of the next block arrives, and that of the previous one leaves, while a block
    is updated.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters; the state of at most two blocks is on the device at a time."""
        groups = self.param_groups
        work = [(group, block) for group in groups for block in _blocks(group["params"])]
        device = local_part(work[0][1][0]).device
        arriving = Lane(device)
        leaving = Lane(device)
        hosts = _fetch(self.state, work[0][1], arriving)
        on_device: list[Tensor] = []
        for number, (group, block) in enumerate(work):
            arriving.wait()
            everything = group["params"]
            group["params"] = block
            self.param_groups = [group]
            try:
                super().step(closure)
            finally:
                group["params"] = everything
                self.param_groups = groups
            leaving.synchronize()  # the previous block has left: free what it had on the device
            on_device.clear()
            on_device += _store(self.state, block, hosts, leaving)
            if number + 1 < len(work):
                hosts = _fetch(self.state, work[number + 1][1], arriving)
        leaving.synchronize()


_Hosts = dict[tuple[Tensor, str], Tensor]  # tensors in host memory by parameter and name


def _fetch(state: Mapping[Any, Any], block: Sequence[Tensor], lane: Lane) -> _Hosts:
    """Start to copy the state of `block`, parameters (N, ...), to the device.

    Returns the tensors (N, ...) in host memory; none before the first step.
    """
    hosts: _Hosts = {}
    with lane.block():
        for parameter, name, value in _tensors(state, block):
            hosts[parameter, name] = value
            state[parameter][name] = value.to(lane.device, non_blocking=True)
    return hosts


def _store(
    state: Mapping[Any, Any], block: Sequence[Tensor], hosts: _Hosts, lane: Lane
) -> list[Tensor]:
    """Start to copy the state of `block`, parameters (N, ...), to host memory.

    Returns the tensors (N, ...) on the device, which must live until the copies are complete.
    """
    lane.follow()
    on_device: list[Tensor] = []
    with lane.block():
        for parameter, name, value in _tensors(state, block):
            host = hosts.get((parameter, name))
            if host is None:
                host = _on_host(value)
            local_part(host).copy_(local_part(value), non_blocking=True)
            state[parameter][name] = host
            on_device.append(value)
    return on_device


def _tensors(
    state: Mapping[Any, Any], block: Sequence[Tensor]
) -> Iterator[tuple[Tensor, str, Tensor]]:
    """Yield parameter, name and value (N, ...) of all state but scalars, which stay in place."""
    for parameter in block:
        of_parameter: dict[str, Any] = state.get(parameter, {})
        for name, value in list(of_parameter.items()):
            if isinstance(value, Tensor) and value.dim() > 0:
                yield parameter, name, value


def _on_host(value: Tensor) -> Tensor:
    """Return a copy (N, ...) in host memory, which CUDA can copy while it computes."""
    host = value.to("cpu")
    if local_part(value).device.type != "cuda":
        return host
    if isinstance(host, DTensor):
        if type(host._local_tensor) is Tensor:  # quantized state has no pinned memory
            host._local_tensor = host._local_tensor.pin_memory()
        return host
    return host.pin_memory() if type(host) is Tensor else host


def _blocks(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield parameters (N, ...) in order, in blocks of at most `BLOCK` elements, or of one."""
    block: list[Tensor] = []
    size = 0
    for parameter in parameters:
        if block and size + local_part(parameter).numel() > BLOCK:
            yield block
            block = []
            size = 0
        block.append(parameter)
        size += local_part(parameter).numel()
    yield block
