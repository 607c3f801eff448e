"""Floating-point operations of training, for the model FLOPs utilization (MFU)."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from rlctl.runtime.model.costs import Costs
from rlctl.runtime.workers.process_memory import PEAK
from rlctl.tracking.metrics import Max, Mean, Metrics

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


def device_usage(
    config: PretrainedConfig, lengths: list[int], seconds: float, name: str
) -> Metrics:
    """Return the peak of memory, and model FLOPs utilization (MFU) of an update.

    MFU is weighted by `seconds`: merged, it is the useful work divided by the device time.
    """
    metrics: Metrics = {"perf/max_memory_allocated_gb": Max(PEAK.pop() / 2**30)}
    costs, peak = Costs.from_config(config), peak_flops(torch.cuda.get_device_name())
    if costs is not None and peak is not None:
        metrics[f"perf/mfu/{name}"] = Mean(costs.training_flops(lengths) / peak, seconds)
    return metrics
