"""Transport from a worker handle to the processes of a pool."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any, Protocol

import ray

from rlctl.errors import InternalError
from rlctl.runtime.batch import Batch
from rlctl.runtime.workers.dispatch import Arguments, Dispatch, join, split


class Gather(Protocol):
    """Wait for one result per process within a deadline; `what` names the call in errors."""

    def __call__(self, results: list[ray.ObjectRef], what: str) -> list[Any]: ...


class GroupTransport:
    """Implements `Transport`: the workers of one role, one in each of `processes`."""

    def __init__(
        self, role: str, processes: list[Any], gather: Gather, balanced: bool, order: Lock
    ) -> None:
        self.role = role
        self.order = order  # of calls from several threads: equal in all processes of a pool
        self.processes = processes
        self.world_size = len(processes)
        self.gather = gather
        self.balanced = balanced  # split rows by compute cost

    def send(
        self, method: str, mode: Dispatch, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """See `Transport`. Raises RlctlError when a worker fails or exceeds its deadline."""
        if mode is Dispatch.SPLIT:
            return self._send_split(method, args, kwargs)
        if mode is Dispatch.EACH:
            items, *rest = args
            own = self.send_each(method, [(([item], *rest), kwargs) for item in items])
            return [item for each in own for item in each]
        processes = self.processes if mode is Dispatch.BROADCAST else self.processes[:1]
        with self.order:
            results = [each.call.remote(self.role, method, args, kwargs) for each in processes]
        return self.gather(results, f"{self.role}.{method}")[0]

    def send_each(self, method: str, calls: Sequence[Arguments]) -> list[Any]:
        """See `Transport`. Raises the errors of `send`."""
        with self.order:
            results = [
                process.call.remote(self.role, method, args, kwargs)
                for process, (args, kwargs) in zip(self.processes, calls, strict=True)
            ]
        return self.gather(results, f"{self.role}.{method}")

    def _send_split(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        batch, *rest = args
        if not isinstance(batch, Batch):
            raise InternalError(
                f"{self.role}.{method} splits its first argument, which must be a batch, "
                f"not {type(batch).__name__}"
            )
        parts = split(batch, len(self.processes), self.balanced)
        sent = batch.without_local()
        shards = [sent] if len(parts) == 1 else sent.chunk(parts)
        results = self.send_each(method, [((shard, *rest), kwargs) for shard in shards])
        return join(results, parts, batch)
