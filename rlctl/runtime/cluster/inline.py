"""Pool of one process, this one: for `--inline`, debuggers and profilers."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlctl.runtime.cluster.pools import Pool, W
from rlctl.runtime.rank_info import RankInfo
from rlctl.runtime.workers.dispatch import Arguments, Dispatch
from rlctl.runtime.workers.process import Process
from rlctl.runtime.workers.trace import TraceSpec


class InlinePool(Pool):
    """Pool without processes of its own: `spawn` returns the worker itself."""

    def __init__(self, rank_info: RankInfo) -> None:
        self.process = Process(rank_info)
        self.process.join(self.process.address())

    def spawn(self, role: str, worker: type[W], *args: object, **kwargs: object) -> W:
        self.process.build(role, worker, *args, **kwargs)
        return self.process.workers[role]

    def start_trace(self, spec: TraceSpec, ranks: Sequence[int] | None) -> None:
        if ranks is None or 0 in ranks:
            self.process.start_trace(spec)

    def write_trace(self, prefix: Path, ranks: Sequence[int] | None) -> list[Path]:
        return [self.process.write_trace(prefix)] if ranks is None or 0 in ranks else []

    @property
    def nodes(self) -> list[str]:
        """The name of this machine."""
        return [socket.gethostname()]

    def close(self) -> None:
        """Close the workers and leave the process group."""
        self.process.leave()


class InlineTransport:
    """Implements `Transport`: the only worker of a role, in this process."""

    world_size = 1

    def __init__(self, role: str, process: Process) -> None:
        self.role = role
        self.process = process

    def send(
        self, method: str, mode: Dispatch, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """See `Transport`. One worker gets the whole batch in every mode."""
        del mode
        return self.process.call(self.role, method, args, kwargs)

    def send_each(self, method: str, calls: Sequence[Arguments]) -> list[Any]:
        """See `Transport`."""
        return [self.process.call(self.role, method, *call) for call in calls]
