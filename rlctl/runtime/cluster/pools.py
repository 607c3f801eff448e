"""Process pools of a run, and the pool of this process alone: `--inline`, for debuggers."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.workers.dispatch import Arguments, Dispatch, Worker
from rlctl.runtime.workers.pool_process import Process

if TYPE_CHECKING:
    from rlctl.runtime.cluster.engine_group import EnginePool
    from rlctl.runtime.workers.trace import TraceSpec

# A controller with R relays holds about R² references to values per step: 16 for 1,024 ranks.
RANKS_PER_RELAY = 64

W = TypeVar("W", bound=Worker)


class Pool(Protocol):
    """Processes that host workers, each with one device."""

    def spawn(self, role: str, worker: type[W], *args: object, **kwargs: object) -> W:
        """Build `worker(rank_info, *args, **kwargs)`, most often with a spec, in every process.

        Returns the worker itself if it is in this process, else a handle of the group.
        """
        ...

    @property
    def nodes(self) -> list[str]:
        """The node of each process, by rank."""
        ...

    def start_trace(self, spec: TraceSpec, ranks: Sequence[int] | None) -> None:
        """Start a trace in the processes of these ranks; None: in all."""
        ...

    def write_trace(self, prefix: Path, ranks: Sequence[int] | None) -> list[Path]:
        """End the traces that `start_trace` started; return their files, `PREFIX-RANK.json`."""
        ...

    def interrupt(self) -> None:
        """Interrupt the calls of the processes that only read, from now on; from any thread."""

    def close(self) -> None:
        """Stop the processes and release their devices."""
        ...


@dataclass(frozen=True)
class Pools:
    """Pools of a run: worker pools by name, and the pool of separate rollout engines."""

    workers: Mapping[str, Pool]
    engines: EnginePool | None = None  # None: the engine runs in the actor's processes
    judge: Pool | None = None  # of the judge that the run serves itself

    def interrupt(self) -> None:
        """Interrupt the calls of all worker pools that only read."""
        for pool in self.workers.values():
            pool.interrupt()

    def nodes(self) -> dict[str, list[str]]:
        """Return the nodes of each pool, by pool name."""
        nodes = {name: pool.nodes for name, pool in self.workers.items()}
        return nodes if self.engines is None else nodes | {self.engines.name: self.engines.nodes}


class InlinePool(Pool):
    """In-process pool: `spawn` returns the worker itself."""

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
        return [self.process.call(self.role, method, *each) for each in calls]
