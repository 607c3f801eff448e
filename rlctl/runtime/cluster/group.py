"""Transports from a worker handle to the processes of a pool.

Per-token values of results stay in Ray's object store on the node of the worker that made them: a
call returns them as a separate object, which the caller owns and does not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from threading import Lock
from typing import Any, Protocol

import ray
import torch
from torch import Tensor

from rlctl.errors import InternalError
from rlctl.runtime.base.batch import Batch, Prompts
from rlctl.runtime.base.stored_fields import Fields, PackedRows, attach, detach
from rlctl.runtime.workers.dispatch import Arguments, Dispatch, join, split, split_groups

# Results of a call that have fewer bytes in total are sent with their values: the controller
# computes with them at once.
INLINE_BYTES = 2**20
# Likewise those of one worker: Ray would keep smaller ones in the caller's memory anyway.
_INLINE_BYTES_OF_WORKER = 2**16


class Gather(Protocol):
    """Wait for one result per process within a deadline; `what` names the call in errors."""

    def __call__(self, results: list[ray.ObjectRef], what: str) -> list[Any]: ...


class StoredShard:
    """Implements `Shard`: fields in Ray's object store."""

    def __init__(self, stored: ray.ObjectRef) -> None:
        self.stored = stored
        self._fields: Fields | None = None

    def fetch(self) -> Fields:
        """See `Shard`."""
        fields = self._fields
        if fields is None:
            stored: Any = ray.get(self.stored)
            fields = self._fields = stored
        return fields

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredShard, (self.stored,)


@dataclass(eq=False)
class GroupTransport:
    """Implements `Transport`: the workers of one role, one in each of `processes`."""

    role: str
    processes: Sequence[Any]
    gather: Gather
    balanced: bool  # split rows by compute cost
    order: Lock  # of calls from several threads: equal in all processes of a pool
    ranks_per_row: int = 1

    def __post_init__(self) -> None:
        self.world_size = len(self.processes)
        self.inline_bytes = inline_bytes_of(self.world_size)

    def send(
        self, method: str, mode: Dispatch, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """See `Transport`. Raises RlctlError when a worker fails or exceeds its deadline."""
        if mode in (Dispatch.SPLIT, Dispatch.GROUPS, Dispatch.RANKS):
            batch, *rest = args
            if not isinstance(batch, Batch):
                raise InternalError(
                    f"{self.role}.{method} splits its first argument, which must be a batch, "
                    f"not {type(batch).__name__}"
                )
            parts = self._split(batch, mode)
            return self.send_rows(method, batch, parts, rest, kwargs)
        if mode is Dispatch.EACH:
            items, *rest = args
            results = self.send_each(method, [(([item], *rest), kwargs) for item in items])
            return [item for result in results for item in result]
        return self._send_same(method, mode, args, kwargs)

    def send_each(self, method: str, calls: Sequence[Arguments]) -> list[Any]:
        """See `Transport`. Raises the errors of `send`."""
        with self.order:
            results = [
                process.call.remote(self.role, method, args, kwargs)
                for process, (args, kwargs) in zip(self.processes, calls, strict=True)
            ]
        return self.gather(results, f"{self.role}.{method}")

    def send_rows(
        self,
        method: str,
        batch: Batch,
        parts: Sequence[Tensor],
        rest: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call `method` with the rows of each part (N,) on its workers; join the results."""
        times = self.world_size // len(parts)
        shards = [shard for shard in chunks(batch, parts) for _ in range(times)]
        with self.order:
            results = [
                process.call_detached.options(num_returns=2).remote(
                    self.role, method, (shard, *rest), kwargs, self.inline_bytes
                )
                for process, shard in zip(self.processes, shards, strict=True)
            ]
        return self._join(results, method, parts, batch)

    def _join(
        self,
        results: Sequence[tuple[ray.ObjectRef, ray.ObjectRef]],
        method: str,
        parts: Sequence[Tensor],
        batch: Batch,
    ) -> Any:
        """Join detached results, one per part (N,); their values remain where they are.

        Of several workers with the same part, the results of the first are used.
        """
        rests = self.gather([rest for _, rest in results], f"{self.role}.{method}")
        attached = [
            attach(rest, StoredShard(values))
            for rest, (values, _) in zip(rests, results, strict=True)
        ]
        return join(attached[:: len(attached) // len(parts)], parts, batch)

    def _split(self, batch: Batch, mode: Dispatch) -> list[Tensor]:
        if mode is Dispatch.RANKS:
            return split(batch, self.world_size, self.balanced)
        num_parts = self.world_size // self.ranks_per_row
        if mode is Dispatch.GROUPS and isinstance(batch, Prompts):
            return split_groups(batch, num_parts)
        return split(batch, num_parts, self.balanced)

    def _send_same(
        self, method: str, mode: Dispatch, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call `method` with the same arguments; return the first worker's result."""
        processes = self.processes if mode is Dispatch.BROADCAST else self.processes[:1]
        with self.order:
            results = [each.call.remote(self.role, method, args, kwargs) for each in processes]
        return self.gather(results, f"{self.role}.{method}")[0]


def inline_bytes_of(num_workers: int) -> int:
    """Return the bytes of token fields from which on a worker's result is stored."""
    return max(INLINE_BYTES // num_workers, min(INLINE_BYTES, _INLINE_BYTES_OF_WORKER))


def chunks(batch: Batch, parts: Sequence[Tensor]) -> list[Batch]:
    """Return the rows of each part (N,), without the fields that stay on the controller."""
    sent = batch.without_local()
    if len(parts) == 1:
        return [sent]
    return sent.chunk(parts)


class Relay:
    """Forwards calls to some processes of a large pool, and joins their results.

    With it, the controller's work and memory do not grow with the number of processes.
    """

    def __init__(self, processes: Sequence[Any], gather: Gather, inline_bytes: int) -> None:
        self.processes = processes
        self.gather = gather
        self.inline_bytes = inline_bytes  # of the pool, see `inline_bytes_of`

    def send(
        self, role: str, method: str, mode: Dispatch, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call `method` with the same arguments, as `GroupTransport` does."""
        return self._transport(role).send(method, mode, args, kwargs)

    def send_each(self, role: str, method: str, calls: Sequence[Arguments]) -> list[Any]:
        """Call `method` with different arguments on each process."""
        return self._transport(role).send_each(method, calls)

    def send_rows(
        self,
        role: str,
        method: str,
        batch: Batch,
        sizes: Sequence[int],
        rest: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> tuple[dict[str, PackedRows] | None, Any]:
        """Call `method` on the processes, in order, with the next `sizes[i]` rows for part i.

        Adjacent processes share a part where there are fewer parts. Returns the result detached.
        """
        parts = list(torch.arange(len(batch)).split(list(sizes)))
        transport = self._transport(role)
        transport.inline_bytes = self.inline_bytes
        return detach(transport.send_rows(method, batch, parts, rest, kwargs), self.inline_bytes)

    def _transport(self, role: str) -> GroupTransport:
        return GroupTransport(role, self.processes, self.gather, False, Lock())


@dataclass(eq=False)
class RelayedTransport(GroupTransport):
    """Implements `Transport` with relays as processes; relay i serves the next `sizes[i]` ranks.

    `ranks_per_row` divides all sizes.
    """

    sizes: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.world_size = sum(self.sizes)
        self.inline_bytes = inline_bytes_of(self.world_size)
        ends = torch.tensor([0, *self.sizes]).cumsum(0).tolist()
        self.ranks = [slice(start, end) for start, end in pairwise(ends)]

    def send_each(self, method: str, calls: Sequence[Arguments]) -> list[Any]:
        with self.order:
            results = [
                relay.send_each.remote(self.role, method, calls[ranks])
                for relay, ranks in zip(self.processes, self.ranks, strict=True)
            ]
        gathered = self.gather(results, f"{self.role}.{method}")
        return [result for each in gathered for result in each]

    def send_rows(
        self,
        method: str,
        batch: Batch,
        parts: Sequence[Tensor],
        rest: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        """See `GroupTransport`; parts: (N,)."""
        times = self.world_size // len(parts)  # ranks with the same part; they have one relay
        each = [parts[ranks.start // times : ranks.stop // times] for ranks in self.ranks]
        joined = [torch.cat(list(these)) for these in each]
        sizes = [[len(part) for part in these] for these in each]
        shards = chunks(batch, joined)
        with self.order:
            results = [
                relay.send_rows.options(num_returns=2).remote(
                    self.role, method, shard, rows, rest, kwargs
                )
                for relay, shard, rows in zip(self.processes, shards, sizes, strict=True)
            ]
        return self._join(results, method, joined, batch)

    def _send_same(
        self, method: str, mode: Dispatch, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        relays = self.processes if mode is Dispatch.BROADCAST else self.processes[:1]
        with self.order:
            results = [each.send.remote(self.role, method, mode, args, kwargs) for each in relays]
        return self.gather(results, f"{self.role}.{method}")[0]
