"""Parameters in host memory between the phases in which their model computes.

As with verl's `param_offload`, a device has one such model at a time, and none in generation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar
from weakref import WeakSet

import torch
from torch import Tensor, nn

from rlctl.runtime.model.sharding import local_part, reshard

_HOST = ("cpu",)  # devices whose tensors are in host memory


@dataclass(eq=False)
class _Block:
    """Storage of one or more tensors. Its memory moves; the tensors, and views of them, stay."""

    data: Tensor  # (N,) uint8: all its bytes on the device
    changes: bool  # False: the copy in host memory remains valid
    host: Tensor | None = None  # (N,) uint8

    def copy(self) -> None:
        """Copy the bytes to host memory, if it does not have them."""
        if self.host is None or self.changes:
            if self.host is None:
                pinned = self.data.device.type == "cuda"
                self.host = torch.empty_like(self.data, device="cpu", pin_memory=pinned)
            self.host.copy_(self.data, non_blocking=True)

    def fill(self) -> None:
        """Allocate memory on the device, and start to fill it."""
        assert self.host is not None, "it was copied before"
        self.data.untyped_storage().resize_(self.host.numel())
        self.data.copy_(self.host, non_blocking=True)


class PhaseOffload:
    """Parameters of a model that are on its device from `enter` until another model enters.

    Those of a model that is not offloaded stay there; its `enter` only makes another model leave.
    """

    _on_device: ClassVar[WeakSet[PhaseOffload]] = WeakSet()  # one at most

    def __init__(self, model: nn.Module, offloads: bool) -> None:
        self.model = model
        self.offloads = offloads
        self.used_by_engine = False  # which computes with the same tensors
        self._blocks: dict[int, _Block] = {}
        self.enter()
        self.add(model.parameters())

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Let `tensors` (N, ...), which are on the device, move with the parameters."""
        if not self.offloads:
            return
        for tensor in tensors:
            storage = local_part(tensor.detach()).untyped_storage()
            if storage.device.type in _HOST:
                continue
            data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            block = self._blocks.setdefault(storage._cdata, _Block(data, changes=False))
            block.changes |= tensor.requires_grad or not isinstance(tensor, nn.Parameter)

    def enter(self) -> None:
        """Bring the parameters to the device, after those of another model have left it."""
        if self in self._on_device:
            return
        self.clear_device()
        for block in self._blocks.values():
            block.fill()
        if self.offloads:
            self._on_device.add(self)

    def begin_generation(self) -> None:
        """Leave only what the engine computes with on the device."""
        if self.used_by_engine:
            self.enter()
        else:
            self.clear_device()

    @staticmethod
    def clear_device() -> None:
        """Move the parameters that are on the device, if any, to host memory."""
        if not PhaseOffload._on_device:
            return
        found = PhaseOffload._on_device.pop()
        reshard(found.model)  # gathered weights would stay
        for block in found._blocks.values():
            block.copy()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        for block in found._blocks.values():
            block.data.untyped_storage().resize_(0)  # nothing may read it before `fill`
