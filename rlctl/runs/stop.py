"""Asking whoever drives a run or a sweep to save and end, and waiting until that is so."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rlctl.errors import RlctlError, UsageError
from rlctl.runs.follow import POLL_S
from rlctl.runs.process import DriverProcess
from rlctl.runs.store import ACTIVE

_AGAIN_S = 1.5  # two signals within a second are one wish


@dataclass(frozen=True)
class Driven:
    """What a process drives. `state` reads how it stands now; `request` is a file that its driver looks for after each step, if it does."""

    name: str
    process: DriverProcess
    state: Callable[[], str]
    request: Path | None


def ask(driven: Driven, now: bool) -> None:
    """Ask the driver to finish its step, save and end, or with `now` to end at once. Nothing is done to what does not run.

    A driver on this machine gets a signal. Another host is asked through the file `request`, on the disk that both see. Raises UsageError
    where neither is possible.
    """
    if driven.state() not in ACTIVE:
        return
    if driven.process.alive():
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(driven.process.pid, signal.SIGTERM)
            if now:
                time.sleep(_AGAIN_S)
                os.kill(driven.process.pid, signal.SIGTERM)
        return
    if driven.request is None or now:
        hint = "run this command there" + (", or leave out --now" if driven.request else "")
        raise UsageError(
            f"{driven.name} is driven by process {driven.process.pid} on {driven.process.host}",
            hint=hint,
        )
    driven.request.touch()


def wait(driven: Driven, timeout_s: float) -> str:
    """How it has ended. Raises RlctlError when it has not within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while (state := driven.state()) in ACTIVE or driven.process.alive():
        if time.monotonic() > deadline:
            place = f"process {driven.process.pid} on {driven.process.host}"
            raise RlctlError(
                f"{driven.name} is {state} still, {timeout_s:g} s after it was asked",
                where=place,
                hint="--now",
            )
        time.sleep(POLL_S)
    return state
