"""The controller's handle of one worker process that hosts environments."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from rlctl.errors import ResourceError
from rlctl.runtime.agents.environments.channel import Channel, ChannelClosed
from rlctl.runtime.agents.environments.worker import DUMP_SIGNAL
from rlctl.runtime.sandbox.errors import error_from_json
from rlctl.runtime.sandbox.process import GuardedProcess

START_S = 120.0  # startup timeout: a user's file may import heavy libraries
# A worker with requests is asked for a reply after PING_S seconds of silence, and is killed if none
# comes within SILENCE_S more: a blocked event loop delays all of its episodes.
PING_S, SILENCE_S = 5.0, 15.0
_DUMP_S = 0.5  # time to write the stacks of a blocked worker
# A worker with this many calls that exceeded their deadline and still run gets no new episodes.
MAX_ABANDONED = 16


class WorkerLost(Exception):
    """End of a worker process, with the reason."""


class EnvironmentWorker(GuardedProcess):
    """A worker process, its requests in progress, and the episodes that it hosts."""

    def __init__(self, setup: Mapping[str, Any], log: Path | None, env: Sequence[str]) -> None:
        """Start the process; it is ready when `start` returns or the first reply arrives."""
        ours, theirs = socket.socketpair()
        module = "rlctl.runtime.agents.environments.worker"
        super().__init__(module, theirs.fileno(), log, env)
        theirs.close()
        self._channel = Channel(ours)
        self._channel.send(setup)
        self._numbers = count()
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._last_reply = 0.0  # on the loop's clock
        self._last_ping: float | None = None  # None: none since the last reply
        self._is_blocked = False
        self._on_lost: Callable[[EnvironmentWorker, str], None] | None = None
        self.description: dict[str, Any] = {}
        self.episodes: set[str] = set()
        self.num_abandoned = 0
        self.is_lost = False

    @property
    def accepts(self) -> bool:
        """True if it may get new episodes."""
        return not self.is_lost and self.num_abandoned < MAX_ABANDONED

    def start(self) -> None:
        """Wait until the environment is loaded.

        Raises the error of the environment's load, and ResourceError if the process exits or does
        not start in time.
        """
        try:
            message = self._channel.receive(START_S)
        except ChannelClosed:
            status = self.process.wait()
            raise ResourceError(
                f"an environment worker exited while starting (exit status {status})",
                where=self._log_name,
            ) from None
        except TimeoutError:
            raise ResourceError(
                f"an environment worker did not start within {START_S:g} s", where=self._log_name
            ) from None
        if "failed" in message:
            raise error_from_json(message["failed"])
        self._on_ready(message)

    def attach(self, on_lost: Callable[[EnvironmentWorker, str], None]) -> None:
        """Deliver replies on the running loop; `on_lost` gets the worker and the reason."""
        self.detach()
        self._loop = asyncio.get_running_loop()
        self._on_lost = on_lost
        self._last_reply = self._loop.time()
        self._channel.attach(self._on_message, self._on_end)

    def detach(self) -> None:
        """Forget the loop and the requests in progress on it."""
        self._channel.detach()
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._loop = None, None
        self._pending.clear()

    def post(self, **request: Any) -> asyncio.Future[Any]:
        """Send a request and return the future of its reply.

        Raises ValueError or TypeError for a request that is too long or has no JSON form.

        The future raises WorkerLost if the process ends first. A reply that nobody awaits is
        dropped.
        """
        assert self._loop is not None, "attached"
        number, future = next(self._numbers), self._loop.create_future()
        if self.is_lost:
            future.set_exception(WorkerLost("the environment worker has exited"))
            future.exception()  # a request that nobody awaits is no error
            return future
        self._channel.send({"id": number, **request})
        if not self._pending:
            self._last_reply, self._last_ping = self._loop.time(), None
        self._pending[number] = future
        future.add_done_callback(lambda _: self._pending.pop(number, None))
        if self._timer is None:
            self._timer = self._loop.call_later(PING_S, self._check)
        return future

    def lose(self, reason: str) -> None:
        """Fail all requests in progress with `reason`, and report the worker as lost."""
        if self.is_lost:
            return
        self.is_lost = True
        self._channel.detach()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for future in list(self._pending.values()):
            if not future.done():
                future.set_exception(WorkerLost(reason))
                future.exception()  # a request that nobody awaits is no error
        if self._on_lost is not None:
            self._on_lost(self, reason)

    def kill(self) -> int:
        """End the worker and all that it has started. Return the exit status.

        A worker with a blocked event loop first writes the stacks of its threads to the log.
        """
        if self._is_blocked and self.worker is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.worker, DUMP_SIGNAL)
            time.sleep(_DUMP_S)
        status = super().kill()
        self._channel.close()
        return status

    def _on_ready(self, message: dict[str, Any]) -> None:
        self.worker = int(message.pop("ready"))
        self.description = message

    def _on_message(self, message: Any) -> None:
        assert self._loop is not None, "attached"
        self._last_reply, self._last_ping = self._loop.time(), None
        if not isinstance(message, dict):
            self.lose("the environment worker sent something else than a reply")
        elif "ready" in message:
            self._on_ready(message)
        elif "failed" in message:
            self.lose(str(error_from_json(message["failed"])))
        else:
            self.num_abandoned = int(message.get("abandoned", 0))
            future = self._pending.get(message.get("id", -1))
            if future is not None and not future.done():
                future.set_result(message)

    def _on_end(self) -> None:
        status = self.process.poll()
        ended = "" if status is None else f" (exit status {status})"
        self.lose(f"the environment worker exited{ended}{self._see_log}")

    def _check(self) -> None:
        """Ask a silent worker for a reply; lose it if it has been silent for too long."""
        assert self._loop is not None, "attached"
        self._timer = None
        if not self._pending:
            return
        now = self._loop.time()
        if self.worker is None:
            if now - self._last_reply >= START_S:
                self.lose(f"an environment worker did not start in {START_S:g} s{self._see_log}")
                return
        elif self._last_ping is None:
            if now - self._last_reply >= PING_S:
                self._channel.send({"id": next(self._numbers), "op": "ping"})
                self._last_ping = now
        elif now - self._last_ping >= SILENCE_S:
            self._is_blocked = True
            self.lose(
                f"the event loop of the environment worker was blocked for {SILENCE_S:g} s: an "
                f"async function must not block{self._see_log}"
            )
            return
        self._timer = self._loop.call_later(PING_S, self._check)

    @property
    def _log_name(self) -> str | None:
        return None if self.log is None else str(self.log)

    @property
    def _see_log(self) -> str:
        return "" if self.log is None else f"; see {self.log}"
