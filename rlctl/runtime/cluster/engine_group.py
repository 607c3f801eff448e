"""Rollout engines that behave like one and survive the loss of single ones, and their pool."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import ray

from rlctl.runtime.batch import Prompts, Rollouts
from rlctl.runtime.cluster.engine_processes import EngineProcesses
from rlctl.runtime.cluster.engines import (
    Engine,
    OpenTurn,
    Request,
    failure_reason,
    place,
)
from rlctl.runtime.cluster.live_engines import LiveEngines
from rlctl.runtime.cluster.membership import Membership
from rlctl.runtime.cluster.pool import PoolSpec
from rlctl.runtime.rollout.requests import Completion, Slice
from rlctl.runtime.rollout.requests import Request as TurnRequest
from rlctl.runtime.rollout.sampling_params import max_in_flight, num_requests
from rlctl.runtime.workers.dispatch import join, split
from rlctl.runtime.workers.rollout import RolloutSpec
from rlctl.tracking.tracker import Event

logger = logging.getLogger(__name__)

_POLL_S = 1.0  # interval at which deadlines are checked


class EngineGroup(LiveEngines):
    """Engines that share the requests of a batch.

    Requests of a lost engine are reassigned and the engine is restarted. Responses do not depend on
    which engine generates them: a row's random stream is a function of the seed and the row's
    number, and the size of requests depends on the configured, not the live, number of engines.
    """

    def generate_sequences(
        self, prompts: Prompts, seed: int, validate: bool = False, greedy: bool = False
    ) -> Rollouts:
        """See `Actor`. Raises RlctlError if all engines are down for `restart_timeout_s`."""
        self.all_down_since = None
        num_parts = num_requests(self.rollout, len(prompts), self.pool.num_configured)
        parts = split(prompts, num_parts, balanced=False)
        shards = prompts.without_local().chunk(parts)
        self.waiting.extend(Request(number, shard) for number, shard in enumerate(shards))
        results: dict[int, Rollouts] = {}
        try:
            while len(results) < len(parts):
                self.restart_lost()
                for engine, request in self._assign(self.ready_engines()):
                    request.sent_at = time.monotonic()
                    call = engine.call_concurrently if self.rollout.mode == "async" else engine.call
                    args = (request.prompts, seed, validate, greedy)
                    engine.in_flight[call("generate_sequences", *args)] = request
                self._receive(results)
        finally:  # after an error, results in flight are discarded
            self.waiting.clear()
            for engine in self.pool.engines:
                engine.in_flight.clear()
            self.pool.change_members()
        return join([results[number] for number in range(len(parts))], parts, prompts)

    def exchange(
        self, requests: Sequence[TurnRequest], limit: Slice, cancelled: Collection[int] = ()
    ) -> list[Completion]:
        """See `TurnEngines`. The open requests of a lost engine move to another one.

        Requests with equal affinity go to the same engine while it lives.
        """
        self.unplaced += [OpenTurn.of(request) for request in requests]
        self.restart_lost()
        ready = self.ready_engines()
        self.unplaced = [turn for turn in self.unplaced if turn.request.key not in cancelled]
        for engine in self.pool.engines:
            engine.cancel(cancelled)
        new, self.unplaced = place(self.unplaced, self.pool.engines, ready)
        began = time.monotonic()
        calls = {
            engine: engine.call("exchange", requests, limit, engine.pop_cancelled())
            for engine, requests in new.items()
            if engine.turns or engine.cancelled
        }
        if not calls:
            time.sleep(_POLL_S / 10)
            return []
        completions: list[Completion] = []
        for engine, result in calls.items():
            reason = failure_reason(result, self.pool.spec.call_timeout_s, began)
            if reason is None:
                engine.num_failures = 0
                finished: list[Completion] = ray.get(result)
                completions += engine.receive(finished)
                engine.count(
                    len(finished), sum(len(response.response_ids) for response in finished), began
                )
            else:
                self.mark_failed(engine, reason)
        self.pool.change_members()
        return completions

    def _assign(self, ready: Sequence[Engine]) -> Iterator[tuple[Engine, Request]]:
        """Yield the next requests, each with the least loaded ready engine that has capacity."""
        capacity = max_in_flight(self.rollout, self.pool.spec.rank_info.device)
        while self.waiting:
            free = [
                engine
                for engine in ready
                if not engine.draining and len(engine.in_flight) < capacity
            ]
            if not free:
                return
            yield min(free, key=lambda engine: engine.load), self.waiting.popleft()

    def _began(self, engine: Engine, request: Request) -> float:
        """Return when an engine began a request; in mode `sync` it generates one at a time."""
        if self.rollout.mode == "async":
            return request.sent_at
        return max(request.sent_at, engine.busy_until)

    def _receive(self, results: dict[int, Rollouts]) -> None:
        """Wait for any result or start and store the results; enforce the call timeout."""
        engines = self.pool.engines
        starting = [engine.start_result for engine in engines if engine.start_result is not None]
        in_flight = [result for engine in engines for result in engine.in_flight]
        if not starting and not in_flight:
            time.sleep(_POLL_S / 10)
            return
        ray.wait([*in_flight, *starting], timeout=_POLL_S)
        done: set[ray.ObjectRef] = set()
        if in_flight:
            done.update(ray.wait(in_flight, num_returns=len(in_flight), timeout=0)[0])
        now, limit = time.monotonic(), self.pool.spec.call_timeout_s
        for engine in engines:
            for result, request in list(engine.in_flight.items()):
                if result not in engine.in_flight:  # reassigned with another request of the engine
                    continue
                if result in done:
                    reason = failure_reason(result)
                    if reason is None:
                        part: Rollouts = ray.get(result)
                        results[engine.in_flight.pop(result).number] = part
                        engine.count(len(part), len(part.response_ids.values), request.sent_at)
                        engine.num_failures = 0
                    else:
                        self.mark_failed(engine, reason)
                elif now - self._began(engine, request) > limit:
                    self.mark_failed(engine, f"it returned no result within {limit:g} s")


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
        self.name, self.trainer_device = spec.name, trainer_device
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
