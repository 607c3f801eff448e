"""Watch over Ray's processes: without them calls wait, or Ray aborts this process."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress

import psutil

from rlctl.errors import RlctlError
from rlctl.process import kill_and_exit

_CHECK_S = 1.0
_SCAN_S = 5.0  # between searches for new processes of Ray, which cost more
_CONNECT_S = 5.0
_UNREACHABLE_S = 20.0  # a network may be gone for a moment
_GRACE_S = 10.0  # for the main thread to end the run with an exception
DAEMONS = {"raylet": "raylet", "gcs_server": "GCS"}

OnLost = Callable[[RlctlError], object]


class RayHealth:
    """Thread that ends this process when Ray's GCS or raylet has exited.

    Of a cluster that this process started it watches the processes themselves, of another one the
    port of its GCS. The main thread may wait in a call that nothing can interrupt: it gets
    `_GRACE_S` to fail by itself, and `error` is then the reason; otherwise the thread calls
    `on_lost` with it, kills all children and exits with code 1.

    `others` are children of this process that do not belong to Ray.
    """

    def __init__(self, others: set[psutil.Process], on_lost: OnLost) -> None:
        self._others = others
        self._on_lost = on_lost
        self._daemons: dict[psutil.Process, str] = {}
        self._gcs: str | None = None
        self._reached_at = time.monotonic()
        self._over = threading.Event()
        self.processes: set[psutil.Process] = set()  # all that Ray has started here
        self.lost: str | None = None

    def start(self, gcs: str | None) -> None:
        """Start the thread; `gcs` is the address of a GCS that this process did not start."""
        self._gcs = gcs
        self._scan()
        for process in self.processes:
            with suppress(psutil.Error):
                if process.name() in DAEMONS:
                    self._daemons[process] = DAEMONS[process.name()]
        threading.Thread(target=self._watch, name="ray-health", daemon=True).start()

    def stop(self) -> None:
        """End the thread."""
        self._over.set()

    def error(self) -> RlctlError | None:
        """Return the error if Ray is lost, None if it is not."""
        self._check()
        if self.lost is None:
            return None
        return RlctlError(self.lost, hint=_HINT)

    def _watch(self) -> None:
        scanned = time.monotonic()
        while not self._over.wait(_CHECK_S):
            self._check()
            if self.lost is not None:
                if not self._over.wait(_GRACE_S):
                    self._exit()
                return
            if time.monotonic() - scanned > _SCAN_S:
                self._scan()
                scanned = time.monotonic()

    def _scan(self) -> None:
        self.processes |= set(psutil.Process().children(recursive=True)) - self._others

    def _check(self) -> None:
        for process, name in self._daemons.items():
            if not is_alive(process):
                self.lost = self.lost or f"Ray's {name} (process {process.pid}) has exited"
        if self._gcs is not None and not self._daemons:
            if _reachable(self._gcs):
                self._reached_at = time.monotonic()
            elif time.monotonic() - self._reached_at > _UNREACHABLE_S:
                self.lost = f"Ray's GCS at {self._gcs} does not accept connections"

    def _exit(self) -> None:
        self._scan()
        error = RlctlError(self.lost or "", hint=_HINT)
        with suppress(Exception):  # such as a full disk
            self._on_lost(error)
        # Printed, not logged: the main thread may hold a logging lock.
        print(f"error: {error}", file=sys.stderr, flush=True)
        kill_and_exit(self.processes)


_HINT = "`rlctl resume` continues the run from its latest checkpoint"


def is_alive(process: psutil.Process) -> bool:
    """Return True while `process` runs; a zombie has ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _reachable(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with closing(socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S)):
            return True
    except OSError:
        return False
