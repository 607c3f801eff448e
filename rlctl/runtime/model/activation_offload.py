"""Activations in host memory until the backward pass needs them."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel

from rlctl.runtime.model.padded_rows import decoder_of


class Lane:
    """Copies in one direction, on a separate stream on CUDA, and else at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def block(self) -> AbstractContextManager[Any]:
        """Return a block whose copies run beside the device's other operations."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def follow(self) -> None:
        """Make later copies wait for the operations that the device has so far."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def mark(self) -> torch.Event | None:
        """Return the end of the copies so far."""
        return None if self.stream is None else self.stream.record_event()

    def wait(self, mark: torch.Event | None = None) -> None:
        """Make the device's later operations wait for the copies so far, or for those to `mark`."""
        if self.stream is not None and mark is None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
        elif mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)

    def synchronize(self) -> None:
        """Wait until the copies so far are complete."""
        if self.stream is not None:
            self.stream.synchronize()


_LEAVING = 2**28  # bytes that are on their way to the host
_ARRIVING = 2**26  # bytes that are on their way back before they are needed


def offload_activations(hf: PreTrainedModel) -> None:
    """Keep what the decoder of `hf` saves for the backward pass in host memory."""
    decoder = decoder_of(hf)
    transfers = _Transfers()
    hooks = saved_tensors_hooks(transfers.pack, transfers.unpack)
    decoder.register_forward_pre_hook(lambda *_: hooks.__enter__())
    decoder.register_forward_hook(lambda *_: hooks.__exit__(), always_call=True)
    decoder.register_forward_hook(lambda *_: transfers.free(0), always_call=True)


class _Saved:
    """Tensor (N, ...) in host memory, and on the device again from shortly before its use."""

    def __init__(self, host: Tensor, previous: _Saved | None) -> None:
        self.host = host
        self.previous = None if previous is None else ref(previous)
        self.arriving: tuple[Tensor, Any] | None = None
        self.is_used = False


class _Transfers:
    """Copies of saved tensors, beside the computation on CUDA.

    A tensor lives until its copy is complete for the operations that follow, so that these may use
    its memory. The backward pass uses the last tensor first, and begins the copies of those before
    it. Strides are kept, so that it runs the same kernels.
    """

    def __init__(self) -> None:
        self._lanes: list[Lane] = []  # to the host, and back
        self._leaving: deque[tuple[Tensor, Any]] = deque()  # with the ends of their copies
        self._last: Any = lambda: None

    def pack(self, saved: Tensor) -> Tensor | _Saved:
        """Copy a tensor (N, ...) for the backward pass; weights, and those on a CPU, stay."""
        is_weight = isinstance(saved, nn.Parameter) or isinstance(saved._base, nn.Parameter)
        if is_weight or saved.device.type == "cpu":
            return saved
        self._lanes = self._lanes or [Lane(saved.device), Lane(saved.device)]
        out = self._lanes[0]
        host = torch.empty_like(saved, device="cpu", pin_memory=saved.device.type == "cuda")
        out.follow()
        with out.block():
            host.copy_(saved, non_blocking=True)
        packed = _Saved(host, self._last())
        self._leaving.append((saved.detach(), out.mark()))
        self.free(_LEAVING)
        self._last = ref(packed)
        return packed

    def free(self, keep: int) -> None:
        """Free copied tensors, the oldest first, until at most `keep` bytes are on their way."""
        while self._leaving and sum(tensor.nbytes for tensor, _ in self._leaving) > keep:
            self._lanes[0].wait(self._leaving.popleft()[1])

    def unpack(self, packed: Tensor | _Saved) -> Any:
        """Return the tensor (N, ...) on its device, and begin to fetch those saved before it."""
        if isinstance(packed, Tensor):
            return packed
        tensor, copied = self._fetch(packed)
        packed.arriving = None
        packed.is_used = True
        self._lanes[1].wait(copied)
        ahead = 0
        before = packed.previous
        while ahead < _ARRIVING and before is not None and (found := before()) is not None:
            if not found.is_used:  # an operation takes its tensors in any order
                self._fetch(found)
            ahead += found.host.nbytes
            before = found.previous
        return tensor

    def _fetch(self, packed: _Saved) -> tuple[Tensor, Any]:
        """Begin to copy a tensor to the device, unless that has begun; return it and the end."""
        if packed.arriving is not None:
            return packed.arriving
        back = self._lanes[1]
        # Memory of the operations' stream, whose earlier use of it ends before the copy begins.
        tensor = torch.empty_like(packed.host, device=back.device)
        back.follow()
        with back.block():
            tensor.copy_(packed.host, non_blocking=True)
        if back.stream is not None:
            tensor.record_stream(back.stream)
        packed.arriving = tensor, back.mark()
        return packed.arriving
