"""What a pool is, and a pool of one: its workers live in this process, a call is a call. Breakpoints and profilers work."""

from __future__ import annotations

import socket
from typing import Any, Protocol, TypeVar

from rlctl.runtime.rank_info import RankInfo
from rlctl.runtime.workers.process import Process

W = TypeVar("W")


class Pool(Protocol):
    """Where workers live."""

    def spawn(self, role: str, worker: type[W], *args: Any) -> W:
        """Build `worker(place, *args)` in every process. What comes back answers like one worker of that type."""
        ...

    @property
    def nodes(self) -> list[str]:
        """The machine of each process, in the order of ranks."""
        ...

    def close(self) -> None: ...


class InlinePool:
    """Implements `Pool` without processes."""

    def __init__(self, rank_info: RankInfo) -> None:
        self.process = Process(rank_info)
        self.process.join(self.process.address())

    def spawn(self, role: str, worker: type[W], *args: Any) -> W:
        """The worker itself."""
        self.process.build(role, worker, args)
        return self.process.workers[role]

    @property
    def nodes(self) -> list[str]:
        return [socket.gethostname()]

    def close(self) -> None:
        self.process.leave()
