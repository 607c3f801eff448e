"""Worker groups for programs of users: a Ray session, pools of processes, and groups in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Self

import ray
import torch

from rlctl.cores import available_cores
from rlctl.debugging import call_limit
from rlctl.errors import UsageError
from rlctl.recipes import schema
from rlctl.runtime.base.rank_info import RankInfo
from rlctl.runtime.cluster.pool import PoolSpec, RayPool
from rlctl.runtime.cluster.pools import InlinePool, InlineTransport, Pool, W
from rlctl.runtime.cluster.session import ray_session
from rlctl.runtime.workers.dispatch import Worker, bind
from rlctl.runtime.workers.trace import TraceSpec


@contextmanager
def session(
    address: str | None = None, *, num_cpus: int | None = None, start_timeout_s: float = 120.0
) -> Iterator[None]:
    """Connect to the Ray cluster at `address` or RAY_ADDRESS, else start one on this machine.

    A started cluster has `num_cpus` slots, one per core by default, and ends with the block. No-op
    where Ray is initialized, such as in a Ray task. What workers print appears on this terminal.
    Raises ResourceError if Ray does not start.
    """
    if ray.is_initialized():
        yield
        return
    init = schema.RayInit(
        address=address,
        num_cpus=None,
        num_gpus=None,
        object_store_memory=None,
        include_dashboard=False,
        runtime_env={},
    )
    cpus = num_cpus or available_cores()
    with ray_session(init, cpus, 1, start_timeout_s, log_to_driver=True):
        yield


class ResourcePool(Pool):
    """Processes with one device each, on Ray or in this process; any number of groups share them.

    `processes` is their number, or the number on each of several nodes, such as `[8] * 2`. A
    process reserves `device_fraction` of a GPU (without GPUs: of a CPU slot). With `inline` the
    only process is this one, for debuggers. Output goes to files in `logs`, or to the terminal.

        with session(), ResourcePool(2) as pool:
            group = spawn(MyWorker, pool)

    Raises UsageError without a Ray session, ResourceError if the devices are not free.
    """

    def __init__(
        self,
        processes: int | Sequence[int] = 1,
        *,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        device_fraction: float = 1.0,
        name: str = "pool",
        num_threads: int | None = None,
        seed: int = 0,
        start_timeout_s: float = 300.0,
        call_timeout_s: float = 3600.0,
        logs: Path | str | None = None,
        inline: bool = False,
    ) -> None:
        if isinstance(processes, int):
            per_node = ()
            size = processes
        else:
            per_node = tuple(processes)
            size = sum(per_node)
        if size < 1 or (inline and size > 1):
            most = "one process" if inline else "at least one process"
            raise UsageError(f"a pool needs {most}, not {processes}")
        if not inline and not ray.is_initialized():
            raise UsageError(
                "a pool of processes needs a Ray session",
                hint="`with rlctl.workers.session():` around it, or ResourcePool(inline=True)",
            )
        self._num_spawned: dict[str, int] = {}
        kind = _device() if device == "auto" else device
        log_path = None if logs is None else Path(logs).absolute() / f"{name}.log"
        rank_info = RankInfo(
            rank=0,
            world_size=size,
            device=kind,
            num_threads=num_threads or max(1, available_cores() // size),
            timeout_s=call_limit(call_timeout_s),
            deterministic=False,
            log_path=log_path,
            seed=seed,
        )
        spec = PoolSpec(
            name,
            size,
            rank_info,
            start_timeout_s,
            call_limit(call_timeout_s),
            True,
            device_fraction,
            per_node,
        )
        self.pool: InlinePool | RayPool = InlinePool(rank_info) if inline else RayPool(spec)

    @property
    def nodes(self) -> list[str]:
        """The node of each process, by rank."""
        return self.pool.nodes

    def spawn(self, role: str, worker: type[W], *args: object, **kwargs: object) -> W:
        """See `Pool`. Returns a handle, also for a worker in this process."""
        number = self._num_spawned[role] = self._num_spawned.get(role, 0) + 1
        if number > 1:
            role = f"{role}-{number}"
        built = self.pool.spawn(role, worker, *args, **kwargs)
        if isinstance(self.pool, RayPool):
            return built
        return bind(worker, InlineTransport(role, self.pool.process))

    def start_trace(self, spec: TraceSpec, ranks: Sequence[int] | None = None) -> None:
        self.pool.start_trace(spec, ranks)

    def write_trace(self, prefix: Path, ranks: Sequence[int] | None = None) -> list[Path]:
        return self.pool.write_trace(prefix, ranks)

    def close(self) -> None:
        """Stop the processes and release their devices."""
        self.pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def spawn(worker: type[W], pool: ResourcePool, *args: object, **kwargs: object) -> W:
    """Build `worker(rank_info, *args, **kwargs)` in every process of `pool`; return a handle.

    A method of the handle that `@dispatch` decorates calls the workers and waits for the results.
    """
    if not issubclass(worker, Worker):
        raise UsageError(f"{worker.__name__} is no subclass of rlctl.workers.Worker")
    return pool.spawn(worker.__name__, worker, *args, **kwargs)


def _device() -> str:
    """Return the kind of device of the cluster, or of this machine without one."""
    if ray.is_initialized():
        has_gpus = bool(ray.cluster_resources().get("GPU"))
    else:
        has_gpus = torch.cuda.is_available()
    return "cuda" if has_gpus else "cpu"
