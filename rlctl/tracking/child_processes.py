"""Processes that an SDK starts: without the console's files, and their end before a forced exit."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


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

    Does nothing where there is no `/proc`.
    """
    pending = [os.getpid()]
    seen: set[int] = set()
    while pending:
        for pid in _children(pending.pop()) - seen:
            seen.add(pid)
            if _program(pid) in names:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
                pending.append(pid)


def _children(pid: int) -> set[int]:
    found: set[int] = set()
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found |= {int(word) for word in (thread / "children").read_text().split()}
    return found


def _program(pid: int) -> str:
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return os.path.basename(words[0].decode(errors="replace"))
    return ""
