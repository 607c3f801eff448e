"""Processes and memory of a program, seen from outside (Linux)."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

_COUNTED = re.compile(r"^(?:Pss_Anon|Pss_Shmem|SwapPss): +(\d+) kB", re.MULTILINE)
_COUNTED_OPEN = re.compile(r"^(?:RssAnon|RssShmem|VmSwap):\s+(\d+) kB", re.MULTILINE)


def usage(pid: int, most: int) -> tuple[int, int]:
    """Return the number of processes that `pid` and its descendants are, and their memory in bytes.

    It stops counting above `most` processes. Shared memory counts once. Zero where /proc does not
    list children or memory.
    """
    number = 0
    size = 0
    waiting = [pid]
    while waiting and number <= most:
        process = Path(f"/proc/{waiting.pop()}")
        with suppress(OSError):
            waiting += children(process)
            number += 1
            size += _memory(process)
    return number, size


def children(process: Path) -> list[int]:
    """Return the numbers of the children of a process, given its folder in /proc."""
    found: list[int] = []
    for file in process.glob("task/*/children"):
        with suppress(OSError):  # the thread has ended
            found += [int(child) for child in file.read_text(encoding="utf-8").split()]
    return found


def _memory(process: Path) -> int:
    try:
        counted = _COUNTED.findall((process / "smaps_rollup").read_text(encoding="utf-8"))
    except PermissionError:  # it has made itself unreadable: shared memory counts for each process
        counted = _COUNTED_OPEN.findall((process / "status").read_text(encoding="utf-8"))
    return 1024 * sum(map(int, counted))
