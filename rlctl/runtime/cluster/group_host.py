"""Driver's end of the process group in which engines get weights."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import ray
from ray.exceptions import RayError

from rlctl.runtime.cluster.pool_engine import Engine
from rlctl.runtime.rollout.rendezvous import listen
from rlctl.runtime.rollout.signed_store import SignedStore, new_secret, open_store
from rlctl.runtime.rollout.weight_group import (
    BROKEN,
    CHECK_S,
    CONNECT_S,
    ONLY_CHANGES,
    GroupAddress,
)


class GroupHost:
    """Store of a group, which lasts while the same engines are members."""

    def __init__(self, *, only_changes: bool) -> None:
        self.only_changes = only_changes
        self._store: SignedStore | None = None
        self._address = GroupAddress("", 0, 0, "")
        self._members: list[Any] = []

    def address_for(self, engines: Sequence[Engine]) -> GroupAddress:
        """Return the address of the group of `engines`, the last one if possible."""
        members = [engine.handle._actor_id for engine in engines]  # another one after a restart
        if self._store is None or members != self._members:
            self.dissolve()
            host = ray.util.get_node_ip_address()
            size = sum(engine.num_receivers for engine in engines)
            listener = listen(host, size + 1)
            secret = new_secret()
            limit = timedelta(seconds=CONNECT_S)
            store = open_store(listener, size + 1, limit)
            self._store = SignedStore(store, secret)
            if self.only_changes:
                self._store.set(ONLY_CHANGES, "")
            self._address = GroupAddress(host, store.port, size, secret)
            self._members = members
        return self._address

    def dissolve(self) -> None:
        """Let all members leave the group."""
        if self._store is not None:
            self._store.set(BROKEN, "")
            self._members = []

    @contextmanager
    def watch(self, calls: Sequence[ray.ObjectRef]) -> Iterator[None]:
        """Dissolve the group when one of the engines' `calls` fails or returns False."""
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(CHECK_S):
                for call in ray.wait([*calls], num_returns=len(calls), timeout=0)[0]:
                    try:
                        lost = not ray.get(call)
                    except RayError:  # the caller reports it
                        lost = True
                    if lost:
                        self.dissolve()
                        return

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
