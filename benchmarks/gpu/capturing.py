"""Recorder of decoding steps by device: CUDA graphs, or on a CPU the steps themselves."""

from __future__ import annotations

from collections.abc import Callable

from rlctl.runtime.rollout.graphs import Capturer, CudaGraphs


class Direct:
    """Recorder whose calls run the work again; see `Capturer`."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return `work`."""
        return work

    def clear(self) -> None:
        """Do nothing."""


def capturer_of(device: str) -> Capturer:
    """Return the recorder of a device."""
    return CudaGraphs() if device == "cuda" else Direct()
