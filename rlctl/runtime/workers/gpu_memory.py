"""Memory of the GPU of a worker's process: torch's allocator, and peaks by phase."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_SETTINGS = "expandable_segments:True"
_VARIABLE, _OLD_VARIABLE = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"


def use_expandable_segments() -> None:
    """Let torch's segments grow, so that micro-batches of ever new sizes leave no gaps.

    Settings in the environment are kept. vLLM has none in the memory that it releases asleep.
    """
    if _VARIABLE in os.environ or _OLD_VARIABLE in os.environ:
        return
    os.environ[_VARIABLE] = _SETTINGS
    if torch.cuda.is_initialized():  # with `--inline` the plan has, and torch has read its settings
        torch._C._accelerator_setAllocatorSettings(_SETTINGS)


class PeakMemory:
    """Largest memory that torch has allocated on the GPU, phase by phase."""

    def __init__(self) -> None:
        self._largest = self._asleep = 0

    @contextmanager
    def phase(self, device: str) -> Iterator[None]:
        """Include the block, without the memory of an engine that sleeps at its start and end.

        Nothing is counted on a CPU, and for GPUs that only Ray counts.
        """
        if device != "cuda" or not torch.cuda.is_available():
            yield
            return
        self._begin()
        yield
        self._end()

    def pop(self) -> int:
        """Return the most bytes in the phases since the last call, and in the present one."""
        self._end()
        largest, self._largest = self._largest, 0
        self._begin()
        return largest

    def _begin(self) -> None:
        torch.cuda.reset_peak_memory_stats()
        self._asleep = sleeping_bytes()

    def _end(self) -> None:
        counted = torch.cuda.max_memory_allocated() - min(self._asleep, sleeping_bytes())
        self._largest = max(self._largest, counted)


PEAK = PeakMemory()


def sleeping_bytes() -> int:
    """Return the bytes of vLLM that are unmapped while it sleeps; torch counts them all the same.

    Written for vLLM 0.32.0.
    """
    module = sys.modules.get("vllm.device_allocator.cumem")
    allocator = module and module.CuMemAllocator.instance
    if allocator is None:
        return 0
    blocks = allocator.pointer_to_data.values()
    return sum(block.handle[1] for block in blocks if block.is_asleep)
