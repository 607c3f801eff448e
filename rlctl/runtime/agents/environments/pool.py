"""Pool of worker processes that host the environments of episodes.

The pool lives as long as the run. Each step of training runs an event loop of its own, to which the
pool attaches itself with the first call. A worker that exits or whose event loop is blocked is
killed and replaced, and its episodes fail as "lost". No worker outlives the program.
"""

from __future__ import annotations

import asyncio
import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

from rlctl.errors import InternalError
from rlctl.recipes import schema
from rlctl.runtime.agents.environments.calls import CLOSE_S
from rlctl.runtime.agents.environments.program import ProgramEnvironment
from rlctl.runtime.agents.environments.protocol import Message, Row, Step, ToolSchema, Turn
from rlctl.runtime.agents.environments.wire import step_from_json, turn_to_json
from rlctl.runtime.agents.environments.worker_process import EnvironmentWorker, WorkerLost
from rlctl.runtime.sandbox.limits import GIB, Limits, default_memory

LOG = logging.getLogger(__name__)

DEFAULT_ENVIRONMENT = "tools"
PROGRAM = f"{ProgramEnvironment.__module__}:{ProgramEnvironment.__qualname__}"
# Time beyond a turn's deadline. A tool's own deadline must come first, also on a busy machine.
GRACE_S = 2.0


@dataclass(frozen=True)
class Timeouts:
    """Time limits in seconds: of one call of a tool, and of one request to an environment."""

    call_s: float = 60.0
    turn_s: float = 120.0


class EnvironmentFailed(Exception):
    """Failure of an environment, which ends its episode.

    `kind` is "error" (it raised, or returned something wrong), "timeout" or "lost" (its worker).
    """

    def __init__(self, kind: Literal["error", "timeout", "lost"], text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind, self.text = kind, text


class RemoteEnvironment:
    """An environment in a worker process. Each call raises EnvironmentFailed if it fails.

    `messages` is the result of `reset`, `tools` what the policy may call.
    """

    def __init__(self, worker: EnvironmentWorker, key: str, timeouts: Timeouts) -> None:
        self._worker, self._key, self._timeouts = worker, key, timeouts
        self._is_closed = False
        self.messages: list[Message] | str | None = None
        self.tools: list[ToolSchema] = []

    async def reset(self, row: Row) -> None:
        """Start the episode of `row`."""
        found = await self._request("open", row=dict(row))
        self.messages, self.tools = found["messages"], found["tools"]

    async def step(self, turn: Turn) -> Step:
        """Return the environment's reply to a turn of the policy."""
        return step_from_json(await self._request("step", turn=turn_to_json(turn)))

    async def score(self) -> float | dict[str, float] | None:
        """Return the score of the finished episode; None if the reward functions score it."""
        return await self._request("score")

    async def close(self) -> None:
        """Cancel what the environment still does, and close it. Never raises a failure of it."""
        if self._is_closed:
            return
        self._is_closed = True
        reply = self._worker.post(op="close", episode=self._key)
        self._worker.episodes.discard(self._key)
        limit = min(CLOSE_S, self._timeouts.turn_s)
        try:
            error = (await _within(reply, limit)).get("error")
        except TimeoutError:
            error = f"did not end within {limit:g} s"
        except WorkerLost:
            return  # the pool has reported it
        if error:
            LOG.warning("closing an environment failed: %s", error)

    async def _request(self, op: str, **data: Any) -> Any:
        """Send a request and return its result."""
        limit = self._timeouts.turn_s
        try:
            posted = self._worker.post(op=op, episode=self._key, **data)
            reply = await _within(posted, limit + GRACE_S)
        except TimeoutError:
            raise EnvironmentFailed("timeout", f"{op} took longer than {limit:g} s") from None
        except WorkerLost as lost:
            raise EnvironmentFailed("lost", str(lost)) from None
        except (TypeError, ValueError) as error:  # the row is too long or has no JSON form
            raise EnvironmentFailed("error", str(error)) from None
        if "error" in reply:
            raise EnvironmentFailed("error", f"{op}: {reply['error']}")
        return reply["result"]


async def _within(reply: asyncio.Future[Any], seconds: float) -> Any:
    """Return a reply. Raises TimeoutError after `seconds`, at half the cost of asyncio.timeout."""

    def expire() -> None:
        if not reply.done():
            reply.set_exception(TimeoutError())

    timer = reply.get_loop().call_later(seconds, expire)
    try:
        return await reply
    finally:
        timer.cancel()


class EnvironmentPool:
    """Worker processes for one kind of environment; `close()` it or use it as a context manager."""

    def __init__(
        self,
        environment: str,
        params: Mapping[str, Any] | None = None,
        *,
        defaults: Mapping[str, Any] | None = None,
        num_workers: int = 1,
        timeouts: Timeouts | None = None,
        logs: Path | None = None,
        env: Sequence[str] = (),
        limits: Limits | None = None,
    ) -> None:
        """Start the workers and load the environment: a plug-in, `module:Class` or `path.py:Class`.

        `params` are its settings; of `defaults`, it gets those that it has. Output goes to
        `environment-<number>.log` in the folder `logs`, or to stderr. `env` names environment
        variables that workers get besides the usual ones. Raises ConfigError if the environment
        cannot be loaded, ResourceError if a worker does not start.
        """
        self._timeouts = timeouts or Timeouts()
        self._env = tuple(env)
        limits = limits or Limits(default_memory(num_workers), open_files=65536)
        self._setup = {
            "environment": environment,
            "params": dict(params or {}),
            "defaults": dict(defaults or {}),
            "limits": asdict(limits),
            "call_s": min(self._timeouts.call_s, self._timeouts.turn_s),
        }
        self._workers: list[EnvironmentWorker] = []  # that get episodes
        self._processes: list[EnvironmentWorker] = []  # all that may still live
        self._loop: asyncio.AbstractEventLoop | None = None
        self._finalizer = weakref.finalize(self, _kill_all, self._processes)
        try:
            for number in range(num_workers):
                self._add(logs and logs / f"environment-{number}.log")
            for worker in self._workers:
                worker.start()
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_config(cls, rollout: schema.Rollout, logs: Path | None = None) -> Self:
        """Build the pool of a run: its program, its environment, or the tools of `multi_turn`.

        Settings of the environment that have the name of a key of `multi_turn` have its value
        unless `agent.params` sets them. Raises as the constructor.
        """
        agent, limits = rollout.agent, rollout.agent.limits
        number = agent.num_workers or len(os.sched_getaffinity(0))
        memory = None if limits.memory_gb is None else int(limits.memory_gb * GIB)
        environment, params = agent.environment or DEFAULT_ENVIRONMENT, agent.params
        if agent.program is not None:
            environment, params = PROGRAM, {"program": agent.program}
        return cls(
            environment,
            params,
            defaults=rollout.multi_turn.model_dump(),
            num_workers=number,
            timeouts=Timeouts(agent.timeouts.call_s, agent.timeouts.turn_s),
            logs=logs,
            env=agent.env,
            limits=Limits(
                memory or default_memory(number), int(limits.file_gb * GIB), limits.open_files
            ),
        )

    @property
    def tools(self) -> list[ToolSchema]:
        """Tools that are known before an episode; empty if they depend on its row."""
        return self._workers[0].description.get("tools", []) if self._workers else []

    async def open(self, row: Row, key: str, timeouts: Timeouts | None = None) -> RemoteEnvironment:
        """Start the episode of `row` on the worker with the fewest; `key` must be unique.

        Raises EnvironmentFailed if its `reset` fails; nothing needs to be closed then.
        """
        self._attach()
        worker = self._choose()
        worker.episodes.add(key)
        remote = RemoteEnvironment(worker, key, timeouts or self._timeouts)
        try:
            await remote.reset(row)
        except BaseException:
            await remote.close()
            raise
        return remote

    def close(self) -> None:
        """Kill the workers. Further episodes are refused."""
        self._finalizer()
        self._workers.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _add(self, log: Path | None) -> EnvironmentWorker:
        worker = EnvironmentWorker(self._setup, log, self._env)
        self._workers.append(worker)
        self._processes.append(worker)
        return worker

    def _attach(self) -> None:
        """Attach the workers to the running loop, and close the episodes of an earlier one."""
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        if not self._finalizer.alive:
            raise InternalError("the environment pool is closed")
        self._loop = loop
        for worker in [each for each in self._processes if not each.is_lost]:
            worker.attach(self._on_lost)
            for key in worker.episodes:
                worker.post(op="close", episode=key)
            worker.episodes.clear()

    def _choose(self) -> EnvironmentWorker:
        """Return the worker with the fewest episodes; replace those that accept none."""
        for worker in [each for each in self._workers if not each.accepts]:
            LOG.warning(
                "an environment worker with %d calls that do not end is replaced",
                worker.num_abandoned,
            )
            self._replace(worker)
        for worker in [each for each in self._processes if each not in self._workers]:
            if not worker.episodes and not worker.is_lost:
                worker.lose("the environment worker is replaced")
        if not self._workers:
            raise EnvironmentFailed("lost", "no environment worker is left")
        return min(self._workers, key=lambda worker: len(worker.episodes))

    def _replace(self, worker: EnvironmentWorker) -> None:
        self._workers.remove(worker)
        self._add(worker.log).attach(self._on_lost)

    def _on_lost(self, worker: EnvironmentWorker, reason: str) -> None:
        """Replace a worker that is lost, unless it never became ready, and end its process."""
        if worker in self._workers:
            LOG.warning("%s; episodes lost: %d", reason, len(worker.episodes))
            if worker.worker is None:
                self._workers.remove(worker)
            else:
                self._replace(worker)
        assert self._loop is not None, "a worker is lost on a loop"
        self._loop.run_in_executor(None, self._end, worker)

    def _end(self, worker: EnvironmentWorker) -> None:
        worker.kill()
        with suppress(ValueError):  # the pool has been closed since
            self._processes.remove(worker)


def _kill_all(workers: list[EnvironmentWorker]) -> None:
    """Kill and forget all workers. A plain function: a finalizer must not refer to the pool."""
    for worker in list(workers):
        worker.terminate()
    while workers:
        workers.pop().kill()
