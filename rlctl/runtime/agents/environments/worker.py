"""Worker process that hosts the environments of many episodes on one event loop.

Each request of the controller is a task of its own, so an environment that waits delays no other.
Requests are JSON: {"id", "op", "episode", ...}; replies are {"id", "abandoned", and "result" or
"error"}. It imports neither torch nor Ray, unless a user's environment does.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from rlctl.errors import ConfigError, RlctlError
from rlctl.runtime.agents.environments import calls
from rlctl.runtime.agents.environments.channel import HEADER
from rlctl.runtime.agents.environments.loading import Factory, load_environment
from rlctl.runtime.agents.environments.protocol import Environment
from rlctl.runtime.agents.environments.wire import (
    checked_messages,
    checked_score,
    encode,
    step_to_json,
    turn_from_json,
)
from rlctl.runtime.sandbox.errors import error_text, error_to_json
from rlctl.runtime.sandbox.guard import run_guarded
from rlctl.runtime.sandbox.limits import Limits, restrict
from rlctl.runtime.sandbox.user_code import user_line

_MAX_TRACEBACKS = 100  # in the log of one process
# Dumps the stacks of all threads to the log. The controller sends it to a loop that is blocked.
DUMP_SIGNAL = signal.SIGUSR1


def main(descriptor: int, parent: int) -> None:
    """Serve the socket `descriptor`, under a guard, until `parent` closes it or exits."""
    run_guarded(lambda: _work(descriptor), descriptor, parent)


def _work(descriptor: int) -> None:
    """Load the environment, then serve."""
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    connection = socket.socket(fileno=descriptor)
    with _ending_process():
        setup = _read(connection)
        restrict(Limits(**setup["limits"]))
        calls.set_call_limit(setup["call_s"])
        try:
            load = load_environment(setup["environment"], setup["params"], setup["defaults"])
        except RlctlError as error:
            connection.sendall(_framed(encode({"failed": error_to_json(error)})))
        else:
            asyncio.run(_main(connection, load, setup["environment"]))


async def _main(*args: Any) -> None:
    with _ending_process():
        await _serve(*args)


@contextmanager
def _ending_process() -> Iterator[None]:
    """End the process after the block: calls that hang can be neither ended nor joined."""
    status = 1
    try:
        yield
        status = 0
    except (asyncio.IncompleteReadError, ConnectionError):
        status = 0  # the parent has exited or has closed the pool
    except BaseException as error:
        traceback.print_exception(error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _read(connection: socket.socket) -> dict[str, Any]:
    """Return the first message, before there is an event loop."""

    def receive(size: int) -> bytes:
        data = connection.recv(size, socket.MSG_WAITALL)
        if len(data) < size:
            raise ConnectionError
        return data

    return json.loads(receive(*HEADER.unpack(receive(HEADER.size))))


async def _serve(
    connection: socket.socket, load: Callable[[], Awaitable[Factory]], name: str
) -> None:
    """Prepare the environment, report it, and process requests until the connection closes."""
    reader, writer = await asyncio.open_connection(sock=connection)
    try:
        factory = await load()
        described = await _describe(factory, name)
    except RlctlError as error:
        _send(writer, {"failed": error_to_json(error)})
        await writer.drain()
        return
    _send(writer, {"ready": os.getpid(), **described})
    host = _Host(factory)
    while True:
        request = await _receive(reader)
        task = asyncio.create_task(_reply(host, request, writer))
        host.tasks.add(task)  # the loop itself keeps no reference
        task.add_done_callback(host.tasks.discard)


async def _describe(factory: Factory, name: str) -> dict[str, Any]:
    """Return the tools that are known before an episode; none if they depend on its row.

    Raises ConfigError if the environment cannot be built.
    """
    try:
        environment = await calls.call(factory)
    except Exception as error:
        raise ConfigError(
            f"the environment {name!r} cannot be built: {type(error).__name__}: {error}",
            where=user_line(error, name),
            hint="its class gets no row before `reset`",
        ) from error
    try:
        return {"tools": list(environment.tools)}
    except Exception as error:
        return {"tools": [], "note": f"{type(error).__name__}: {error}"}
    finally:
        with suppress(Exception):
            limit = min(calls.CLOSE_S, calls.call_limit())
            await calls.limited(calls.call(environment.close), limit)


async def _receive(reader: asyncio.StreamReader) -> dict[str, Any]:
    (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    return json.loads(await reader.readexactly(length))


def _send(writer: asyncio.StreamWriter, message: Mapping[str, Any]) -> None:
    try:
        data = encode(message)
    except (TypeError, ValueError) as error:  # too long, or keys that JSON does not have
        failure = {"id": message.get("id"), "abandoned": 0, "error": f"{error}"}
        data = encode(failure)
    writer.write(_framed(data))


def _framed(data: bytes) -> bytes:
    return HEADER.pack(len(data)) + data


async def _reply(host: _Host, request: Mapping[str, Any], writer: asyncio.StreamWriter) -> None:
    reply: dict[str, Any] = {"id": request["id"]}
    try:
        reply["result"] = await host.handle(request)
    except asyncio.CancelledError:
        reply["error"] = "cancelled"
    except Exception as error:
        host.log_traceback(error)
        reply["error"] = error_text(error)
    _send(writer, {**reply, "abandoned": calls.num_abandoned()})


@dataclass
class _Episode:
    environment: Environment | None = None  # until it is built
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)


class _Host:
    """The environments of the episodes in progress."""

    def __init__(self, factory: Factory) -> None:
        self._factory = factory
        self._episodes: dict[str, _Episode] = {}
        self._tracebacks = 0
        self.tasks: set[asyncio.Task[None]] = set()

    async def handle(self, request: Mapping[str, Any]) -> Any:
        """Return the result of a request."""
        op = request["op"]
        if op == "ping":
            return None
        key = request["episode"]
        if op == "close":
            return await self._close(key)
        if op == "open":
            self._episodes[key] = _Episode()
        episode = self._episodes[key]
        task = asyncio.current_task()
        assert task is not None  # `handle` is called in one
        episode.tasks.add(task)
        try:
            if episode.environment is None:
                episode.environment = await calls.call(self._factory)
            return await getattr(self, f"_{op}")(episode.environment, request)
        finally:
            episode.tasks.discard(task)

    async def _open(self, environment: Environment, request: Mapping[str, Any]) -> Any:
        found = await calls.call(environment.reset, request["row"])
        messages = found if found is None or isinstance(found, str) else checked_messages(found)
        return {"messages": messages, "tools": list(environment.tools)}

    async def _step(self, environment: Environment, request: Mapping[str, Any]) -> Any:
        step = await calls.call(environment.step, turn_from_json(request["turn"]))
        return step_to_json(step)

    async def _score(self, environment: Environment, request: Mapping[str, Any]) -> Any:
        del request
        return checked_score(await calls.call(environment.score))

    async def _close(self, key: str) -> None:
        """Cancel what the episode still does, and close its environment."""
        episode = self._episodes.pop(key, None)
        if episode is None:
            return
        for task in list(episode.tasks):
            task.cancel()
        if episode.environment is not None:
            await calls.call(episode.environment.close)

    def log_traceback(self, error: Exception) -> None:
        """Write the traceback of `error` to the log of this process, unless it has many."""
        self._tracebacks += 1
        if self._tracebacks <= _MAX_TRACEBACKS:
            traceback.print_exception(error)
            sys.stderr.flush()
