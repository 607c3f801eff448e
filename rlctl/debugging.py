"""Breakpoints: what to do when one is reached, and how other processes learn of it.

Time limits of a run would end it while someone looks at a process. A process that reaches
`breakpoint()` writes a file beside its log; the controller waits for as long as there is one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

DEBUG_S = 7 * 24 * 3600.0  # time limit of calls while debugging
_SUFFIX = ".breakpoint"
_EVENTS = ("builtins.breakpoint", "pdb.Pdb")  # `breakpoint()`, and a debugger started directly
_callbacks: list[Callable[[], object]] = []
_listening: list[bool] = []  # an audit hook cannot be removed, so there is one for the process


def post_mortem() -> bool:
    """Return True if RAY_DEBUG_POST_MORTEM=1 asks to stop in workers that raise an exception."""
    return os.environ.get("RAY_DEBUG_POST_MORTEM", "0") == "1"


def call_limit(seconds: float) -> float:
    """Return the time limit of calls: `seconds`, or a week while debugging."""
    return max(seconds, DEBUG_S) if post_mortem() else seconds


def debug_variables() -> dict[str, str]:
    """Return the variables that workers on other nodes need for Ray's debugger."""
    return {name: value for name, value in os.environ.items() if name.startswith("RAY_DEBUG")}


def call_on_breakpoint(callback: Callable[[], object]) -> None:
    """Call `callback` whenever this process reaches a breakpoint, before it stops.

    An audit event announces it: a replaced `sys.breakpointhook` would add a frame to the debugger.
    """
    if not _listening:
        _listening.append(True)
        sys.addaudithook(_on_event)
    _callbacks.append(callback)


@contextmanager
def on_breakpoint(callback: Callable[[], object]) -> Iterator[None]:
    """Call `callback` at breakpoints within the block."""
    call_on_breakpoint(callback)
    try:
        yield
    finally:
        _callbacks.remove(callback)


def mark_breakpoints(log: Path) -> None:
    """Write a file beside `log` when this process reaches a breakpoint."""
    file = log.with_suffix(_SUFFIX)

    def mark() -> None:
        with suppress(OSError):
            file.touch()

    call_on_breakpoint(mark)


def reached_breakpoint(folder: Path | None) -> bool:
    """Return True if a process whose log is in `folder` has reached a breakpoint."""
    return folder is not None and any(folder.glob(f"*{_SUFFIX}"))


def _on_event(event: str, _arguments: tuple[object, ...]) -> None:
    if event in _EVENTS:
        for callback in tuple(_callbacks):
            callback()
