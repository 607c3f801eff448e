"""Pool of one process, this one: for `--inline`, debuggers and profilers."""

from __future__ import annotations

import socket

from rlctl.runtime.cluster.pools import Pool, W
from rlctl.runtime.rank_info import RankInfo
from rlctl.runtime.workers.process import Process


class InlinePool(Pool):
    """Pool without processes of its own: `spawn` returns the worker itself."""

    def __init__(self, rank_info: RankInfo) -> None:
        self.process = Process(rank_info)
        self.process.join(self.process.address())

    def spawn(self, role: str, worker: type[W], spec: object) -> W:
        """See `Pool`."""
        self.process.build(role, worker, spec)
        return self.process.workers[role]

    @property
    def nodes(self) -> list[str]:
        """The name of this machine."""
        return [socket.gethostname()]

    def close(self) -> None:
        """Close the workers and leave the process group."""
        self.process.leave()
