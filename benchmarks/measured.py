"""Actor and engine that measure the memory of their weight syncs, for `weight_sync_memory`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlctl.recipes.role_table import ROLLOUT
from rlctl.runtime.rollout.hf import HFEngine
from rlctl.runtime.rollout.weight_sync import WeightChannel
from rlctl.runtime.workers.actor import ActorWorker, T
from rlctl.runtime.workers.dispatch import dispatch


def private_bytes() -> int:
    """Return the memory of this process that it shares with no other."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(each for each in lines if each.startswith("RssAnon")).split()[1]) * 1024


@contextmanager
def growth() -> Iterator[list[int]]:
    """Yield a list that gets the largest private memory within the block above that before it."""
    found, ended, before = [0], threading.Event(), private_bytes()

    def sample() -> None:
        while not ended.wait(0.001):
            found[0] = max(found[0], private_bytes() - before)

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        yield found
    finally:
        ended.set()
        sampler.join()


class MeasuredActor(ActorWorker):
    """Actor that measures its weight syncs."""

    grown = 0

    @dispatch(collect_fn=lambda _, results: [each for found in results for each in found])
    def send_weights(self, channel: WeightChannel[T]) -> list[T]:
        """See `ActorWorker`."""
        with growth() as found:
            sent = super().send_weights(channel)
        self.grown = found[0]
        return sent

    @dispatch(collect_fn=lambda _, results: max(results))
    def largest_growth(self) -> int:
        """Return the growth of the last sync; on a handle the largest of all ranks."""
        return self.grown


class MeasuredEngine(HFEngine):
    """Engine that measures its weight syncs."""

    grown = 0

    def load_weights(self, weights: Any) -> None:
        """See `HFEngine`."""
        with growth() as found:
            super().load_weights(weights)
        self.grown = found[0]


def engine_growth(process: Any) -> int:
    """Return the growth of the engine in a process of the pool."""
    return process.workers[ROLLOUT.name].engine.grown
