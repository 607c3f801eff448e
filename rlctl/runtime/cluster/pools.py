"""Process pools of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from rlctl.runtime.workers.dispatch import Worker

if TYPE_CHECKING:
    from rlctl.runtime.cluster.engine_group import EnginePool

W = TypeVar("W", bound=Worker)


class Pool(Protocol):
    """Processes that host workers, each with one device."""

    def spawn(self, role: str, worker: type[W], spec: object) -> W:
        """Build `worker(rank_info, spec)` in every process.

        Returns the worker where there is one, in this process, and a handle of the group otherwise.
        """
        ...

    @property
    def nodes(self) -> list[str]:
        """The machine of each process, by rank."""
        ...

    def close(self) -> None:
        """Stop the processes and release their devices."""
        ...


@dataclass(frozen=True)
class Pools:
    """The pools of one run: those of the workers by name, and that of separate rollout engines."""

    workers: Mapping[str, Pool]
    engines: EnginePool | None = None  # None: the engine runs in the actor's processes

    def nodes(self) -> dict[str, list[str]]:
        """Return the machines of each pool, by pool name."""
        nodes = {name: pool.nodes for name, pool in self.workers.items()}
        return nodes if self.engines is None else nodes | {self.engines.name: self.engines.nodes}
