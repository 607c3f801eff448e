"""Worker process of users' code: it calls the methods that requests name on one object, the host.

Requests are processed in turn, in the main thread and without an event loop, until the first one
of an asynchronous method. From then on each is a task of one event loop, so one that waits delays
no other.

The parent of a worker is its guard, which the controller starts and which forks it. With a guard
between them, code in the worker has no relation to the controller, which it could signal. When the
worker exits, or the controller does, the guard kills all that the worker has started. It also
copies the worker's output, so that no limit of the worker and no error of the log reaches code that
prints. Neither imports torch or Ray, unless the users' code does.
"""

from __future__ import annotations

import asyncio
import faulthandler
import fcntl
import inspect
import os
import signal
import socket
import stat
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any, NamedTuple

from rlctl.code_places import plugin_packages, users_place
from rlctl.errors import RlctlError
from rlctl.runtime.sandbox import calls
from rlctl.runtime.sandbox.messages import (
    error_text,
    error_to_json,
    read_request,
    receive_request,
    reply_frame,
)
from rlctl.runtime.sandbox.process_limits import die_with, restrict

# Dumps the stacks of all threads to the log. The controller sends it to a loop that is blocked.
DUMP_SIGNAL = signal.SIGUSR1
PING = "ping"  # a request that every host answers
_MAX_TRACEBACKS = 100  # in the log of one process


class Request(NamedTuple):
    """Call of the host's method `op`.

    The first request has the `limits` of the process and a function that returns its `host`.
    """

    number: int
    op: str
    arguments: Mapping[str, Any]


def main(descriptor: int, parent: int) -> None:
    """Serve the socket `descriptor`, under a guard, until `parent` closes it or exits."""
    run_guarded(lambda: _work(descriptor), descriptor, parent)


def _work(descriptor: int) -> None:
    """Report the process, then process requests."""
    from rlctl.runtime.sandbox.interruptions import record_stops

    record_stops()
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    # An error is written before the connection closes, after which the controller ends the process.
    with socket.socket(fileno=descriptor) as connection, _ending_process():
        request: Request = receive_request(connection)
        restrict(request.arguments["limits"])
        server = _Server(request.arguments["host"]())
        connection.sendall(server.reply(request.number, {"result": os.getpid()}))
        while True:
            request = receive_request(connection)
            if server.is_async(request):
                asyncio.run(_serve(server, connection, request))
            for reply in server.process(request):
                connection.sendall(reply)


async def _serve(server: _Server, connection: socket.socket, request: Request) -> None:
    """Process `request` and all later ones as tasks; exit when the connection closes."""
    with _ending_process():
        reader, writer = await asyncio.open_connection(sock=connection)

        async def reply(request: Request) -> None:
            writer.write(await server.process_async(request))

        tasks = set[asyncio.Task[None]]()  # the loop itself keeps no reference
        while True:
            task = asyncio.create_task(reply(request))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            request = await read_request(reader)


class _Server:
    """Calls of the methods of `host`, and their replies.

    A reply is {"id", "abandoned", and "result" or "error"}. "problems" has the
    problems of an `RlctlError`.
    """

    def __init__(self, host: object) -> None:
        self._host = host
        self._num_tracebacks = 0

    def is_async(self, request: Request) -> bool:
        """Return True if the request must be processed on an event loop."""
        return inspect.iscoroutinefunction(getattr(self._host, request.op))

    def process(self, request: Request) -> Iterator[bytes]:
        """Yield the reply to a request, or one for each item of a method that is a generator."""
        try:
            result = getattr(self._host, request.op)(**request.arguments)
            if not inspect.isgenerator(result):
                result = [result]
            for item in result:
                yield self.reply(request.number, {"result": item})
        except Exception as error:
            yield self.reply(request.number, self._failure(error))

    async def process_async(self, request: Request) -> bytes:
        """Return the reply to a request of an asynchronous method."""
        try:
            method = None if request.op == PING else getattr(self._host, request.op)
            outcome = {"result": method and await method(**request.arguments)}
        except asyncio.CancelledError:
            outcome = {"error": "cancelled"}
        except Exception as error:
            outcome = self._failure(error)
        return self.reply(request.number, outcome)

    def reply(self, number: int, outcome: Mapping[str, Any]) -> bytes:
        """Return the message of an outcome; one that cannot be sent becomes an error."""
        base = {"id": number, "abandoned": calls.num_abandoned()}
        try:
            return reply_frame({**base, **outcome})
        except (TypeError, ValueError) as error:  # too long, or keys that JSON does not have
            return reply_frame({**base, "error": str(error)})

    def _failure(self, error: Exception) -> dict[str, Any]:
        """Return the outcome of a call that raised; its traceback goes to the log."""
        if isinstance(error, RlctlError):
            return {"error": error_text(error), "problems": error_to_json(error)}
        self._num_tracebacks += 1
        if self._num_tracebacks <= _MAX_TRACEBACKS:
            traceback.print_exception(error)
            sys.stderr.flush()
        place = users_place(error, plugin_packages)
        text = error_text(error)
        if place:
            text += f" ({place})"
        return {"error": text}


@contextmanager
def _ending_process() -> Iterator[None]:
    """End the process after the block: calls that hang can be neither ended nor joined."""
    status = 1
    try:
        yield
    except (asyncio.IncompleteReadError, ConnectionError):
        status = 0  # the parent has exited or has closed the pool
    except BaseException as error:
        traceback.print_exception(error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


_STDOUT = 1
_STDERR = 2
_LOG_BYTES = 16 * 2**20  # of a log; a longer one keeps the last half
_NOTE = b"[earlier output was removed: the log is limited to 16 MiB]\n"
_DRAIN_S = 2.0  # time to copy what the worker wrote before it ended


def run_guarded(work: Callable[[], None], descriptor: int, parent: int) -> None:
    """Fork a worker that calls `work`; guard it until it or `parent` exits.

    The guard closes the connection `descriptor`. Returns in the worker when `work` does; exits in
    the guard.
    """
    from rlctl.runtime.sandbox.guard import fork_guarded, guard

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and closes the pool
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    die_with(parent, signal.SIGTERM)
    output, writer = os.pipe()
    if worker := fork_guarded():
        os.close(descriptor)
        os.close(writer)
        copying = Thread(target=_copy, args=(output,), daemon=True)
        copying.start()
        status = guard(worker)
        copying.join(_DRAIN_S)
        sys.exit(status)
    os.close(output)
    os.dup2(writer, _STDOUT)
    os.dup2(writer, _STDERR)
    os.close(writer)
    work()


def _copy(output: int) -> None:
    """Copy the worker's output to stdout until all writers have ended; drop what fails."""
    mode = fcntl.fcntl(_STDOUT, fcntl.F_GETFL)
    is_log = bool(mode & os.O_APPEND and mode & os.O_RDWR)  # as `GuardedProcess` opens it
    is_log &= stat.S_ISREG(os.fstat(_STDOUT).st_mode)
    while text := os.read(output, 2**16):
        with suppress(OSError):
            if is_log and (size := os.fstat(_STDOUT).st_size) > _LOG_BYTES:
                half = _LOG_BYTES // 2
                text = _NOTE + os.pread(_STDOUT, half, size - half) + text
                os.ftruncate(_STDOUT, 0)
            while text:
                text = text[os.write(_STDOUT, text) :]
