"""Rollout engines in processes of their own, each started, stopped and restarted independently."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, remove_placement_group

from rlctl.errors import RlctlError
from rlctl.recipes.roles import ROLLOUT
from rlctl.runs.logs import format_tails
from rlctl.runtime.batch import Prompts
from rlctl.runtime.cluster.open_turns import OpenTurn
from rlctl.runtime.cluster.pool import (
    PoolSpec,
    nodes_of,
    process_options,
    request_group,
    wait_for_groups,
)
from rlctl.runtime.cluster.weight_group import (
    Broadcast,
    BrokenGroupError,
    GroupAddress,
    join_group,
    leave_group,
)
from rlctl.runtime.rollout.requests import Completion
from rlctl.runtime.rollout.sampling_params import max_in_flight
from rlctl.runtime.rollout.weight_sync import Bucket
from rlctl.runtime.workers.process import Process
from rlctl.runtime.workers.rollout import RolloutSpec, RolloutWorker

_MAX_BACKOFF_S = 30.0  # between two starts of an engine that fails without any result
_GENERATE = "generate"  # Ray concurrency group


@dataclass
class _Stored:
    """Implements `IncomingWeights` with buckets in Ray's object store."""

    buckets: Sequence[ray.ObjectRef]
    version: int
    timeout_s: float  # for one bucket

    def __iter__(self) -> Iterator[Bucket]:
        return (ray.get(bucket, timeout=self.timeout_s) for bucket in self.buckets)


class EngineProcess(Process):
    """Process with one rollout worker.

    With `rollout.mode=async` the engine serves several requests at once: `call` then runs in a
    concurrency group of its own.
    """

    def load_stored(self, buckets: list[ray.ObjectRef], version: int) -> float:
        """Load weights from Ray's object store; return the seconds that it took.

        `buckets` has all parts of a bucket one after the other.
        """
        began = time.monotonic()
        weights = _Stored(buckets, version, self.rank_info.timeout_s)
        self.workers[ROLLOUT.name].load_weights(weights)
        return time.monotonic() - began

    def load_broadcast(self, address: GroupAddress, number: int) -> bool:
        """Load the weights that the group at `address` gets, as its engine of this number.

        Returns False if the group breaks.
        """
        try:
            group = join_group(address, number, self.rank_info)
            self.workers[ROLLOUT.name].load_weights(Broadcast(group))
        except BaseException as error:
            leave_group()  # so that the others leave it, too
            if isinstance(error, BrokenGroupError):
                return False
            raise
        return True


@dataclass(eq=False)
class Request:
    """Some prompts of a batch, processed by one engine."""

    number: int
    prompts: Prompts
    sent_at: float = 0.0
    num_failures: int = 0  # engines that were lost with this request in flight


@dataclass(eq=False)
class Engine:
    """One slot of the pool: down (no handle), starting (`start_result` is pending) or ready."""

    number: int
    log: Path | None
    group: PlacementGroup | None = None  # its devices
    node: str = ""
    handle: Any = None
    start_result: ray.ObjectRef | None = None
    started_at: float = 0.0
    version: int = -1  # of its weights; -1: none
    num_failures: int = 0  # since its last result
    retry_at: float = 0.0
    in_flight: dict[ray.ObjectRef, Request] = field(default_factory=dict)
    turns: dict[int, OpenTurn] = field(default_factory=dict)  # by key
    cancelled: list[int] = field(default_factory=list)  # keys that its next exchange drops
    draining: bool = False  # it gets no new requests, and is removed once it is idle
    url: str | None = None  # of the server that it was added for
    joining: bool = False  # it was added to a running pool and has not been built yet
    failure: str | None = None  # reason why it could not join
    num_responses: int = 0
    num_tokens: int = 0  # of its responses
    busy_s: float = 0.0
    busy_until: float = 0.0  # time of the last response

    @property
    def idle(self) -> bool:
        """True if no request is open."""
        return not self.in_flight and not self.turns

    def count(self, num_responses: int, num_tokens: int, since: float) -> None:
        """Count responses to a request that was sent at `since`."""
        now = time.monotonic()
        self.busy_s += now - max(since, self.busy_until)
        self.busy_until = now
        self.num_responses += num_responses
        self.num_tokens += num_tokens

    @property
    def ready(self) -> bool:
        """True if the engine is built and accepts calls."""
        return self.handle is not None and self.start_result is None

    @property
    def load(self) -> int:
        """Number of prompts in flight."""
        return sum(len(request.prompts) for request in self.in_flight.values())

    def call(self, method: str, *args: Any) -> ray.ObjectRef:
        """Queue a call of the worker's `method` after earlier calls."""
        return self.handle.call.remote(ROLLOUT.name, method, args, {})

    def call_concurrently(self, method: str, *args: Any) -> ray.ObjectRef:
        """Call the worker's `method` concurrently with running calls."""
        options = self.handle.call.options(concurrency_group=_GENERATE)
        return options.remote(ROLLOUT.name, method, args, {})

    def cancel(self, keys: Collection[int]) -> None:
        """Forget turns with these keys; the next exchange lets the engine drop them."""
        dropped = sorted(self.turns.keys() & set(keys))
        self.cancelled += dropped
        for key in dropped:
            del self.turns[key]

    def pop_cancelled(self) -> list[int]:
        """Return the keys to drop since the last call."""
        self.cancelled, cancelled = [], self.cancelled
        return cancelled

    def receive(self, finished: Sequence[Completion]) -> list[Completion]:
        """Return finished responses as those of the caller's requests; forget complete ones."""
        completions = []
        for completion in finished:
            turn = self.turns[completion.key]
            completions.append(turn.receive(completion))
            if turn.is_complete:
                del self.turns[completion.key]
        return completions

    def tail(self) -> str:
        """Return the last lines of the engine's log."""
        return format_tails([self.log]) if self.log else "the worker's output on this terminal"


class EngineProcesses:
    """Engine slots of a pool and their processes. `EngineGroup` distributes the work.

    Only `join` may be called by another thread than that of the group.
    """

    def __init__(self, spec: PoolSpec, restart_timeout_s: float) -> None:
        self.spec = spec
        self.restart_timeout_s = restart_timeout_s  # for one to be ready again when all are down
        self.num_configured = spec.num_processes
        self.joined: deque[Engine] = deque()  # not in `engines` yet
        # One group for each, so that a drained engine releases its devices.
        groups = [request_group(spec) for _ in range(spec.num_processes)]
        wait_for_groups(groups, spec)
        self.engines = [self._engine(number, group) for number, group in enumerate(groups)]
        self._next_number = spec.num_processes

    def start(self, engine: Engine, spec: RolloutSpec) -> None:
        """Start the engine's process and build its worker, asynchronously."""
        spec = replace(spec, number=engine.number) if engine.url is None else spec.at(engine.url)
        rank_info = replace(self.spec.rank_info, rank=0, world_size=1, log_path=engine.log)
        remote: Any = ray.remote  # Ray's stubs lack `concurrency_groups`
        generate = max_in_flight(spec.sampling.rollout, rank_info.device)
        threads = {_GENERATE: generate}
        process = remote(concurrency_groups=threads)(EngineProcess)
        assert engine.group is not None
        options = process_options(self.spec, engine.group, engine.number, bundle=0)
        engine.handle = process.options(**options).remote(rank_info)
        engine.start_result = engine.handle.build.remote(ROLLOUT.name, RolloutWorker, spec)
        engine.started_at, engine.version = time.monotonic(), -1

    def stop(self, engine: Engine) -> None:
        """Kill the engine's process, if any, and clear its requests.

        Sets `retry_at`: immediately after a first failure, with exponential backoff after others.
        """
        if engine.handle is None:
            return
        engine.num_failures += 1
        backoff_s = 0.0
        if engine.num_failures > 1:
            backoff_s = min(_MAX_BACKOFF_S, 2.0 ** (engine.num_failures - 2))
        engine.retry_at = time.monotonic() + backoff_s
        ray.kill(engine.handle)
        engine.handle = engine.start_result = None
        for requests in (engine.in_flight, engine.turns, engine.cancelled):
            requests.clear()

    def join(self, group: PlacementGroup, spec: RolloutSpec, url: str | None) -> Engine:
        """Start an engine on the devices of `group`; the next `change_members` adds it.

        With `url` it is a client of that server.
        """
        engine = self._engine(self._next_number, group)
        self._next_number += 1
        engine.joining, engine.url = True, url
        self.start(engine, spec)
        self.joined.append(engine)
        return engine

    def change_members(self) -> None:
        """Add the engines that joined, and stop drained ones without open requests."""
        while self.joined:
            self.engines.append(self.joined[0])  # first: another thread reads both lists
            self.joined.popleft()
        for engine in [engine for engine in self.engines if engine.draining and engine.idle]:
            self.engines.remove(engine)
            self._release(engine)

    def tail(self) -> str:
        """Return the last lines of the engines' logs."""
        return format_tails([engine.log for engine in self.engines if engine.log])

    def close(self) -> None:
        """Kill all processes and release their devices."""
        for engine in (*self.engines, *self.joined):
            self._release(engine)

    def _release(self, engine: Engine) -> None:
        self.stop(engine)
        if engine.group is not None:
            remove_placement_group(engine.group)

    def _engine(self, number: int, group: PlacementGroup) -> Engine:
        return Engine(number, self._log(number), group, nodes_of(group)[0])

    def _log(self, number: int) -> Path | None:
        log = self.spec.rank_info.log_path
        return log and log.with_name(f"{self.spec.name}-{number}.log")


def failure_reason(
    result: ray.ObjectRef,
    timeout_s: float | None = None,
    raise_rlctl_errors: bool = True,
    late: str = "returned no result",
) -> str | None:
    """Return why an engine's call failed, or None if it succeeded.

    `late` describes a call that takes longer than `timeout_s`. Raises the call's RlctlError,
    because every other engine would raise it too. Pass `raise_rlctl_errors=False` for errors of one
    engine only, such as a failed start.
    """
    try:
        ray.get(result, timeout=timeout_s)
    except RayTaskError as error:
        if raise_rlctl_errors and isinstance(error.cause, RlctlError):
            raise error.cause from error
        return f"{type(error.cause).__name__}: {error.cause}"
    except RayActorError as error:
        return str(error.error_msg)
    except GetTimeoutError:
        return f"it {late} within {timeout_s:g} s"
    return None
