"""Pool of worker processes that host the environments of episodes.

The pool lives as long as the run, while each step of training runs a new event loop. A worker that
exits or whose event loop is blocked is killed and replaced, and its episodes fail as "lost". No
worker outlives the program.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from rlctl import plugins
from rlctl.cores import allowed_cores
from rlctl.errors import RlctlError
from rlctl.plugins.agents.environments.environment_host import EnvironmentHost
from rlctl.plugins.agents.environments.program import ProgramEnvironment
from rlctl.plugins.agents.environments.protocol import Row, Step, step_from_json
from rlctl.plugins.user_code import check_interpreter
from rlctl.recipes import schema
from rlctl.runtime.sandbox import worker_process
from rlctl.runtime.sandbox.calls import CLOSE_S
from rlctl.runtime.sandbox.interruptions import is_stopped
from rlctl.runtime.sandbox.worker_pool import WorkerPool
from rlctl.runtime.sandbox.worker_process import RequestFailed, Worker, WorkerLost
from rlctl.runtime.sandbox.worker_settings import Limits, WorkerSettings
from rlctl.runtime.serving.chat import Message, ToolSchema, Turn

LOG = logging.getLogger(__name__)

DEFAULT_ENVIRONMENT = "tools"
PROGRAM = f"{ProgramEnvironment.__module__}:{ProgramEnvironment.__qualname__}"
SILENCE_S = 15.0  # of the event loop of a worker; a blocked one delays all of its episodes
# A worker with this many calls that exceeded their deadline and still run gets no new episodes.
MAX_ABANDONED = 16


def _for_other(python: str, kind: str, name: str) -> str:
    """Return `module:Name` of a plug-in: another interpreter does not have rlctl's entry points.

    Raises ConfigError if `python` is no program.
    """
    check_interpreter(python, "actor_rollout_ref.rollout.agent.python")
    points = {point.name: f"{point.module}:{point.attr}" for point in plugins.entry_points_of(kind)}
    return points.get(name, name)


@dataclass(frozen=True)
class Timeouts:
    """Time limits in seconds: of one call of a tool, and of one request to an environment."""

    call_s: float = 60.0
    turn_s: float = 120.0


class EnvironmentFailed(Exception):
    """Failure of an environment, which ends its episode.

    `kind` is "error" (it raised, or returned something wrong), "timeout" or "lost" (its worker,
    which was `interrupted` if something outside killed or stopped it).
    """

    def __init__(
        self, kind: Literal["error", "timeout", "lost"], text: str, interrupted: bool = False
    ) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.text = text
        self.interrupted = interrupted


class RemoteEnvironment:
    """An environment in a worker process. Each call raises EnvironmentFailed if it fails.

    `messages` is the result of `reset`, `tools` what the policy may call.
    """

    def __init__(self, pool: EnvironmentPool, worker: Worker, key: str, timeouts: Timeouts) -> None:
        self._pool = pool
        self._worker = worker
        self._key = key
        self._timeouts = timeouts
        self._is_closed = False
        self.messages: list[Message] | str | None = None
        self.tools: list[ToolSchema] = []

    async def reset(self, row: Row) -> None:
        """Start the episode of `row`."""
        found = await self._request("open", row=dict(row))
        self.messages = found["messages"]
        self.tools = found["tools"]

    async def step(self, turn: Turn) -> Step:
        """Return the environment's reply to a turn of the policy."""
        return step_from_json(await self._request("step", turn=turn))

    async def score(self) -> float | dict[str, float] | None:
        """Return the score of the finished episode; None if the reward functions score it."""
        return await self._request("score")

    async def close(self) -> None:
        """Cancel what the environment still does, and close it. Never raises a failure of it."""
        if self._is_closed:
            return
        self._is_closed = True
        limit_s = min(CLOSE_S, self._timeouts.turn_s)
        await self._pool.workers.call(self._pool.end_episode, self._worker, self._key, limit_s)

    async def _request(self, op: str, **data: Any) -> Any:
        """Send a request and return its result."""
        arguments = {"episode": self._key, **data}
        limit_s = self._timeouts.turn_s
        return await self._pool.workers.call(
            self._pool.request, self._worker, op, limit_s, arguments
        )


class EnvironmentPool:
    """Worker processes for one kind of environment; `close()` it or use it as a context manager.

    `tools` are those that are known before an episode; empty if they depend on its row.
    """

    def __init__(
        self,
        environment: str,
        params: Mapping[str, Any] | None = None,
        *,
        defaults: Mapping[str, Any] | None = None,
        timeouts: Timeouts | None = None,
        workers: WorkerSettings | None = None,
    ) -> None:
        """Start the workers and load the environment: a plug-in, `module:Class` or `path.py:Class`.

        `params` are its settings; of `defaults`, it gets those that it has. Logs are
        `environment-<number>.log`. Raises ConfigError if the environment cannot be loaded,
        ResourceError if a worker does not start.
        """
        workers = workers or WorkerSettings()
        if workers.python is not None:
            environment = _for_other(workers.python, "environments", environment)
        self._timeouts = timeouts or Timeouts()
        self._settings = {"params": dict(params or {}), "defaults": dict(defaults or {})}
        self._active: list[Worker] = []  # that get episodes
        self._episodes: dict[Worker, set[str]] = {}  # of these, and of those that get no more
        self._loop: asyncio.AbstractEventLoop | None = None  # of the episodes
        self.tools: list[ToolSchema] = []
        call_s = min(self._timeouts.call_s, self._timeouts.turn_s)
        host = partial(EnvironmentHost, environment, call_s)
        self.workers = WorkerPool("environment", workers, host, self._load)
        try:
            self.workers.submit(self._start, workers.number).result()
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_config(cls, rollout: schema.Rollout, logs: Path | None = None) -> Self:
        """Build the pool of a run: its program, its environment, or the tools of `multi_turn`.

        Settings of the environment that have the name of a key of `multi_turn` have its value
        unless `agent.params` sets them. Raises as the constructor.
        """
        agent = rollout.agent
        number = agent.num_workers or allowed_cores()
        environment = agent.environment or DEFAULT_ENVIRONMENT
        params = agent.params
        if agent.program is not None:
            program = agent.program
            if agent.python is not None:
                program = _for_other(agent.python, "programs", program)
            environment = PROGRAM
            params = {"program": program, "params": agent.params}
        return cls(
            environment,
            params,
            defaults=rollout.multi_turn.model_dump(),
            timeouts=Timeouts(agent.timeouts.call_s, agent.timeouts.turn_s),
            workers=WorkerSettings(
                number, logs, agent.env, Limits.from_config(agent.limits, number), agent.python
            ),
        )

    async def open(self, row: Row, key: str, timeouts: Timeouts | None = None) -> RemoteEnvironment:
        """Start the episode of `row` on the worker with the fewest; `key` must be unique.

        Raises EnvironmentFailed if its `reset` fails; nothing needs to be closed then.
        """
        worker = await self.workers.call(self._place, key, asyncio.get_running_loop())
        remote = RemoteEnvironment(self, worker, key, timeouts or self._timeouts)
        try:
            await remote.reset(row)
        except BaseException:
            await remote.close()
            raise
        return remote

    async def request(
        self, worker: Worker, op: str, limit_s: float, arguments: Mapping[str, Any]
    ) -> Any:
        """Return the result of a request of an episode. Raises EnvironmentFailed."""
        try:
            return await worker.request(op, limit_s + worker_process.GRACE_S, **arguments)
        except TimeoutError:
            if is_stopped(worker.pid):
                await worker.lose("the environment worker was stopped")
                return await self.request(worker, op, limit_s, arguments)  # raises WorkerLost
            raise EnvironmentFailed("timeout", f"{op} took longer than {limit_s:g} s") from None
        except RequestFailed as failure:
            raise EnvironmentFailed("error", f"{op}: {failure}") from None
        except (WorkerLost, RlctlError) as lost:
            reason = f"{lost}{worker.see_log}"
            self._remove(worker, reason)
            raise EnvironmentFailed("lost", reason, worker.was_interrupted) from None

    async def end_episode(self, worker: Worker, key: str, limit_s: float) -> None:
        """Close an environment; report a failure of it."""
        self._episodes.get(worker, set()).discard(key)
        try:
            async with asyncio.timeout(limit_s):
                await worker.request("close", None, episode=key)
        except TimeoutError:
            LOG.warning("closing an environment failed: did not end within %g s", limit_s)
        except RequestFailed as failure:
            LOG.warning("closing an environment failed: %s", failure)
        except (WorkerLost, RlctlError):
            pass  # the pool has reported it

    def close(self) -> None:
        """Kill the workers. Further episodes are refused."""
        self.workers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    async def _start(self, number: int) -> None:
        await asyncio.gather(*(self._add(name).started for name in range(number)))

    async def _load(self, worker: Worker) -> None:
        await worker.request("load", worker_process.START_S, **self._settings)
        self.tools = await worker.request("describe", worker_process.START_S)

    def _add(self, name: object) -> Worker:
        worker = self.workers.start(name)
        worker.silence_s = SILENCE_S
        self._active.append(worker)
        self._episodes[worker] = set()
        return worker

    async def _place(self, key: str, loop: asyncio.AbstractEventLoop) -> Worker:
        """Return the worker of a new episode; end the episodes of an earlier `loop`."""
        if loop is not self._loop:
            self._loop = loop
            for worker, keys in self._episodes.items():
                for old in keys:
                    self.workers.submit(self.end_episode, worker, old, CLOSE_S)
                keys.clear()
        worker = self._choose()
        self._episodes[worker].add(key)
        return worker

    def _choose(self) -> Worker:
        """Return the worker with the fewest episodes; replace those that get no more."""
        for worker in list(self._active):
            if worker.is_lost:  # while it was idle
                self._remove(worker, f"the environment worker exited{worker.see_log}")
            elif worker.num_abandoned >= MAX_ABANDONED:
                LOG.warning(
                    "an environment worker with %d calls that do not end is replaced",
                    worker.num_abandoned,
                )
                self._active.remove(worker)
                self._add(worker.name)
        for worker in [worker for worker in self._episodes if worker not in self._active]:
            if not self._episodes[worker]:
                del self._episodes[worker]
                self.workers.submit(worker.lose, "the environment worker is replaced")
        if not self._active:
            raise EnvironmentFailed("lost", "no environment worker is left")
        return min(self._active, key=lambda worker: len(self._episodes[worker]))

    def _remove(self, worker: Worker, reason: str) -> None:
        """Report a worker that is lost, and replace it unless it never became ready."""
        if worker not in self._episodes:
            return
        LOG.warning("%s; episodes lost: %d", reason, len(self._episodes.pop(worker)))
        if worker not in self._active:
            return
        self._active.remove(worker)
        if worker.was_ready:
            self._add(worker.name)
        else:
            self.workers.submit(worker.lose, "the environment worker did not start")
