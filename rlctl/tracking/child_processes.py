"""Processes that an SDK starts: without the console's files, and their end before a forced exit."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psutil


@contextmanager
def silent_children() -> Iterator[None]:
    """Give processes that start in the block none of this process's standard files.

    A pipe such as `rlctl … | tee log` ends when the last process that has it ends.
    """
    start = subprocess.Popen.__init__

    def start_silently(self: Any, *arguments: Any, **options: Any) -> None:
        for name in ("stdin", "stdout", "stderr"):
            if options.get(name) is None and len(arguments) < 4:
                options[name] = subprocess.DEVNULL
        start(self, *arguments, **options)

    setattr(subprocess.Popen, "__init__", start_silently)  # noqa: B010
    try:
        yield
    finally:
        setattr(subprocess.Popen, "__init__", start)  # noqa: B010


def end_children(*names: str) -> None:
    """Kill the children of this process whose program has one of these names, and their children.

    The children of a process are found before it is killed: then they would be those of init.
    """
    import psutil

    found: list[psutil.Process] = []
    pending = [psutil.Process()]
    while pending:
        with suppress(psutil.Error):
            named = [each for each in pending.pop().children() if _program(each) in names]
            found += named
            pending += named
    for process in found:
        with suppress(psutil.Error):
            process.kill()


def _program(process: psutil.Process) -> str:
    """Return the name of a process's program; nothing of one that has ended."""
    import psutil

    with suppress(psutil.Error):
        return os.path.basename(next(iter(process.cmdline()), ""))
    return ""
