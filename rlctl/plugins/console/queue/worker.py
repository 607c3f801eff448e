"""Process of the queue, which starts its entries, and the process of an entry.

There is at most one process of the queue, by a lock. It ends when no entry waits or runs. If it is
killed, runs continue, each in a new session, and the next process finds them again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

import psutil

from rlctl.errors import RlctlError
from rlctl.plugins.console.detached import start_detached
from rlctl.plugins.console.queue.ends import end_of
from rlctl.plugins.console.queue.free_devices import Choice, choose
from rlctl.plugins.console.queue.queue_file import Entry, Queue, secrets
from rlctl.process import DriverProcess, is_locked, lock_folder
from rlctl.runs.record import now

POLL_S = 2.0
LOCK = "worker.lock"
LOG = "worker.log"
_MODULE = "rlctl.plugins.console.queue.worker"
_AGAIN_S = 30.0  # before an entry whose process could not claim it is started again
_END_S = 10.0


class Worker:
    """Starter of entries; `children` are the processes that it started, with their devices."""

    def __init__(self, queue: Queue, lock: IO[bytes]) -> None:
        self.queue = queue
        self.lock = lock
        self.children: dict[int, tuple[subprocess.Popen[bytes], Sequence[str]]] = {}
        self.not_before: dict[int, float] = {}

    def run(self) -> None:
        """Start entries until none is left that waits or runs."""
        while True:
            try:
                if not self.step():
                    return
            except RlctlError as error:  # such as a full disk
                print(f"{now()} {error}", flush=True)
            time.sleep(POLL_S)

    def step(self) -> bool:
        """Note what has ended, and start what fits. If no entry is left, unlock, return False."""
        # Before the entries are read: one that has ended has claimed its entry by then.
        ended = [number for number, (child, _) in self.children.items() if child.poll() is not None]
        children = {child.pid: child for child, _ in self.children.values()}
        for entry in self.queue.entries("running"):
            child = entry.process and children.get(entry.process.pid)
            fields = end_of(entry, self.queue.log(entry), child)
            if fields is not None:
                self.queue.change(entry.id, ["running"], **fields)
        waiting = {entry.id for entry in self.queue.entries("waiting")}
        for number in ended:
            del self.children[number]
            if number in waiting:  # it could not claim its entry
                self.not_before[number] = time.monotonic() + _AGAIN_S
        for choice in self._choices():
            self._start(choice)
        with self.queue.transaction() as connection:  # an entry is added before or after this
            query = "SELECT state FROM entries UNION SELECT name FROM settings"
            found = {row[0] for row in connection.execute(query)}
            if self.children or "running" in found or {"waiting", "paused"} & found == {"waiting"}:
                return True
            self.lock.close()
            return False

    def _choices(self) -> list[Choice]:
        waiting = self.queue.entries("waiting")
        paused = self.queue.paused
        unclaimed = [
            replace(entry, used=self.children[entry.id][1])
            for entry in waiting
            if entry.id in self.children
        ]
        waiting = [
            entry
            for entry in waiting
            if entry.id not in self.children and (entry.order.now or not paused)
        ]
        return choose(waiting, [*self.queue.entries("running"), *unclaimed])

    def _start(self, choice: Choice) -> None:
        number = choice.entry.id
        devices = choice.devices
        if devices is None or time.monotonic() < self.not_before.get(number, 0.0):
            return
        try:
            self.children[number] = start(self.queue, choice.entry, devices), devices
        except OSError as error:  # its folder or its Python is gone
            reason = f"it could not be started: {error}"
            self.queue.change(number, ["waiting"], state="failed", ended=now(), reason=reason)


def start(queue: Queue, entry: Entry, devices: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start the process of an entry, which claims it and then becomes `rlctl`."""
    order = entry.order
    words = [str(queue.folder), str(entry.id), json.dumps(devices)]
    environment = {**secrets(os.environ), **order.environment}
    with queue.log(entry).open("ab") as log:
        command = [order.python, "-P", "-m", _MODULE, *words]
        return start_detached(command, log, order.cwd, environment)


def become(queue: Queue, number: int, devices: Sequence[str]) -> None:
    """Claim a waiting entry for this process, and replace the process by its command."""
    numbers = [device.split()[-1] for device in devices]
    if devices and devices[0].startswith("GPU"):
        os.environ |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(numbers)}
    elif hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, [int(core) for core in numbers])
    mine = {"process": DriverProcess.current(), "began": now(), "used": devices}
    entry = queue.change(number, ["waiting"], state="running", **mine)
    if entry is None:
        sys.exit(f"entry {number} was started by another process, or removed")
    order = entry.order
    has_run = any((Path(order.folder) / name).exists() for name in ("run.json", "sweep.json"))
    words = order.again if entry.restarts and has_run else order.words
    os.execv(order.python, [order.python, "-P", "-m", "rlctl", *words])


def ensure_worker(queue: Queue) -> None:
    """Start the process of the queue if none runs that has the secrets of this shell.

    It inherits them, because they are in no file. Raises RlctlError if an old one does not end.
    """
    variables = dict(os.environ)
    file = queue.folder / LOCK
    if is_locked(queue.folder, LOCK):
        with suppress(psutil.Error, ValueError):
            worker = psutil.Process(int(file.read_bytes()))
            theirs = secrets(worker.environ())
            if theirs.items() >= secrets(os.environ).items():
                return
            if _MODULE in worker.cmdline():  # else it has just ended
                variables = theirs | variables
                worker.kill()
                worker.wait(_END_S)
    with (queue.folder / LOG).open("ab") as log:
        command = [sys.executable, "-P", "-m", _MODULE, str(queue.folder)]
        start_detached(command, log, "/", variables)


def main(folder: str, *claim: str) -> None:
    """Be the process of the queue, or with number and devices that of an entry."""
    queue = Queue(Path(folder))
    if claim:
        become(queue, int(claim[0]), json.loads(claim[1]))
    lock = lock_folder(queue.folder, LOCK)
    if lock is not None:
        lock.truncate(0)
        lock.write(str(os.getpid()).encode())
        lock.flush()
        Worker(queue, lock).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
