"""What all engines of a pool do together: answer a batch, whoever of them lives, and take the trainer's weights."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar, cast

import ray

from rlctl.errors import RlctlError
from rlctl.runs.logs import tail_of
from rlctl.runtime.batch import Prompts, Rollouts
from rlctl.runtime.cluster.channels import channel
from rlctl.runtime.cluster.engines import ROLE, Engine, EngineProcesses, Request, failure
from rlctl.runtime.cluster.pool import PoolSpec, gather, nodes_of
from rlctl.runtime.rollout.sampling_params import max_in_flight, num_requests
from rlctl.runtime.rollout.weight_sync import WeightChannel
from rlctl.runtime.workers.dispatch import join, split
from rlctl.runtime.workers.rollout import RolloutSpec
from rlctl.tracking.tracker import Event

W = TypeVar("W")
SendWeights = Callable[[WeightChannel], dict[int, str]]

_MAX_FAILURES = 3  # engines that may die of one request before it is held to be its fault
_LOOK_S = 1.0  # how often deadlines are looked at while nothing happens


class EngineGroup:
    """Answers like one engine, and hides that single ones die: their requests go to the others, and they are started again.

    Which engine answers a request does not change the answer: a row's random stream hangs on the seed and the row's number, and how a
    batch is cut hangs on the number of engines that there should be.
    """

    def __init__(
        self, pool: EngineProcesses, worker: type, spec: RolloutSpec, event: Event
    ) -> None:
        self.pool = pool
        self.worker = worker
        self.spec = spec
        self.rollout = spec.sampling.rollout
        self.event = event
        self.send_weights: SendWeights | None = None
        self.version = 0  # of the trainer's weights
        self.num_hand_overs = 0
        self.all_down_since: float | None = None  # since when no engine can answer
        for engine in pool.engines:
            pool.start(engine, worker, spec)

    def wait(self) -> None:
        """Until all engines are built; at the start of a run, one that cannot be is the run's end."""
        engines = self.pool.engines
        starting = [engine.built for engine in engines if engine.built is not None]
        gather(starting, "building the rollout engines", self.pool.spec.start_timeout_s, self._tail)
        for engine in engines:
            engine.built = None

    def mark_stale(self) -> None:
        """The trainer's weights have changed: no engine answers before it has the new ones."""
        self.version += 1

    def update_weights(self) -> None:
        """See `Actor`; to the engines that live. One that is lost meanwhile gets them when it is there again."""
        self.all_down_since = None
        self._refresh(deque())

    def generate_sequences(
        self, prompts: Prompts, seed: int, validate: bool = False, greedy: bool = False
    ) -> Rollouts:
        """See `Actor`. Raises `RlctlError` when no engine can answer for `restart_timeout_s`."""
        self.all_down_since = None
        parts = split(
            prompts,
            num_requests(self.rollout, len(prompts), len(self.pool.engines)),
            balanced=False,
        )
        waiting = deque(
            Request(number, part)
            for number, part in enumerate(prompts.without_local().chunk(parts))
        )
        answers: dict[int, Rollouts] = {}
        try:
            while len(answers) < len(parts):
                self._revive(waiting)
                self._refresh(waiting)
                for engine, request in self._hand_out(waiting):
                    request.begun = time.monotonic()
                    ask = engine.call_beside if self.rollout.mode == "async" else engine.call
                    engine.in_flight[
                        ask("generate_sequences", request.prompts, seed, validate, greedy)
                    ] = request
                self._collect(waiting, answers)
        finally:  # after an error nobody wants what is still on its way
            for engine in self.pool.engines:
                engine.in_flight.clear()
        return join([answers[number] for number in range(len(parts))], parts, prompts)

    def _revive(self, waiting: deque[Request]) -> None:
        """Start lost engines again, and take in those that have started."""
        now, limit = time.monotonic(), self.pool.spec.start_timeout_s
        for engine in self.pool.engines:
            if engine.handle is None and now >= engine.retry_at:
                self.pool.start(engine, self.worker, self.spec)
            elif engine.built is not None and ray.wait([engine.built], timeout=0)[0]:
                reason = failure(engine.built, ours_ends_the_run=False)
                if reason is None:
                    engine.built = None
                    self.event(
                        "engine_restarted",
                        engine=engine.number,
                        seconds=round(now - engine.begun, 1),
                    )
                else:
                    self._mark_failed(engine, reason, waiting)
            elif engine.built is not None and now - engine.begun > limit:
                self._mark_failed(engine, f"it did not start within {limit:g} s", waiting)

    def _refresh(self, waiting: deque[Request]) -> None:
        """Send the trainer's weights to every living engine that does not have them."""
        engines, limit = self.pool.engines, self.pool.restart_timeout_s
        self._send_to(
            [engine for engine in engines if engine.ready and engine.version != self.version],
            waiting,
        )
        if any(engine.version == self.version for engine in engines):
            self.all_down_since = None
        else:
            self.all_down_since = self.all_down_since or time.monotonic()
            if time.monotonic() - self.all_down_since > limit:
                raise RlctlError(
                    f"no rollout engine is left, and none could be started again within {limit:g} s",
                    where=self._tail(),
                    hint="trainer.timeouts.rollout_restart_s sets the deadline",
                )

    def _send_to(self, stale: list[Engine], waiting: deque[Request]) -> None:
        if not stale:
            return
        assert self.send_weights is not None, "nobody sends these engines weights"
        self.num_hand_overs += 1
        number, timeout_s = self.num_hand_overs, self.pool.spec.call_timeout_s
        # An engine waits longer for a block than the trainer does for another engine that hangs.
        loading = {engine: engine.call("load_weights", number, 2 * timeout_s) for engine in stale}
        handles = {engine.number: engine.handle for engine in stale}
        lost = self.send_weights(
            channel(
                self.rollout,
                handles,
                number,
                replace(self.pool.spec.rank_info, timeout_s=timeout_s),
            )
        )
        for engine, answer in loading.items():
            reason = lost.get(engine.number) or failure(answer, timeout_s)
            if reason is None:
                engine.version = self.version
            else:
                self._mark_failed(engine, reason, waiting)

    def _hand_out(self, waiting: deque[Request]) -> Iterator[tuple[Engine, Request]]:
        """The next requests, each for the engine with the least to do."""
        most = max_in_flight(self.rollout)
        while waiting:
            free = [
                engine
                for engine in self.pool.engines
                if engine.version == self.version and len(engine.in_flight) < most
            ]
            if not free:
                return
            yield min(free, key=lambda engine: engine.load), waiting.popleft()

    def _collect(self, waiting: deque[Request], answers: dict[int, Rollouts]) -> None:
        """Wait until something happens, and take what has been answered."""
        engines = self.pool.engines
        starting = [engine.built for engine in engines if engine.built is not None]
        in_flight = [answer for engine in engines for answer in engine.in_flight]
        if not starting and not in_flight:
            time.sleep(_LOOK_S / 10)
            return
        ray.wait([*in_flight, *starting], timeout=_LOOK_S)
        answered = (
            set(ray.wait(in_flight, num_returns=len(in_flight), timeout=0)[0])
            if in_flight
            else set()
        )
        now, limit = time.monotonic(), self.pool.spec.call_timeout_s
        for engine in engines:
            for answer, request in list(engine.in_flight.items()):
                if answer not in engine.in_flight:  # it was lost with another request
                    continue
                if answer in answered:
                    reason = failure(answer)
                    if reason is None:
                        answers[engine.in_flight.pop(answer).number] = ray.get(answer)
                        engine.failures = 0
                    else:
                        self._mark_failed(engine, reason, waiting)
                elif now - request.begun > limit:
                    self._mark_failed(engine, f"it did not answer within {limit:g} s", waiting)

    def _mark_failed(self, engine: Engine, reason: str, waiting: deque[Request]) -> None:
        """What it was asked goes to the others, first of all; it is ended for certain and will be started again."""
        requests, tail = list(engine.in_flight.values()), engine.tail()
        self.pool.stop(engine)
        engine.version = -1
        for request in requests:
            request.num_failures += 1
        waiting.extendleft(reversed(requests))
        first_line = reason.strip().splitlines()[0] if reason.strip() else "no reason was given"
        self.event("engine_lost", engine=engine.number, reason=reason, requests=len(requests))
        print(
            f"warning: rollout engine {engine.number} is lost ({first_line}); it is started again",
            file=sys.stderr,
        )
        if any(request.num_failures >= _MAX_FAILURES for request in requests):
            raise RlctlError(
                f"{_MAX_FAILURES} rollout engines were lost with the same prompts: {reason}",
                where=tail,
            )

    def _tail(self) -> str:
        return tail_of([engine.log for engine in self.pool.engines if engine.log])


class EnginePool:
    """Implements `Pool` for rollout engines, one a device. It holds one role."""

    def __init__(self, spec: PoolSpec, restart_timeout_s: float, event: Event) -> None:
        self.engines = EngineProcesses(spec, restart_timeout_s)
        self.event = event

    def spawn(self, role: str, worker: type[W], *args: Any) -> W:
        """Begin to build `worker(place, spec)` in every process; `EngineGroup.wait` waits for them."""
        assert role == ROLE, f"{role} does not go into a pool of rollout engines"
        (spec,) = args
        return cast(W, EngineGroup(self.engines, worker, spec, self.event))

    @property
    def nodes(self) -> list[str]:
        return nodes_of(self.engines.group)

    def close(self) -> None:
        self.engines.close()
