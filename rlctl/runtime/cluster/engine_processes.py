"""Processes of rollout engines: one for each device of an engine."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group

from rlctl.recipes.role_table import ROLLOUT
from rlctl.runs.logs import format_tails
from rlctl.runtime.cluster.pool import (
    PoolSpec,
    nodes_of,
    process_options,
    request_group,
    wait_for_groups,
)
from rlctl.runtime.cluster.pool_engine import Engine
from rlctl.runtime.rollout.weight_group import GroupAddress
from rlctl.runtime.rollout.weight_sync import Bucket
from rlctl.runtime.workers.pool_process import Process
from rlctl.runtime.workers.rollout import RolloutSpec, RolloutWorker

_LOG = logging.getLogger(__name__)

_MAX_BACKOFF_S = 30.0  # between two starts of an engine that fails without any result
_ERROR_S = 5.0  # for rank 0 to report its error when another rank has ended


@dataclass
class _Stored:
    """Implements `IncomingWeights` with buckets in Ray's object store."""

    buckets: Sequence[ray.ObjectRef]
    version: int
    timeout_s: float  # for one bucket

    def __iter__(self) -> Iterator[Bucket]:
        return (ray.get(bucket, timeout=self.timeout_s) for bucket in self.buckets)


class EngineProcess(Process):
    """Process with one rollout worker."""

    def build_engine(self, spec: RolloutSpec) -> int:
        """Build the engine, or a rank of it; return its number of receivers of weights."""
        self.build(ROLLOUT.name, RolloutWorker, spec)
        return self.workers[ROLLOUT.name].num_receivers(ray.util.get_node_ip_address())

    def load_stored(self, buckets: list[ray.ObjectRef], version: int) -> None:
        """Load weights from Ray's object store: all parts of a bucket one after the other."""
        weights = _Stored(buckets, version, self.rank_info.timeout_s)
        self.workers[ROLLOUT.name].load_weights(weights)

    def follow(self) -> None:
        """Make the calls of rank 0 of the engine, as another rank of it."""
        self.workers[ROLLOUT.name].follow()

    def node_address(self) -> str:
        """Return an address for the process group at which other nodes reach this one."""
        return self.address(ray.util.get_node_ip_address())

    def watch(self, following: list[ray.ObjectRef]) -> None:
        """Exit soon after one of the other ranks has ended, for which NCCL would wait."""
        threading.Thread(target=_exit_after, args=(following,), daemon=True).start()

    def load_broadcast(self, address: GroupAddress, number: int) -> bool:
        """Load the weights that the group at `address` gets, as its receivers from `number` on.

        Returns False if the group breaks.
        """
        return self.workers[ROLLOUT.name].load_broadcast(address, number)


def _exit_after(following: list[ray.ObjectRef]) -> None:
    ray.wait(following)
    time.sleep(_ERROR_S)
    _LOG.error("exiting: another process of this engine has ended")
    os._exit(1)


class EngineProcesses:
    """Engine slots of a pool and their processes. `EngineGroup` distributes the work.

    Each engine has a process for each device, in `bundles` of as many as given; a bundle is on one
    node, and Ray places those of an engine on as few nodes as it can.

    Only `join` may be called by another thread than that of the group.
    """

    def __init__(
        self, spec: PoolSpec, restart_timeout_s: float, bundles: Sequence[int] = (1,)
    ) -> None:
        self.spec = spec
        self.bundles = bundles
        self.devices = sum(bundles)
        self.restart_timeout_s = restart_timeout_s  # for one to be ready again when all are down
        self.num_configured = spec.num_processes // self.devices
        self.joined: deque[Engine] = deque()  # not in `engines` yet
        # One group for each, so that a drained engine releases its devices.
        groups = [self.request_devices() for _ in range(self.num_configured)]
        wait_for_groups(groups, spec)
        self.engines = [self._engine(number, group) for number, group in enumerate(groups)]
        self._next_number = self.num_configured

    @property
    def share(self) -> dict[str, float]:
        """Devices of one engine."""
        return {name: self.devices * amount for name, amount in self.spec.share.items()}

    def request_devices(self) -> PlacementGroup:
        """Ask for the devices of another engine, without waiting for them."""
        return request_group(self.spec, self.bundles)

    def finish_start(self, engine: Engine) -> None:
        """Note that an engine is built, and where: Ray replaces nodes that are lost."""
        if engine.start_result is not None:
            engine.num_receivers = ray.get(engine.start_result)
            engine.start_result = None
        if engine.group is not None:
            engine.node = _nodes_of(engine.group)

    def start(self, engine: Engine, spec: RolloutSpec) -> None:
        """Start the engine's processes and build their workers, asynchronously."""
        spec = replace(spec, number=engine.number) if engine.url is None else spec.at(engine.url)
        bundles = [index for index, size in enumerate(self.bundles) for _ in range(size)]
        leader, *followers = [
            self._process(engine, rank, bundle) for rank, bundle in enumerate(bundles)
        ]
        engine.handle = leader
        engine.followers = followers
        if followers:
            method = leader.address if len(self.bundles) == 1 else leader.node_address
            address = method.remote()
            for process in (leader, *followers):
                process.join.remote(address)
        for process in followers:
            process.build_engine.remote(spec)
        engine.following = [process.follow.remote() for process in followers]
        if followers:
            leader.watch.remote(engine.following)
        engine.start_result = leader.build_engine.remote(spec)
        engine.started_at = time.monotonic()
        engine.version = -1

    def _process(self, engine: Engine, rank: int, bundle: int) -> Any:
        """Start the process of one rank of an engine in a bundle of its group."""
        log = engine.logs[rank] if engine.logs else None
        rank_info = replace(self.spec.rank_info, rank=rank, world_size=self.devices, log_path=log)
        process: Any = ray.remote(EngineProcess)
        assert engine.group is not None
        options = process_options(self.spec, engine.group, engine.number, bundle)
        return process.options(**options).remote(rank_info)

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
        for process in (engine.handle, *engine.followers):
            ray.kill(process)
        engine.handle = engine.start_result = None
        engine.followers = engine.following = ()
        for requests in (engine.turns, engine.cancelled):
            requests.clear()

    def join(self, group: PlacementGroup, spec: RolloutSpec, url: str | None) -> Engine:
        """Start an engine on the devices of `group`; the next `change_members` adds it.

        With `url` it is a client of that server.
        """
        engine = self._engine(self._next_number, group)
        self._next_number += 1
        engine.joining = True
        engine.url = url
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
        return format_tails([log for engine in self.engines for log in engine.logs])

    def close(self) -> None:
        """Kill all processes and release their devices."""
        for engine in (*self.engines, *self.joined):
            self._release(engine)

    def _release(self, engine: Engine) -> None:
        self.stop(engine)
        if engine.group is not None:
            remove_placement_group(engine.group)

    def _engine(self, number: int, group: PlacementGroup) -> Engine:
        log = self.spec.rank_info.log_path
        name = f"{self.spec.name}-{number}"
        names = [f"{name}.log", *(f"{name}-rank-{rank}.log" for rank in range(1, self.devices))]
        logs = [log.with_name(name) for name in names] if log else []
        return Engine(number, logs, group, _nodes_of(group))


def _nodes_of(group: PlacementGroup) -> str:
    return ", ".join(dict.fromkeys(nodes_of(group)))
