"""Use of a GPU: peak of memory and model FLOPs (MFU)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from transformers import PretrainedConfig

from rlctl.runtime.base.metrics import Max, Mean, Metrics
from rlctl.runtime.model.costs import Costs

if TYPE_CHECKING:
    from rlctl.runtime.base.batch import Rollouts
    from rlctl.runtime.workers.learner import Learner


class PeakMemory:
    """Largest memory that torch has allocated on the GPU, phase by phase, and reserved for it."""

    def __init__(self) -> None:
        self._largest = self._asleep = self._reserved = 0

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

    def pop(self) -> tuple[int, int]:
        """Return the most bytes in the phases since the last call, and in the present one.

        The second number also has the memory that torch keeps for later tensors.
        """
        self._end()
        most = self._largest, self._reserved
        self._largest = self._reserved = 0
        self._begin()
        return most

    def _begin(self) -> None:
        torch.cuda.reset_peak_memory_stats()
        self._asleep = sleeping_bytes()

    def _end(self) -> None:
        counted = torch.cuda.max_memory_allocated() - min(self._asleep, sleeping_bytes())
        self._largest = max(self._largest, counted)
        self._reserved = max(self._reserved, torch.cuda.max_memory_reserved())


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


# Dense bfloat16 FLOP/s from the vendors' data sheets; the first name that is part of the device's.
_PEAKS = {
    "H200 NVL": 835.5e12,
    "H100 NVL": 835.5e12,
    "H100 PCIe": 756e12,
    "H200": 989.4e12,
    "H100": 989.4e12,
    "H800": 989.4e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "B200": 2250e12,
}


def peak_flops(device_name: str) -> float | None:
    """Return the peak dense bfloat16 FLOP/s of the device; None if it is not in the table."""
    return next((peak for name, peak in _PEAKS.items() if name in device_name), None)


def usage_of_update(learner: Learner, batch: Rollouts, seconds: float) -> list[Metrics]:
    """Return the use of the GPU in an update of `batch`, and in the passes before it."""
    before = learner.of_passes
    learner.of_passes = []
    lengths = batch.num_tokens.tolist()
    seconds *= learner.model.ranks_per_row
    return [device_usage(learner.model.hf.config, lengths, seconds, learner.name), *before]


def device_usage(
    config: PretrainedConfig, lengths: list[int], seconds: float, name: str
) -> Metrics:
    """Return the peak of memory, and model FLOPs utilization (MFU) of an update."""
    allocated, reserved = PEAK.pop()
    return {
        "perf/max_memory_allocated_gb": Max(allocated / 2**30),
        "perf/max_memory_reserved_gb": Max(reserved / 2**30),
        **utilization(config, lengths, seconds, name),
    }


def utilization(
    config: PretrainedConfig, lengths: list[int], seconds: float, name: str, passes: int = 3
) -> Metrics:
    """Return the MFU of `passes`: 3 are those of an update, 1 is a forward pass.

    MFU is weighted by `seconds`: merged, it is the useful work divided by the device time.
    """
    costs = Costs.from_config(config)
    peak = peak_flops(torch.cuda.get_device_name())
    if costs is None or peak is None:
        return {}
    flops = costs.training_flops(lengths) * passes / 3
    return {f"perf/mfu/{name}": Mean(flops / peak, seconds)}
