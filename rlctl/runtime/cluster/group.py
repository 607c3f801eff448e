"""A group of workers that answers like one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import ray

from rlctl.errors import RlctlError
from rlctl.runtime.batch import Batch
from rlctl.runtime.workers.dispatch import Dispatch, join, mode_of, split


class Gather(Protocol):
    """Waits for one answer a process, with a deadline; `what` names the call in an error."""

    def __call__(self, answers: list[ray.ObjectRef], what: str) -> list[Any]: ...


class WorkerGroup:
    """The workers of one role, one in each of `processes`. Its methods are the worker's; `@dispatch` says what becomes of a call."""

    def __init__(
        self, role: str, worker: type, processes: list[Any], gather: Gather, balanced: bool
    ) -> None:
        self._role = role
        self._worker = worker
        self._processes = processes
        self._gather = gather
        self._balanced = balanced

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)
        mode = mode_of(self._worker, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            if mode is Dispatch.SPLIT:
                return self._split(method, args, kwargs)
            processes = self._processes if mode is Dispatch.BROADCAST else self._processes[:1]
            answers = [
                process.call.remote(self._role, method, args, kwargs) for process in processes
            ]
            return self._gather(answers, f"{self._role}.{method}")[0]

        return call

    def _split(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        batch, *rest = args
        if not isinstance(batch, Batch):
            raise RlctlError(
                f"{self._role}.{method} splits its first argument, which must be a batch, not {type(batch).__name__}"
            )
        sent = batch.without_local()
        parts = split(batch, len(self._processes), self._balanced)
        shards = [sent] if len(parts) == 1 else sent.chunk(parts)
        answers = [
            process.call.remote(self._role, method, (shard, *rest), kwargs)
            for process, shard in zip(self._processes, shards, strict=True)
        ]
        return join(self._gather(answers, f"{self._role}.{method}"), parts, batch)
