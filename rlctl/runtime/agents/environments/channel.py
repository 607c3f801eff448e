"""Controller's end of the connection to a worker process: framed JSON on a socket.

It belongs to the whole run, while each step of training runs an event loop of its own, so it can be
attached to one loop after another. Reading and writing never block the loop.
"""

from __future__ import annotations

import asyncio
import json
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from rlctl.runtime.agents.environments.wire import MAX_MESSAGE, encode

HEADER = struct.Struct("!I")  # length of a message in bytes
_CHUNK = 2**18


class ChannelClosed(Exception):
    """End of the connection, or a message that the worker's side cannot have sent."""


class Channel:
    """A socket, the part of a message that has arrived, and what could not yet be sent."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._will_flush = False  # by the loop
        self._has_writer = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def attach(self, on_message: Callable[[Any], None], on_end: Callable[[], None]) -> None:
        """Deliver messages to `on_message` on the running loop, and call `on_end` at the end."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._read, on_message, on_end)
        self._will_flush = self._has_writer = False  # on an earlier loop
        self._flush()

    def detach(self) -> None:
        """Deliver nothing more. A loop that is closed has forgotten the socket already."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
        self._loop = None

    def send(self, message: object) -> None:
        """Send, together with other messages of this iteration of the loop.

        Raises ValueError if the message is too long.
        """
        data = encode(message)
        self._outgoing += HEADER.pack(len(data)) + data
        if self._loop is None:
            self._flush()
        elif not self._will_flush:
            self._loop.call_soon(self._flush)
            self._will_flush = True

    def receive(self, timeout_s: float) -> Any:
        """Wait for the next message without a loop. Raises ChannelClosed or TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._flush()
            for message in self._messages():
                return message
            left = deadline - time.monotonic()
            writable = [self._socket] if self._outgoing else []
            if left <= 0 or not any(select.select([self._socket], writable, [], left)):
                raise TimeoutError
            if not self._fill():
                raise ChannelClosed

    def close(self) -> None:
        """Close the connection."""
        self.detach()
        self._socket.close()

    def _read(self, on_message: Callable[[Any], None], on_end: Callable[[], None]) -> None:
        try:
            is_open = self._fill()
            for message in self._messages():
                on_message(message)
        except ChannelClosed:
            is_open = False
        if not is_open:
            self.detach()
            on_end()

    def _fill(self) -> bool:
        """Read what has arrived. Return False at the end of the connection."""
        try:
            data = self._socket.recv(_CHUNK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._incoming += data
        return bool(data)

    def _messages(self) -> Any:
        """Yield the complete messages. Raises ChannelClosed for one that is too long or no JSON."""
        while len(self._incoming) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._incoming)
            if length > MAX_MESSAGE:
                raise ChannelClosed
            end = HEADER.size + length
            if len(self._incoming) < end:
                return
            data = bytes(self._incoming[HEADER.size : end])
            del self._incoming[:end]
            try:
                yield json.loads(data)
            except ValueError:
                raise ChannelClosed from None

    def _flush(self) -> None:
        """Send what the socket accepts. An error is ignored: reading finds the end, too."""
        try:
            while self._outgoing:
                del self._outgoing[: self._socket.send(self._outgoing)]
        except BlockingIOError:
            if self._loop is not None and not self._has_writer:
                self._loop.add_writer(self._socket, self._flush)
                self._has_writer = True
        except OSError:
            self._outgoing.clear()
        self._will_flush = bool(self._outgoing)
        if self._has_writer and not self._outgoing and self._loop is not None:
            self._loop.remove_writer(self._socket)
            self._has_writer = False
