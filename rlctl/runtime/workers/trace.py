"""Trace of one process by torch's profiler: Chrome trace JSON, which Perfetto opens."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class TraceSpec:
    """Contents of a trace, besides the operations and their times."""

    stacks: bool  # Python stacks
    memory: bool  # allocations
    shapes: bool  # of the inputs


class Trace:
    """Running trace of this process. Starts when it is built."""

    def __init__(self, spec: TraceSpec, device: str) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.profile = torch.profiler.profile(
            activities=activities,
            record_shapes=spec.shapes,
            profile_memory=spec.memory,
            with_stack=spec.stacks,
        )
        self.profile.start()

    def write(self, file: Path) -> None:
        """Stop the trace and write it to `file`, which appears when it is complete."""
        self.profile.stop()
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f".{file.name}")
        self.profile.export_chrome_trace(str(partial))
        os.replace(partial, file)
