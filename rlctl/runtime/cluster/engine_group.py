"""A pool of rollout engines that behaves like one engine and survives the loss of single ones."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

import ray

from rlctl.errors import InternalError, RlctlError
from rlctl.runs.logs import format_tails
from rlctl.runtime.batch import Prompts, Rollouts
from rlctl.runtime.cluster.channels import StoreChannel, channel
from rlctl.runtime.cluster.engines import Engine, EngineProcesses, OpenTurn, Request, failure_reason
from rlctl.runtime.cluster.pool import gather
from rlctl.runtime.rollout.requests import Completion, Slice
from rlctl.runtime.rollout.requests import Request as TurnRequest
from rlctl.runtime.rollout.sampling_params import max_in_flight, num_requests
from rlctl.runtime.workers.dispatch import join, split
from rlctl.runtime.workers.rollout import RolloutSpec
from rlctl.tracking.tracker import Event

logger = logging.getLogger(__name__)

# Returns the engines lost, with reasons; None occurs on ranks other than the trainer's first.
SendWeights = Callable[[StoreChannel], dict[int, str] | None]

_MAX_FAILURES = 3  # engines that one request may be lost with before the run fails
_POLL_S = 1.0  # interval at which deadlines are checked


class EngineGroup:
    """Engines that share the requests of a batch.

    Requests of a lost engine are reassigned and the engine is restarted. Responses do not depend on
    which engine generates them: a row's random stream is a function of the seed and the row's
    number, and the size of requests depends on the configured, not the live, number of engines.
    """

    def __init__(self, pool: EngineProcesses, spec: RolloutSpec, event: Event) -> None:
        self.pool = pool
        self.spec = spec
        self.rollout = spec.sampling.rollout
        self.event = event
        self.version = 0  # of the trainer's weights
        self.num_syncs = 0
        self.all_down_since: float | None = None  # when the last ready engine was lost
        self._send_weights: SendWeights | None = None  # None: the engines' weights are stale
        self._unplaced: list[OpenTurn] = []  # of lost engines
        self._num_losses: Counter[int] = Counter()  # engines lost with a request, by its key
        for engine in pool.engines:
            pool.start(engine, spec)

    def wait(self) -> None:
        """Wait until all engines are built. Raises RlctlError if one fails to start."""
        engines = self.pool.engines
        starting = [each.start_result for each in engines if each.start_result is not None]
        gather(starting, "building the rollout engines", self.pool.spec.start_timeout_s, self._tail)
        for engine in engines:
            engine.start_result = None

    def mark_stale(self) -> None:
        """Require `update_weights` before the next `generate_sequences`: the policy changes."""
        self.version += 1
        self._send_weights = None

    def update_weights(self, send_weights: SendWeights) -> None:
        """Send the trainer's weights to every ready engine that lacks them.

        `send_weights` is kept until `mark_stale`, for engines that restart while they are needed.
        """
        self._send_weights = send_weights
        self.all_down_since = None
        self.pool.change_members()
        self._sync_weights(send_weights, deque())

    def generate_sequences(
        self, prompts: Prompts, seed: int, validate: bool = False, greedy: bool = False
    ) -> Rollouts:
        """See `Actor`. Raises RlctlError if all engines are down for `restart_timeout_s`."""
        send_weights = self._send_weights
        if send_weights is None:
            raise InternalError(
                "generate_sequences with stale engine weights: call update_weights before it"
            )
        self.all_down_since = None
        num_parts = num_requests(self.rollout, len(prompts), self.pool.num_configured)
        parts = split(prompts, num_parts, balanced=False)
        shards = prompts.without_local().chunk(parts)
        waiting = deque(Request(number, shard) for number, shard in enumerate(shards))
        results: dict[int, Rollouts] = {}
        try:
            while len(results) < len(parts):
                self._restart_lost(waiting)
                self._sync_weights(send_weights, waiting)
                for engine, request in self._assign(waiting):
                    request.sent_at = time.monotonic()
                    call = engine.call_concurrently if self.rollout.mode == "async" else engine.call
                    args = (request.prompts, seed, validate, greedy)
                    engine.in_flight[call("generate_sequences", *args)] = request
                self._receive(waiting, results)
        finally:  # after an error, results in flight are discarded
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
        send_weights = self._send_weights
        if send_weights is None:
            raise InternalError("exchange with stale engine weights: call update_weights before it")
        waiting, self._unplaced = [*self._unplaced, *map(OpenTurn.of, requests)], []
        self._restart_lost(deque())
        self._sync_weights(send_weights, deque())
        waiting, self._unplaced = [*waiting, *self._unplaced], []
        waiting = [each for each in waiting if each.request.key not in cancelled]
        ready = [each for each in self.pool.engines if each.version == self.version]
        members = [each for each in self.pool.engines if not each.draining]
        takers = [each for each in ready if not each.draining]
        if not takers:
            self._unplaced, waiting = waiting, []
        if not ready:
            time.sleep(_POLL_S / 10)
            return []
        new: dict[Engine, list[TurnRequest]] = {engine: [] for engine in ready}
        for turn in waiting:
            home = members[turn.request.affinity % len(members)]
            target = home if home in new else min(takers, key=lambda each: len(each.turns))
            new[target].append(turn.request)
            target.turns[turn.request.key] = turn
        began = time.monotonic()
        calls = {
            engine: engine.call("exchange", requests, limit, cancelled)
            for engine, requests in new.items()
            if engine.turns
        }
        for engine in ready:
            engine.turns = {k: each for k, each in engine.turns.items() if k not in cancelled}
        completions: list[Completion] = []
        for engine, result in calls.items():
            reason = failure_reason(result, self.pool.spec.call_timeout_s)
            if reason is None:
                engine.num_failures = 0
                finished: list[Completion] = ray.get(result)
                for each in finished:
                    completions.append((turn := engine.turns[each.key]).receive(each))
                    if turn.is_complete:
                        del engine.turns[each.key]
                num_tokens = sum(len(each.response_ids) for each in finished)
                engine.count(len(finished), num_tokens, began)
            else:
                self._mark_failed(engine, reason, deque())
        self.pool.change_members()
        return completions

    def _restart_lost(self, waiting: deque[Request]) -> None:
        """Start lost engines, and finish or give up starts that are under way."""
        self.pool.change_members()
        now, limit = time.monotonic(), self.pool.spec.start_timeout_s
        for engine in self.pool.engines:
            if engine.handle is None and now >= engine.retry_at:
                self.pool.start(engine, self.spec)
            elif engine.start_result is None:
                continue
            elif ray.wait([engine.start_result], timeout=0)[0]:
                reason = failure_reason(engine.start_result, raise_rlctl_errors=False)
                if reason is None:
                    engine.start_result = None
                    seconds = round(now - engine.started_at, 1)
                    kind = "engine_added" if engine.joining else "engine_restarted"
                    engine.joining = False
                    self.event(kind, engine=engine.number, node=engine.node, seconds=seconds)
                else:
                    self._mark_failed(engine, reason, waiting)
            elif now - engine.started_at > limit:
                self._mark_failed(engine, f"it did not start within {limit:g} s", waiting)

    def _sync_weights(self, send_weights: SendWeights, waiting: deque[Request]) -> None:
        """Send weights to ready engines that lack them; give up when all are down for too long."""
        engines, limit = self.pool.engines, self.pool.restart_timeout_s
        stale = [each for each in engines if each.ready and each.version != self.version]
        if stale:
            self._send_to(stale, send_weights, waiting)
        if any(engine.version == self.version for engine in engines):
            self.all_down_since = None
            return
        self.all_down_since = self.all_down_since or time.monotonic()
        if time.monotonic() - self.all_down_since > limit:
            raise RlctlError(
                f"no rollout engine is left, and none could be started again within {limit:g} s",
                where=self._tail(),
                hint="trainer.timeouts.rollout_restart_s sets the deadline",
            )

    def _send_to(
        self, stale: list[Engine], send_weights: SendWeights, waiting: deque[Request]
    ) -> None:
        """Run one weight sync from the trainer to the engines in `stale`."""
        self.num_syncs += 1
        sync_id, timeout_s = self.num_syncs, self.pool.spec.call_timeout_s
        # Twice the trainer's timeout: while it waits for a hung engine, the other engines wait too.
        loading = {engine: engine.call("load_weights", sync_id, 2 * timeout_s) for engine in stale}
        handles = {engine.number: engine.handle for engine in stale}
        rank_info = replace(self.pool.spec.rank_info, timeout_s=timeout_s)
        lost = send_weights(channel(self.rollout, handles, sync_id, rank_info)) or {}
        for engine, result in loading.items():
            late = "did not load its weights"
            reason = lost.get(engine.number) or failure_reason(result, timeout_s, late=late)
            if reason is None:
                engine.version = self.version
            else:
                self._mark_failed(engine, reason, waiting)

    def _assign(self, waiting: deque[Request]) -> Iterator[tuple[Engine, Request]]:
        """Yield the next requests, each with the least loaded engine that has capacity."""
        capacity = max_in_flight(self.rollout)
        while waiting:
            free = [
                engine
                for engine in self.pool.engines
                if engine.version == self.version
                and not engine.draining
                and len(engine.in_flight) < capacity
            ]
            if not free:
                return
            yield min(free, key=lambda engine: engine.load), waiting.popleft()

    def _receive(self, waiting: deque[Request], results: dict[int, Rollouts]) -> None:
        """Wait for any result or start and store the results; enforce the call timeout."""
        engines = self.pool.engines
        starting = [each.start_result for each in engines if each.start_result is not None]
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
                        self._mark_failed(engine, reason, waiting)
                elif now - request.sent_at > limit:
                    self._mark_failed(engine, f"it returned no result within {limit:g} s", waiting)

    def _mark_failed(self, engine: Engine, reason: str, waiting: deque[Request]) -> None:
        """Kill the engine and put its requests at the front of the queue.

        Raises RlctlError for a request that was lost with `_MAX_FAILURES` engines.
        """
        turns = [each.missing() for each in engine.turns.values()]
        self._unplaced += turns
        self._num_losses.update(each.request.key for each in turns)
        requests, tail = list(engine.in_flight.values()), engine.tail()
        self.pool.stop(engine)
        engine.version = -1
        for request in requests:
            request.num_failures += 1
        waiting.extendleft(reversed(requests))
        first_line = reason.strip().splitlines()[0] if reason.strip() else "no reason was given"
        num_lost = len(requests) + len(turns)
        self.event("engine_lost", engine=engine.number, reason=reason, requests=num_lost)
        if engine.joining:  # the devices that it was given do not suit it
            engine.draining, engine.failure = True, reason
        fate = "removing" if engine.draining else "restarting"
        logger.warning("rollout engine %d is lost (%s); %s it", engine.number, first_line, fate)
        losses = [each.num_failures for each in requests]
        losses += [self._num_losses[each.request.key] for each in turns]
        if max(losses, default=0) >= _MAX_FAILURES:
            raise RlctlError(
                f"{_MAX_FAILURES} rollout engines were lost with the same prompts: {reason}",
                where=tail,
            )

    def _tail(self) -> str:
        return format_tails([engine.log for engine in self.pool.engines if engine.log])
