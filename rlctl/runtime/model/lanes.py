"""Copies between host and device beside the device's other operations."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class Lane:
    """Copies in one direction, on a stream of their own on CUDA, and else at once."""

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
