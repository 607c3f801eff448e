"""Request to interrupt the processes of a pool: a key in the cluster's store.

A worker that computes takes no calls, so a thread of it looks for the key.
"""

from __future__ import annotations

import uuid
from contextlib import suppress
from typing import Any

from ray.experimental import internal_kv


class StopKey:
    """Key of one pool."""

    def __init__(self) -> None:
        self.name = f"rlctl-stop-{uuid.uuid4()}".encode()

    def is_set(self) -> bool:
        """Return True after `set`."""
        kv: Any = internal_kv
        try:
            return kv._internal_kv_get(self.name) is not None
        except Exception:  # the store cannot be reached just now; the errors differ by version
            return False

    def set(self) -> None:
        """Request the interruption."""
        kv: Any = internal_kv
        with suppress(Exception):  # the store is lost, and the run ends without it
            kv._internal_kv_put(self.name, b"1")

    def remove(self) -> None:
        """Remove the key from the store of a cluster that remains."""
        kv: Any = internal_kv
        with suppress(Exception):
            kv._internal_kv_del(self.name)
