"""Queues in a folder of a test, with stand-ins of `rlctl` and of nvidia-smi."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlctl.plugins.console.queue.queue_file import Entry, Order, Queue
from rlctl.plugins.console.queue.worker import LOCK, Worker
from rlctl.process import lock_folder

# Python of entries: itself for modules of the queue; instead of rlctl it notes its words in `ran`,
# waits while `hold` exists, and exits with the code in the last word.
PYTHON = f"""#!/bin/sh
case "$3" in *queue.worker) exec {sys.executable} "$@";; esac
shift 3
echo "$* on $CUDA_VISIBLE_DEVICES" >>{{here}}/ran
echo "secret ${{{{MY_API_KEY:-none}}}}"
while [ -e {{here}}/hold ]; do sleep 0.05; done
for word; do :; done
code=0
case "$word" in exit*) code="${{{{word#exit}}}}";; esac
[ -e {{here}}/code ] && read -r code <{{here}}/code
[ "$code" = 0 ] || echo "error: it is broken" >&2
exit "$code"
"""
SMI = """#!/bin/sh
case "$1" in
*query-gpu*) printf '0, GPU-a\\n1, GPU-b\\n' ;;
*) cat {here}/apps ;;
esac
"""


class Stand:
    """Queue of the test in `here`, and its stand-ins."""

    def __init__(self, here: Path, patch: pytest.MonkeyPatch) -> None:
        self.here = here
        for name, body in (("python", PYTHON), ("nvidia-smi", SMI)):
            path = here / "bin" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(body.format(here=here))
            path.chmod(0o755)
        (here / "apps").touch()
        patch.setenv("PATH", f"{here}/bin:{os.environ['PATH']}")
        patch.setenv("RLCTL_QUEUE", str(here / "queue"))
        self.queue = Queue()

    def add(self, *words: str, priority: int = 0, **fields: Any) -> int:
        """Add an entry of one GPU."""
        folder = self.here / "runs" / "p" / words[0]
        order = Order(
            words[0],
            words,
            ["resume", words[0]],
            str(folder),
            str(self.here),
            str(self.here / "bin" / "python"),
            {"PATH": os.environ["PATH"]},
            "GPU",
            1,
        )
        return self.queue.add(replace(order, **fields), priority).id

    def worker(self) -> Worker:
        """Return the process of the queue, which is here that of the test."""
        lock = lock_folder(self.queue.folder, LOCK)
        assert lock is not None
        return Worker(self.queue, lock)

    def run(self, worker: Worker, until: Callable[[], bool]) -> None:
        """Let the worker do steps."""
        deadline = time.monotonic() + 120
        while not until():
            assert time.monotonic() < deadline, self.states()
            worker.step()
            time.sleep(0.02)

    def entry(self, number: int) -> Entry:
        """Return an entry."""
        return next(entry for entry in self.queue.entries() if entry.id == number)

    def states(self) -> list[str]:
        """Return the states of all entries, by number."""
        return [entry.state for entry in sorted(self.queue.entries(), key=lambda entry: entry.id)]

    def ran(self) -> Sequence[str]:
        """Return the words of the commands that ran, with their GPUs."""
        file = self.here / "ran"
        return file.read_text().splitlines() if file.exists() else []

    def hold(self, on: bool = True) -> None:
        """Let commands wait, or end."""
        if on:
            (self.here / "hold").touch()
        else:
            (self.here / "hold").unlink()


def wait(until: Callable[[], bool], seconds: float = 120) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.05)
