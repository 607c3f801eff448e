"""Rollout engines that behave like one and survive the loss of single ones, and their pool."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace

import ray

from rlctl.runtime.cluster.engine_processes import EngineProcesses
from rlctl.runtime.cluster.live_engines import LiveEngines
from rlctl.runtime.cluster.membership import Membership
from rlctl.runtime.cluster.pool import PoolSpec
from rlctl.runtime.cluster.pool_engine import OpenTurn, failure_reason, place
from rlctl.runtime.rollout.requests import Completion, Request, Slice
from rlctl.runtime.workers.rollout import RolloutSpec
from rlctl.tracking.tracker import Event

_PAUSE_S = 0.1  # if no engine has anything to do


class EngineGroup(LiveEngines):
    """Engines that share requests. Those of a lost engine move to another, and it is restarted.

    Tokens do not depend on which engine generates them, except for rounding: a row's random stream
    is a function of the seed and the row's number.
    """

    def exchange(
        self, requests: Sequence[Request], limit: Slice, cancelled: Collection[int] = ()
    ) -> list[Completion]:
        """See `TurnEngines`. The open requests of a lost engine move to another one.

        Requests with equal affinity go to the same engine while it lives.
        """
        turns = [*self.unplaced, *map(OpenTurn.of, requests)]
        self.unplaced = [turn for turn in turns if turn.request.key not in cancelled]
        for engine in self.pool.engines:
            engine.cancel(cancelled)
        self.restart_lost()
        ready = self.ready_engines()
        new, self.unplaced = place(self.unplaced, self.pool.engines, ready)
        began = time.monotonic()
        calls = {
            engine: engine.call("exchange", requests, limit, engine.pop_cancelled())
            for engine, requests in new.items()
            if engine.turns or engine.cancelled
        }
        if not calls:
            time.sleep(_PAUSE_S)
            return []
        completions: list[Completion] = []
        ended = _times(list(calls.values()), began + self.pool.spec.call_timeout_s)
        for engine, result in calls.items():
            reason = failure_reason(result, self.pool.spec.call_timeout_s, began)
            if reason is None:
                engine.num_failures = 0
                finished: list[Completion] = ray.get(result)
                completions += engine.receive(finished)
                engine.count(finished, began, ended.get(result, time.monotonic()))
            else:
                self.mark_failed(engine, reason)
        self.pool.change_members()
        return completions


def _times(results: list[ray.ObjectRef], deadline: float) -> dict[ray.ObjectRef, float]:
    """Return the times, those of `time.monotonic`, at which results come until the `deadline`."""
    times: dict[ray.ObjectRef, float] = {}
    while results:
        left_s = max(0.0, deadline - time.monotonic())
        done, results = ray.wait(results, timeout=left_s, fetch_local=False)
        if not done:
            break
        times |= dict.fromkeys(done, time.monotonic())
    return times


class EnginePool:
    """Pool of rollout engines, each in processes in the same `bundles`, one bundle for a node."""

    def __init__(
        self,
        spec: PoolSpec,
        restart_timeout_s: float,
        event: Event,
        bundles: Sequence[int] = (1,),
        trainer_device: str | None = None,  # "cpu" or "cuda"; None: as the engines'
    ) -> None:
        self.name = spec.name
        self.trainer_device = trainer_device
        self.engines = EngineProcesses(spec, restart_timeout_s, bundles)
        self.event = event
        self._membership: Membership | None = None

    def spawn(self, spec: RolloutSpec) -> EngineGroup:
        """Start an engine in every process, asynchronously; `EngineGroup.wait` waits for them.

        From then on, engines are added and drained by requests in the folder of the log.
        """
        spec = replace(spec, trainer_device=self.trainer_device)
        group = EngineGroup(self.engines, spec, self.event)
        log = self.engines.spec.rank_info.log_path
        if log is not None:
            self._membership = Membership(self.engines, spec, log.parent, self.event)
        return group

    def end_changes(self) -> None:
        """Take no more requests to change the number of engines."""
        if self._membership is not None:
            self._membership.close()
            self._membership = None

    @property
    def nodes(self) -> list[str]:
        """The machines of each engine."""
        return [engine.node for engine in self.engines.engines]

    def close(self) -> None:
        """Kill the engines and release their devices."""
        self.end_changes()
        self.engines.close()
