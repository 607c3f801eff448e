"""Stores of process groups, and what only their members can write.

A store of torch takes values from every process that can connect to it. On one machine the members
use a file that only processes of the user can open. Elsewhere the values of a weight group are
signed. Objects that members exchange are signed in both cases, because to read one runs its code.
The secret of a group travels with its address, in a call of Ray, which asks for a token.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import pickle
import secrets
import socket
from datetime import timedelta
from ipaddress import ip_address
from typing import IO, Any

from torch.distributed import (
    FileStore,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
    distributed_c10d,
)

from rlctl.runtime.rollout.rendezvous import listen

_MAC_BYTES = 32


def new_secret() -> str:
    """Return a secret of a new group."""
    return secrets.token_hex(32)


class Meeting:
    """Place of this process where the members of a process group find each other.

    `address` has its host, a port or a file, and the secret of the group.
    """

    def __init__(self, host: str, num_members: int) -> None:
        self._file: int | None = None
        self._listener: socket.socket | None = None
        place = _new_file() if ip_address(socket.gethostbyname(host)).is_loopback else None
        if place is None:
            self._listener = listen(host, num_members)
            place = str(self._listener.getsockname()[1])
        else:
            self._file, place = place
        self.address = f"{host} {place} {new_secret()}"

    def open_store(self, num_members: int, timeout: timedelta) -> Store:
        """Return the store, which lasts as long as this process."""
        if self._listener is None:
            return _file_store(self.address.split()[1], timeout)
        return open_store(self._listener, num_members, timeout)


def join_store(
    address: str, meeting: Meeting | None, num_members: int, timeout: timedelta
) -> Store:
    """Return the store at `address`, which `meeting` opens if it is this process's.

    From now on this process reads objects only from processes that know the secret.
    """
    host, place, secret = address.split()
    sign_objects(secret)
    if meeting is not None:
        return meeting.open_store(num_members, timeout)
    if place.startswith("/"):
        return _file_store(place, timeout)
    return connect_store(host, int(place), num_members, timeout)


def open_store(listener: socket.socket, world_size: int, timeout: timedelta) -> TCPStore:
    """Open a store that takes over `listener`."""
    host, port = listener.getsockname()
    return TCPStore(
        host,
        port,
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def connect_store(host: str, port: int, world_size: int, timeout: timedelta) -> TCPStore:
    """Connect to the store at `host:port`, which another process opens."""
    return TCPStore(
        host, port, world_size, is_master=False, timeout=timeout, wait_for_workers=False
    )


class SignedStore(Store):
    """Store that returns only values which were written with its secret, and under the same key.

    Others can still remove keys and change counters, which ends the group.
    """

    def __init__(self, inner: TCPStore, secret: str) -> None:
        super().__init__()
        self.inner: Any = inner  # torch's stubs know no bytes
        self._secret = secret

    def set(self, key: str, value: Any) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.inner.set(key, _mac(self._secret, key, data) + data)

    def get(self, key: str) -> bytes:
        """Return a value. Raises RuntimeError for one of another process."""
        signed = self.inner.get(key)
        data = signed[_MAC_BYTES:]
        if not hmac.compare_digest(signed[:_MAC_BYTES], _mac(self._secret, key, data)):
            raise RuntimeError(
                f"the value {key!r} in the store of the group is of a process that is no member"
            )
        return data

    def has(self, key: str) -> bool:
        """Return True if a member has set the key. Raises RuntimeError if another process has."""
        return self.check([key]) and self.get(key) is not None

    def add(self, key: str, value: int) -> int:
        return self.inner.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return self.inner.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self.inner.wait(keys, timeout or self.inner.timeout)

    def delete_key(self, key: str) -> bool:
        return self.inner.delete_key(key)

    def set_timeout(self, timeout: timedelta) -> None:
        self.inner.set_timeout(timeout)


def sign_objects(secret: str) -> None:
    """Sign the objects that collectives of torch send, and read no others, in this process."""

    class Pickler:
        def __init__(self, file: IO[bytes]) -> None:
            self._file = file

        def dump(self, value: Any) -> None:
            data = pickle.dumps(value)
            self._file.write(_mac(secret, "object", data) + data)

    class Unpickler:
        def __init__(self, file: IO[bytes]) -> None:
            self._signed = file.read()

        def load(self) -> Any:
            data = self._signed[_MAC_BYTES:]
            if not hmac.compare_digest(self._signed[:_MAC_BYTES], _mac(secret, "object", data)):
                raise RuntimeError(
                    "an object that the process group received is of a process that is no member"
                )
            return pickle.loads(data)

    distributed_c10d._pickler, distributed_c10d._unpickler = Pickler, Unpickler


def _mac(secret: str, key: str, data: bytes) -> bytes:
    """Return the keyed hash of a value and its key."""
    name = hashlib.blake2b(key.encode(), digest_size=_MAC_BYTES).digest()
    keyed = hashlib.blake2b(name, key=bytes.fromhex(secret), digest_size=_MAC_BYTES)
    keyed.update(data)
    return keyed.digest()


def _new_file() -> tuple[int, str] | None:
    """Return an open file without a name, and its path for processes of the same user."""
    try:
        file = os.memfd_create("rlctl-store")
        os.fchmod(file, 0o600)
        path = f"/proc/{os.getpid()}/fd/{file}"
        os.close(os.open(path, os.O_RDWR))
    except (AttributeError, OSError):  # there is none, or no /proc
        return None
    return file, path


def _file_store(path: str, timeout: timedelta) -> FileStore:
    store = FileStore(path, -1)  # -1: it does not remove the file
    store.set_timeout(timeout)
    return store
