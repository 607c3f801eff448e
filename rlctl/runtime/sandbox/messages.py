"""Messages between the controller and a worker: a length, then a request or a reply.

Requests are pickled. Replies are JSON, also of the errors that a worker raises while it loads a
user's code: unpickling one would run code that users have written.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any

from rlctl.errors import ConfigError, MissingExtraError, Problem, ResourceError, RlctlError

MAX_REPLY = 8 * 2**20  # bytes
_HEADER = struct.Struct("!I")  # length of a message in bytes
_ERRORS = {kind.__name__: kind for kind in (ConfigError, MissingExtraError, ResourceError)}


def request_frame(request: object) -> bytes:
    """Return the message of a request."""
    return _framed(pickle.dumps(request))


def reply_frame(reply: object) -> bytes:
    """Return the message of a reply. Raises ValueError or TypeError if it has no JSON form."""
    data = _ENCODER.encode(reply).encode()
    if len(data) > MAX_REPLY:
        raise ValueError(f"the message has {len(data)} bytes, and {MAX_REPLY} are allowed")
    return _framed(data)


def receive_request(connection: socket.socket) -> Any:
    """Return the next request, without an event loop. Raises ConnectionError at the end."""

    def receive(size: int) -> bytes:
        data = connection.recv(size, socket.MSG_WAITALL)
        if len(data) < size:
            raise ConnectionError
        return data

    return pickle.loads(receive(*_HEADER.unpack(receive(_HEADER.size))))


async def read_request(reader: asyncio.StreamReader) -> Any:
    """Return the next request. Raises IncompleteReadError at the end of the connection."""
    (length,) = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    return pickle.loads(await reader.readexactly(length))


async def read_reply(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Return the next reply.

    Raises IncompleteReadError at the end of the connection, and ValueError if something else was
    sent than a reply.
    """
    (length,) = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    if length > MAX_REPLY:
        raise ValueError("the message is too long")
    reply = json.loads(await reader.readexactly(length))
    if not isinstance(reply, dict) or not {"id", "abandoned"} <= reply.keys():
        raise ValueError("the message is not a reply")
    return reply


def error_text(error: BaseException) -> str:
    """Return type and text of `error`, or of each cause of a group."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(error_text(cause) for cause in error.exceptions)
    text = str(error)
    if not text:
        return type(error).__name__
    return f"{type(error).__name__}: {text}"


def error_to_json(error: RlctlError) -> list[Any]:
    """Return the class name and the problems of `error`, without their fixes."""
    problems = [[each.message, each.where, each.hint, None, each.code] for each in error.problems]
    return [type(error).__name__, problems]


def error_from_json(data: Sequence[Any]) -> RlctlError:
    """Return the error of `error_to_json`; a ConfigError if its class is another one."""
    kind, problems = data
    return _ERRORS.get(kind, ConfigError)(*(Problem(*problem) for problem in problems))


def _framed(data: bytes) -> bytes:
    return _HEADER.pack(len(data)) + data


def _plain(value: Any) -> Any:
    """Return the Python value of a NumPy scalar or array, the text of anything else."""
    for name in ("item", "tolist"):
        convert = getattr(value, name, None)
        if convert is not None and (name == "tolist" or getattr(value, "ndim", 1) == 0):
            return convert()
    return str(value)


_ENCODER = json.JSONEncoder(default=_plain)
