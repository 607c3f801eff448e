"""Rollout engines as processes of their own: each stands alone, takes weights in, may die, and is started again in its place."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import remove_placement_group

from rlctl.errors import RlctlError
from rlctl.runs.logs import tail_of
from rlctl.runtime.batch import Prompts
from rlctl.runtime.cluster.link import Link
from rlctl.runtime.cluster.pool import PoolSpec, process_options, reserve
from rlctl.runtime.rank_info import RankInfo
from rlctl.runtime.rollout.sampling_params import max_in_flight
from rlctl.runtime.rollout.weight_sync import Bucket, BucketHeader
from rlctl.runtime.workers.process import Process
from rlctl.runtime.workers.rollout import RolloutSpec

ROLE = "rollout"
_MOST_WAIT_S = 30.0  # between two starts of an engine that answers nothing


class EngineProcess(Process):
    """A process with one rollout worker. Weights come in beside whatever call is running, and where its engine answers requests one by
    one (`rollout.mode=async`) so do they, by `call` in the concurrency group `answers`."""

    @ray.method(concurrency_group="weights")
    def connect(self, host: str, port: int) -> None:
        """Open the trainer's link to this process."""
        self.link = Link.to_trainer(host, port, self.rank_info)

    @ray.method(concurrency_group="weights")
    def receive(self, sync_id: int, block: Bucket | BucketHeader) -> None:
        """See `RolloutWorker.receive`. `block` is read where it lies in Ray's shared memory, or comes by the link."""
        self.workers[ROLE].receive(
            sync_id, self.link.fetch(block) if isinstance(block, BucketHeader) else block
        )

    @ray.method(concurrency_group="weights")
    def end(self, sync_id: int, num_blocks: int) -> None:
        """See `RolloutWorker.end`."""
        self.workers[ROLE].end(sync_id, num_blocks)


@dataclass(eq=False)
class Request:
    """Some of a batch's prompts on their way through an engine."""

    number: int
    prompts: Prompts
    begun: float = 0.0
    num_failures: int = 0  # engines that were lost with it


@dataclass(eq=False)
class Engine:
    """One place of the pool: a process that is lost (no handle), starting (not built yet) or living."""

    number: int
    log: Path | None
    handle: Any = None
    built: ray.ObjectRef | None = None
    begun: float = 0.0  # when it was started
    version: int = -1  # of the weights that it has
    failures: int = 0  # how often it was lost since it answered last
    retry_at: float = 0.0
    in_flight: dict[ray.ObjectRef, Request] = field(default_factory=dict)

    @property
    def ready(self) -> bool:
        return self.handle is not None and self.built is None

    @property
    def load(self) -> int:
        """Prompts that it has been given and not answered."""
        return sum(len(request.prompts) for request in self.in_flight.values())

    def call(self, method: str, *args: Any) -> ray.ObjectRef:
        """After what it was asked before."""
        return self.handle.call.remote(ROLE, method, args, {})

    def call_beside(self, method: str, *args: Any) -> ray.ObjectRef:
        """At once."""
        return self.handle.call.options(concurrency_group="answers").remote(ROLE, method, args, {})

    def tail(self) -> str:
        """What it printed last."""
        return tail_of([self.log]) if self.log else "the worker's output on this terminal"


class EngineProcesses:
    """The processes of a pool of engines, by number. Starts them and ends them; what they are asked is `EngineGroup`'s."""

    def __init__(self, spec: PoolSpec, restart_timeout_s: float) -> None:
        self.spec = spec
        self.restart_timeout_s = (
            restart_timeout_s  # in which one must be there again when none is left
        )
        self.group = reserve(spec)
        self.engines = [Engine(number, self._log(number)) for number in range(spec.num_processes)]

    def start(self, engine: Engine, worker: type, spec: RolloutSpec) -> None:
        """Begin to start `engine`: a process, and `worker(place, spec)` in it. Waits for nothing."""
        rank_info: RankInfo = replace(
            self.spec.rank_info, rank=0, world_size=1, log_path=engine.log
        )
        remote: Any = ray.remote  # its stubs do not know concurrency groups
        threads = {"weights": 1, "answers": max_in_flight(spec.sampling.rollout)}
        process = remote(concurrency_groups=threads)(EngineProcess)
        engine.handle = process.options(
            **process_options(self.spec, self.group, engine.number)
        ).remote(rank_info)
        engine.built = engine.handle.build.remote(ROLE, worker, (spec,))
        engine.begun, engine.version = time.monotonic(), -1

    def stop(self, engine: Engine) -> None:
        """End its process, if there is one. It may be started again at once, or after a while where it has answered nothing since."""
        if engine.handle is None:
            return
        engine.failures += 1
        engine.retry_at = time.monotonic() + (
            min(_MOST_WAIT_S, 2.0 ** (engine.failures - 2)) if engine.failures > 1 else 0.0
        )
        ray.kill(engine.handle)
        engine.handle = engine.built = None
        engine.in_flight.clear()

    def close(self) -> None:
        for engine in self.engines:
            self.stop(engine)
        remove_placement_group(self.group)

    def _log(self, number: int) -> Path | None:
        log = self.spec.rank_info.log_path
        return log and log.with_name(f"{self.spec.name}-{number}.log")


def failure(
    answer: ray.ObjectRef, timeout_s: float | None = None, ours_ends_the_run: bool = True
) -> str | None:
    """Why an engine is lost, or None if it has answered.

    An error of ours that it raised is raised here, because another engine would raise it too; not so when it only could not start.
    """
    try:
        ray.get(answer, timeout=timeout_s)
    except RayTaskError as error:
        if ours_ends_the_run and isinstance(error.cause, RlctlError):
            raise error.cause from error
        return f"{type(error.cause).__name__}: {error.cause}"
    except RayActorError as error:
        return str(error.error_msg)
    except GetTimeoutError:
        return f"it did not take up its weights within {timeout_s:g} s"
    return None
