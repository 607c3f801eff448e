"""Weights that engines load one after the other, in mid-response, while the others generate."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from rlctl.runtime.cluster.channels import PublishedWeights
from rlctl.runtime.cluster.engines import Engine, failure_reason
from rlctl.runtime.model.engine_weights import Selection


@dataclass(frozen=True, eq=False)
class _Load:
    """Load of the weights of `version` that has begun."""

    engine: Engine
    handle: Any  # of the engine then
    result: ray.ObjectRef
    version: int
    began: float


class RollingUpdate:
    """Update of the engines of a pool to published weights, one engine at a time.

    Each engine reads the weights from Ray's object store while the trainer continues. `timeout_s`
    limits the load of one engine.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.weights: PublishedWeights | None = None
        self._total_s = self._popped_s = 0.0  # each is written by one thread
        self._loading: _Load | None = None

    @property
    def is_loading(self) -> bool:
        """True while an engine loads weights."""
        return self._loading is not None

    def pop_seconds(self) -> float:
        """Return the seconds that engines have spent with loads since the last call."""
        before, self._popped_s = self._popped_s, self._total_s
        return self._popped_s - before

    def wait(self, seconds: float) -> None:
        """Wait until the load of an engine is done, at most `seconds`."""
        load = self._loading
        if load is None:
            time.sleep(seconds)
        else:
            ray.wait([load.result], timeout=seconds)

    def advance(
        self, engines: Sequence[Engine], version: int, on_failed: Callable[[Engine, str], object]
    ) -> list[Engine]:
        """Finish the load of an engine or begin the next; return the engines that can generate.

        `version` is that of the published weights in the group; `on_failed` gets an engine that
        cannot load them, and the reason.
        """
        self._finish(on_failed)
        stale = [engine for engine in engines if is_stale(engine, version)]
        if stale and self._loading is None:
            weights = self.weights  # another thread may publish the next ones at any time
            assert weights is not None, "advance comes after the first weights"
            # An engine that has just started has no weights at all.
            engine = min(stale, key=lambda engine: engine.version)
            selection = Selection.ALL if engine.version < 0 else Selection.CHANGING
            buckets = weights.buckets_for(selection)
            result = engine.handle.load_stored.remote(buckets, weights.version)
            self._loading = _Load(engine, engine.handle, result, version, time.monotonic())
        busy = None if self._loading is None else self._loading.engine
        return [
            engine
            for engine in engines
            if engine.ready and engine.version >= 0 and engine is not busy
        ]

    def _finish(self, on_failed: Callable[[Engine, str], object]) -> None:
        """End the load that has begun if it is done, too late, or its engine is lost."""
        load = self._loading
        if load is None:
            return
        if load.engine.handle is not load.handle:  # lost, and perhaps started again
            self._loading = None
            return
        is_done = bool(ray.wait([load.result], timeout=0)[0])
        if not is_done and time.monotonic() - load.began < self.timeout_s:
            return
        self._loading = None
        reason: str | None = f"it did not load its weights within {self.timeout_s:g} s"
        if is_done:
            reason = failure_reason(load.result)
        if reason is None:
            load.engine.version = load.version
            self._total_s += ray.get(load.result)
        else:
            on_failed(load.engine, reason)


def is_stale(engine: Engine, version: int) -> bool:
    """Return whether a ready engine that stays lacks the weights of `version`."""
    return engine.ready and not engine.draining and engine.version != version
