"""NCCL over gloo between second devices (`tests/second_device.py`), with what gloo does not have.

It connects at the first call, does not block the host, and refuses CPU tensors, types that NCCL
lacks, and two ranks on one GPU. Received values exist only after `wait` of their work.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist

from tests.second_device import SecondTensor

_UNSUPPORTED = (torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.complex64)
_POISON = 0xFF


class FakeWork:
    """Work on a stream: `wait` lets later operations on its tensors wait, and not the host."""

    def __init__(self, result: Future[Any], tensors: list[SecondTensor]) -> None:
        self.result, self.tensors = result, tensors

    def wait(self) -> bool:
        for tensor in self.tensors:
            tensor.arriving = self.result
        return True


class FakeNCCL:
    """Replacement of `torch.distributed.ProcessGroupNCCL`. A thread has the GPU `gpu.number`."""

    class Options:
        """Its settings, of which links use the timeout."""

        _timeout = timedelta(seconds=60)

    gpu: ClassVar[Any] = threading.local()
    num_communicators: ClassVar[int] = 0
    num_calls: ClassVar[int] = 0  # of senders

    def __init__(self, store: Any, rank: int, size: int, options: FakeNCCL.Options) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.timeout = options._timeout
        self.number = self.gpu.number
        self._connected: Any = None
        self._stream = ThreadPoolExecutor(1)

    @classmethod
    def reset(cls) -> type[Self]:
        """Set the counts to 0."""
        cls.num_communicators = cls.num_calls = 0
        return cls

    def send(self, tensors: list[Any], to: int, tag: int) -> FakeWork:
        FakeNCCL.num_calls += 1
        group, held = self._group(tensors), [tensor.held for tensor in tensors]
        return FakeWork(self._stream.submit(lambda: group.send(held, to, tag).wait()), [])

    def recv(self, tensors: list[Any], source: int, tag: int) -> FakeWork:
        group, targets = self._group(tensors), [tensor.held for tensor in tensors]
        received = [torch.empty_like(tensor) for tensor in targets]
        for tensor in targets:
            tensor.view(torch.uint8).fill_(_POISON)

        def receive() -> list[torch.Tensor]:
            group.recv(received, source, tag).wait()
            return received

        return FakeWork(self._stream.submit(receive), tensors)

    def abort(self) -> None:
        self._stream.shutdown(wait=False, cancel_futures=True)

    def _group(self, tensors: list[Any]) -> Any:
        """Check the tensors, and connect at the first call."""
        for tensor in tensors:
            if not isinstance(tensor, SecondTensor):
                raise RuntimeError("Tensors must be CUDA and dense")
            if tensor.dtype in _UNSUPPORTED:
                raise RuntimeError(f"unsupported data type for NCCL: {tensor.dtype}")
        if self._connected is None:
            self.store.set(f"gpu-{self.rank}", str(self.number))
            others = [rank for rank in range(self.size) if rank != self.rank]
            for other in others:
                if int(self.store.get(f"gpu-{other}")) == self.number:
                    pair = f"rank {self.rank} and rank {other} both on CUDA device"
                    raise RuntimeError(f"Duplicate GPU detected : {pair} {self.number}")
            self._connected = dist.ProcessGroupGloo(self.store, self.rank, self.size, self.timeout)
            FakeNCCL.num_communicators += self.rank == 0
        return self._connected
