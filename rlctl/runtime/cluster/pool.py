"""Pool of processes on a Ray cluster: one placement group, one process per device.

Each process hosts any number of roles.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import ray
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    RayActorError,
    RayTaskError,
)
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlctl.cores import process_resources
from rlctl.debugging import reached_breakpoint
from rlctl.errors import ResourceError, RlctlError
from rlctl.runs.logs import format_tails
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.cluster.group import GroupTransport, Relay, RelayedTransport, inline_bytes_of
from rlctl.runtime.cluster.pools import RANKS_PER_RELAY, Pool, W
from rlctl.runtime.cluster.resources import free_of, node_here
from rlctl.runtime.cluster.stop_key import StopKey
from rlctl.runtime.cluster.task_errors import error_of_users_code
from rlctl.runtime.workers.dispatch import bind
from rlctl.runtime.workers.interrupts import INTERRUPTS
from rlctl.runtime.workers.pool_process import Process
from rlctl.runtime.workers.trace import TraceSpec

LOG = logging.getLogger(__name__)

_FREE_HERE_S = 2.0  # to reserve devices of this machine before those of others


@dataclass(frozen=True)
class PoolSpec:
    """Size, devices and timeouts of a pool."""

    name: str
    num_processes: int
    rank_info: RankInfo  # of rank 0; the others differ in rank and log file
    start_timeout_s: float
    call_timeout_s: float
    balanced: bool  # split rows by compute cost
    device_fraction: float  # of a GPU (without GPUs: of a CPU slot) that each process reserves
    per_node: tuple[int, ...] = ()  # processes on each of several nodes; empty: as they fit

    @property
    def share(self) -> dict[str, float]:
        """Devices that one process reserves."""
        return process_resources(self.rank_info.device, self.device_fraction)

    @property
    def bundles(self) -> tuple[int, ...]:
        """Processes in each bundle of the placement group: one bundle per node, or per process."""
        return self.per_node or (1,) * self.num_processes

    def bundle_of(self, rank: int) -> int:
        """Return the bundle of a process."""
        return [index for index, size in enumerate(self.bundles) for _ in range(size)][rank]


class RayPool(Pool):
    """Implements `Pool` on Ray. Every wait has a deadline and names what it waits for in errors."""

    def __init__(self, spec: PoolSpec) -> None:
        self.spec = spec
        self.group = reserve(spec)
        self.order = Lock()
        self.processes = [self._start(rank) for rank in range(spec.num_processes)]
        # Ray's address of the node: that of the host's name is often 127.0.1.1.
        host = self.nodes[0].split()[0]
        address = self._gather(
            [self.processes[0].address.remote(host)],
            "the first process of the pool",
            spec.start_timeout_s,
        )[0]
        self._gather(
            [p.join.remote(address) for p in self.processes],
            "the process group",
            spec.start_timeout_s,
        )
        self.stop_key = StopKey()
        self._gather(
            [p.listen_for_interrupts.remote(self.stop_key.is_set) for p in self.processes],
            "the processes' wait for a request to stop",
            spec.start_timeout_s,
        )
        self.relays = [self._start_relay(ranks) for ranks in self._relayed()]

    @property
    def nodes(self) -> list[str]:
        """The node of each process, by rank."""
        nodes = nodes_of(self.group)
        return [nodes[self.spec.bundle_of(rank)] for rank in range(self.spec.num_processes)]

    def spawn(self, role: str, worker: type[W], *args: object, **kwargs: object) -> W:
        """See `Pool`. Returns a handle of the group."""
        built = [process.build.remote(role, worker, *args, **kwargs) for process in self.processes]
        self._gather(built, f"building {role}", self.spec.start_timeout_s)
        shared = self.gather, self.spec.balanced, self.order, worker.ranks_per_row(*args, **kwargs)
        if not self.relays:
            return bind(worker, GroupTransport(role, self.processes, *shared))
        sizes = [len(each) for each in self._relayed()]
        return bind(worker, RelayedTransport(role, self.relays, *shared, sizes=sizes))

    def gather(self, results: list[ray.ObjectRef], what: str) -> list[Any]:
        """Return one result per process. Raises RlctlError after `call_timeout_s`."""
        return self._gather(results, what, self.spec.call_timeout_s)

    def start_trace(self, spec: TraceSpec, ranks: Sequence[int] | None) -> None:
        self.gather(
            [process.start_trace.remote(spec) for process in self._of(ranks)], "start of a trace"
        )

    def write_trace(self, prefix: Path, ranks: Sequence[int] | None) -> list[Path]:
        return self.gather(
            [process.write_trace.remote(prefix) for process in self._of(ranks)], "writing a trace"
        )

    def _of(self, ranks: Sequence[int] | None) -> list[Any]:
        every = enumerate(self.processes)
        return [process for rank, process in every if ranks is None or rank in ranks]

    def interrupt(self) -> None:
        self.stop_key.set()

    def close(self) -> None:
        """Kill the processes and release their devices."""
        self.stop_key.remove()
        for process in (*self.relays, *self.processes):
            ray.kill(process)
        remove_placement_group(self.group)

    def _start(self, rank: int) -> Any:
        log = self.spec.rank_info.log_path
        rank_info = replace(
            self.spec.rank_info,
            rank=rank,
            log_path=log and log.with_name(f"{self.spec.name}-{rank}.log"),
        )
        return (
            ray.remote(Process)
            .options(**process_options(self.spec, self.group, rank, self.spec.bundle_of(rank)))
            .remote(rank_info)
        )

    def _relayed(self) -> list[range]:
        """Return the ranks of each relay; none for a pool of few processes."""
        ranks = range(self.spec.num_processes)
        size = RANKS_PER_RELAY
        if len(ranks) <= size:
            return []
        return [ranks[i : i + size] for i in range(0, len(ranks), size)]

    def _start_relay(self, ranks: range) -> Any:
        """Start a relay beside the first process of its `ranks`."""
        options = process_options(self.spec, self.group, ranks[0], self.spec.bundle_of(ranks[0]))
        options |= {"num_cpus": 0, "num_gpus": 0, "name": f"relay-{options['name']}"}
        gathered = partial(_gather_of, self.spec, timeout_s=self.spec.call_timeout_s)
        processes = [self.processes[rank] for rank in ranks]
        limit = inline_bytes_of(self.spec.num_processes)
        return ray.remote(Relay).options(**options).remote(processes, gathered, limit)

    def _gather(self, results: list[ray.ObjectRef], what: str, timeout_s: float) -> list[Any]:
        return _gather_of(self.spec, results, what, timeout_s)


def _gather_of(
    spec: PoolSpec, results: list[ray.ObjectRef], what: str, timeout_s: float
) -> list[Any]:
    """Gather the results of processes of the pool: see `gather`."""
    log = spec.rank_info.log_path
    paused = partial(reached_breakpoint, log and log.parent)
    return gather(results, what, timeout_s, partial(log_tail, spec), paused)


def nodes_of(group: PlacementGroup) -> list[str]:
    """Return the node of each bundle: its address and the first 8 digits of Ray's node id."""
    ids = placement_group_table(group)["bundles_to_node_id"]
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    return [f"{addresses[ids[bundle]]} {ids[bundle][:8]}" for bundle in sorted(ids)]


def reserve(spec: PoolSpec) -> PlacementGroup:
    """Reserve the devices of a pool, one bundle per process, or per node with `per_node`.

    Without `per_node` they are on this machine, which has the run's folder, if they are free here.
    Raises ResourceError if they are not free within `start_timeout_s`.
    """
    if not spec.per_node and (node := node_here(spec.num_processes, spec.share)):
        group = request_group(spec, spec.bundles, node)
        if group.wait(_FREE_HERE_S):
            return group
        remove_placement_group(group)
    group = request_group(spec, spec.bundles)
    wait_for_groups([group], spec)
    return group


def request_group(
    spec: PoolSpec, bundles: Sequence[int] = (1,), node: Mapping[str, float] | None = None
) -> PlacementGroup:
    """Ask for the devices of `bundles` (processes each), without waiting for them.

    `node` is the resource that only one node has.
    """
    return placement_group(
        [
            {name: size * amount for name, amount in spec.share.items()} | dict(node or {})
            for size in bundles
        ],
        strategy="STRICT_SPREAD" if spec.per_node else "PACK",
        name=f"rlctl-{spec.name}-{time.time_ns()}",
    )


def wait_for_groups(groups: Sequence[PlacementGroup], spec: PoolSpec) -> None:
    """Wait until the devices of a pool are reserved.

    Raises ResourceError if they are not free within `start_timeout_s`, and gives up all of them.
    """
    end = time.monotonic() + spec.start_timeout_s
    if not all(group.wait(max(0.0, end - time.monotonic())) for group in groups):
        left = free_of(spec.share)
        for group in groups:
            remove_placement_group(group)
        raise ResourceError(
            f"pool {spec.name!r} needs {spec.num_processes} × {spec.share}; "
            f"free after {spec.start_timeout_s:.0f} s: {left}",
            hint=f"use a larger cluster, or set a smaller trainer.placement.pools.{spec.name}",
        )


def process_options(
    spec: PoolSpec, group: PlacementGroup, rank: int, bundle: int
) -> dict[str, Any]:
    """Return the Ray actor options of process `rank` of a pool, in a bundle of `group`."""
    return {
        "num_cpus": spec.share["CPU"],
        "num_gpus": spec.share.get("GPU", 0),
        "name": f"{spec.name}-{rank}-{time.time_ns()}",
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=bundle
        ),
    }


def gather(
    results: list[ray.ObjectRef],
    what: str,
    timeout_s: float,
    tail: Callable[[], str],
    paused: Callable[[], bool] = lambda: False,
) -> list[Any]:
    """Return all results; `what` names the call and `tail` returns the last log lines, for errors.

    Raises the RlctlError that a process raised, and RlctlError for other errors, for lost
    processes, and after `timeout_s`, unless `paused` returns True: then it waits on.
    """
    try:
        try:
            with INTERRUPTS.allowed():
                return ray.get(results, timeout=timeout_s)
        except GetTimeoutError:
            if not paused():
                raise
            LOG.warning("%s waits in a breakpoint: time limits are off", what)
            return ray.get(results)
    except GetTimeoutError as error:
        raise RlctlError(
            f"{what} did not finish within {timeout_s:g} s",
            where=tail(),
            hint="the logs contain the stacks of all threads of the workers; trainer.timeouts sets "
            "the deadlines",
        ) from error
    except RayTaskError as error:
        if isinstance(error.cause, RlctlError):
            raise error.cause from error
        if (users := error_of_users_code(error)) is not None:
            raise users from error
        raise RlctlError(
            f"{what} failed: {type(error.cause).__name__}: {error.cause}", where=tail()
        ) from error
    except ActorUnavailableError as error:  # in another cluster: its daemons are not watched
        raise RlctlError(
            f"a worker process cannot be reached during {what}: it, its node or the raylet of that "
            f"node has exited ({error.error_msg})",
            where=tail(),
        ) from error
    except RayActorError as error:
        raise RlctlError(
            f"a worker process exited during {what}: {error.error_msg}", where=tail()
        ) from error


def log_tail(spec: PoolSpec) -> str:
    """Return the last lines of the logs of a pool's processes, with the names of the logs."""
    if spec.rank_info.log_path is None:
        return "the worker's output on this terminal"
    return format_tails(sorted(spec.rank_info.log_path.parent.glob(f"{spec.name}-*.log")))
