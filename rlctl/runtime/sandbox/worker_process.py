"""The controller's handle of a guarded worker process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from rlctl.errors import ResourceError, RlctlError
from rlctl.runtime.sandbox.messages import error_from_json, read_reply, request_frame
from rlctl.runtime.sandbox.process_limits import allowed_environment
from rlctl.runtime.sandbox.worker_main import DUMP_SIGNAL, PING, Request
from rlctl.runtime.sandbox.worker_settings import WorkerSettings

START_S = 120.0  # startup timeout: a user's file may import heavy libraries
# Time beyond the limit of a call before the controller fails it. The limit in the worker must come
# first, also on a busy machine.
GRACE_S = 2.0
PING_S = 5.0  # interval at which an event loop with requests is asked for a reply
_STOP_S = 5.0  # a guard kills its worker and exits within milliseconds, unless it was stopped
_POLL_S = 0.01
_DUMP_S = 0.5  # time to write the stacks of a blocked worker

_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from rlctl.runtime.sandbox.worker_main import main
main(int(sys.argv[2]), int(sys.argv[3]))
"""
# Another interpreter has other packages, and of these the package rlctl alone.
_BOOT_OTHER = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
folder = sys.argv[1]
spec = spec_from_file_location(
    "rlctl", folder + "/__init__.py", submodule_search_locations=[folder]
)
sys.modules["rlctl"] = module_from_spec(spec)
spec.loader.exec_module(sys.modules["rlctl"])
from rlctl.runtime.sandbox.worker_main import main
main(int(sys.argv[2]), int(sys.argv[3]))
"""
_PACKAGE = str(Path(__file__).parents[2])

Receive = Callable[[float | None], Awaitable[Any]]


class WorkerLost(Exception):
    """End of a worker process, with the reason and the exit status."""

    def __init__(self, reason: str, status: int) -> None:
        super().__init__(reason)
        self.status = status


class RequestFailed(Exception):
    """Error that a request raised in the worker; `error` is the error if it is an RlctlError."""

    def __init__(self, text: str, error: RlctlError | None) -> None:
        super().__init__(text)
        self.error = error


class Worker:
    """One worker, its guard `process`, and the requests in progress.

    All methods but `terminate` and `kill` are called on one event loop. `pid` is the worker's, and
    `num_abandoned` the number of its calls that exceeded their limit and still run. `silence_s` is
    the time limit of a reply of its event loop; None: it has none, and processes one request at a
    time. `was_interrupted` is true if something outside has killed or stopped it.
    """

    silence_s: float | None = None
    was_interrupted = False

    def __init__(
        self,
        noun: str,
        name: object,
        settings: WorkerSettings,
        host: Callable[[], object],
        prepare: Callable[[Worker], Awaitable[Any]],
    ) -> None:
        """Start the process; it is ready when `started` is done.

        `noun` is the kind of worker, in errors and together with `name` in the name of its log.
        `host` is pickled and called in the process; it returns the object whose methods requests
        name. `started` has the result of `prepare`, which sends the first ones.
        """
        self.name = name
        python = settings.python
        self.log = log = settings.logs and settings.logs / f"{noun}-{name}.log"
        self.pid: int | None = None
        self.num_abandoned = 0
        self._noun = noun
        self._python = python
        self._numbers = count()
        self._num_replies = 0
        self._pending: dict[int, asyncio.Queue[dict[str, Any] | None]] = {}  # None: lost
        self._is_watched = self._is_ending = False
        self._end: tuple[str, int] | None = None  # reason and exit status
        connection, remote = socket.socketpair()
        with remote, ExitStack() as stack:
            file = None if log is None else stack.enter_context(log.open("a+b", buffering=0))
            boot = _BOOT_OTHER
            modules = _PACKAGE
            if not python:
                boot = _BOOT
                modules = json.dumps(sys.path)
            arguments = [modules, str(remote.fileno()), str(os.getpid())]
            self.process = subprocess.Popen(
                [python or sys.executable, "-u", "-c", boot, *arguments],
                pass_fds=[remote.fileno()],
                env=allowed_environment(os.environ, settings.env),
                stdin=subprocess.DEVNULL,
                stdout=2 if file is None else file,  # stdout is reserved for results of commands
                stderr=file,
                start_new_session=True,  # Ctrl-C does not reach it
            )
        self._tasks = set[asyncio.Task[Any]]()  # the loop itself keeps no reference
        self.started = self._spawn(self._start(connection, settings, host, prepare))

    @property
    def is_lost(self) -> bool:
        """True if the process has ended, or is about to."""
        return self._is_ending or self.process.poll() is not None

    @property
    def was_ready(self) -> bool:
        """True if the start has succeeded."""
        started = self.started
        return started.done() and not started.cancelled() and started.exception() is None

    @property
    def see_log(self) -> str:
        """Reference to the log for an error, if there is one."""
        if self.log is None:
            return ""
        return f"; see {self.log}"

    async def request(self, op: str, limit_s: float | None, **arguments: Any) -> Any:
        """Return the result of the host's method `op`.

        Waits for the start of the worker; then the time limit begins. Raises the error of the
        start, RequestFailed, TimeoutError, and WorkerLost if the worker ends before it replies.
        """
        if asyncio.current_task() is not self.started:
            await asyncio.shield(self.started)
        with self.send(op, **arguments) as receive:
            return await receive(limit_s)

    @contextmanager
    def send(self, op: str, **arguments: Any) -> Iterator[Receive]:
        """Send a request to a worker that has started.

        The block gets a function that returns the next result within a time limit in seconds; a
        generator of the host has several. It raises what `request` does.
        """
        if self._end is not None:
            raise WorkerLost(*self._end)
        number = next(self._numbers)
        self._writer.write(request_frame(Request(number, op, arguments)))
        replies = self._pending[number] = asyncio.Queue()
        if self.silence_s is not None and self.started.done() and not self._is_watched:
            self._is_watched = True
            self._spawn(self._watch(self.silence_s))

        async def receive(limit_s: float | None) -> Any:
            async with asyncio.timeout(limit_s):
                reply = await replies.get()
            if reply is None:
                raise WorkerLost(*self._end or ("", 0))
            if "error" in reply:
                problems = reply.get("problems")
                raise RequestFailed(reply["error"], problems and error_from_json(problems))
            return reply["result"]

        try:
            yield receive
        finally:
            del self._pending[number]

    async def lose(self, reason: str, *, dump: bool = False) -> None:
        """End the process and fail the requests in progress with `reason`.

        "{}" in the reason becomes the exit status. With `dump` the process first writes the stacks
        of its threads to the log.
        """
        if self._is_ending:
            return
        from rlctl.runtime.sandbox.interruptions import is_from_signal, is_stopped

        self._is_ending = True
        by_itself = "{}" in reason or is_stopped(self.pid)
        if dump and self.pid is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, DUMP_SIGNAL)
            await asyncio.sleep(_DUMP_S)
        self.terminate()
        for _ in range(round(_STOP_S / _POLL_S)):
            if self.process.poll() is not None:
                break
            await asyncio.sleep(_POLL_S)
        status = self.kill(0.0)
        self.was_interrupted = by_itself and is_from_signal(status)
        self._end = (reason.replace("{}", str(status)), status)
        for replies in self._pending.values():
            replies.put_nowait(None)

    def terminate(self) -> None:
        """Begin to end the process; `kill` waits for it."""
        if self.process.poll() is None:
            self.process.terminate()

    def kill(self, wait_s: float = _STOP_S) -> int:
        """End the worker and all that it has started. Return the exit status."""
        self.terminate()
        try:
            self.process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
        status = self.process.wait()
        if status == -signal.SIGKILL and self.pid is not None:  # the guard had no time to
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        return status

    async def _start(
        self,
        connection: socket.socket,
        settings: WorkerSettings,
        host: Callable[[], object],
        prepare: Callable[[Worker], Awaitable[Any]],
    ) -> Any:
        """Set the process up and return the result of `prepare`.

        Raises the errors of `prepare`, and ResourceError if the process exits or does not start in
        time.
        """
        reader, self._writer = await asyncio.open_connection(sock=connection)
        self._spawn(self._read(reader))
        article = "an" if self._noun[0] in "aeiou" else "a"
        where = None if self.log is None else str(self.log)
        try:
            self.pid = await self.request("set up", START_S, limits=settings.limits, host=host)
            return await prepare(self)
        except WorkerLost as lost:
            raise ResourceError(
                f"{article} {self._noun} worker exited while starting (exit status {lost.status})",
                where=where,
                hint=self._python and f"{self._python} must be Python 3.11 or later with pydantic",
            ) from None
        except TimeoutError:
            raise ResourceError(
                f"{article} {self._noun} worker did not start within {START_S:g} s", where=where
            ) from None
        except RequestFailed as failure:
            raise (failure.error or failure) from None

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Deliver replies until the process ends or sends something else."""
        try:
            while True:
                reply = await read_reply(reader)
                self._num_replies += 1
                self.num_abandoned = int(reply["abandoned"])
                if (replies := self._pending.get(reply["id"])) is not None:
                    replies.put_nowait(reply)
        except (asyncio.IncompleteReadError, OSError, ValueError, TypeError):
            await self.lose(f"the {self._noun} worker exited (exit status {{}})")
        finally:
            self._writer.close()

    async def _watch(self, silence_s: float) -> None:
        """Lose the process if its event loop is blocked while it has requests."""
        while self._pending and not self._is_ending:
            await asyncio.sleep(PING_S)
            num_replies = self._num_replies
            try:
                await self.request(PING, silence_s)
            except WorkerLost:
                break
            except TimeoutError:
                if self._num_replies == num_replies:
                    reason = (
                        f"the event loop of the {self._noun} worker was blocked for "
                        f"{silence_s:g} s: an async function must not block"
                    )
                    await self.lose(reason, dump=True)
        self._is_watched = False

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._discard)
        return task

    def _discard(self, task: asyncio.Task[Any]) -> None:
        """Forget a task, and look at its error, so that asyncio does not log it."""
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()
