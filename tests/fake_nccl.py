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

    def __init__(
        self, result: Future[Any], received: list[tuple[SecondTensor, Future[list[torch.Tensor]]]]
    ) -> None:
        self.result, self.received = result, received

    def is_completed(self) -> bool:
        return self.result.done()

    def wait(self) -> bool:
        for tensor, values in self.received:
            tensor.arriving = values
        return True


class FakeNCCL:
    """Replacement of `torch.distributed.ProcessGroupNCCL`. A thread has the GPU `gpu.number`."""

    class Options:
        """Its settings, of which the timeout is used."""

        _timeout = timedelta(seconds=60)

    gpu: ClassVar[Any] = threading.local()
    num_communicators: ClassVar[int] = 0
    num_calls: ClassVar[int] = 0  # of all ranks

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

    def broadcast(self, tensor: Any, source: int) -> FakeWork:
        FakeNCCL.num_calls += 1
        group = self._group(tensor)
        if source == self.rank:
            return FakeWork(self._stream.submit(group.broadcast(tensor.held, source).wait), [])
        received = torch.empty_like(tensor.held)
        tensor.held.view(torch.uint8).fill_(_POISON)

        def receive() -> list[torch.Tensor]:
            group.broadcast(received, source).wait()
            return [received]

        result = self._stream.submit(receive)
        return FakeWork(result, [(tensor, result)])

    def allgather(self, outputs: list[Any], tensor: Any) -> FakeWork:
        FakeNCCL.num_calls += 1
        group = self._group(tensor)
        received = [torch.empty_like(output.held) for output in outputs]

        result = self._stream.submit(lambda: group.allgather(received, tensor.held).wait())
        later = [self._stream.submit(lambda value=value: [value]) for value in received]
        return FakeWork(result, list(zip(outputs, later, strict=True)))

    def abort(self) -> None:
        self._stream.shutdown(wait=False, cancel_futures=True)

    def _group(self, tensor: Any) -> Any:
        """Check the tensor, and connect at the first call."""
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
