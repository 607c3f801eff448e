"""Stop requests to the driver of a run or sweep."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rlctl.errors import RlctlError, UsageError
from rlctl.runs.follow import POLL_S, reread
from rlctl.runs.process import DriverProcess
from rlctl.runs.run import ACTIVE, Run
from rlctl.runs.run_dir import STOP_FILE

_AGAIN_S = 1.5  # signals within one second count as one


@dataclass(frozen=True)
class StopTarget:
    """Run or sweep with its driver.

    `folder` is the folder that it drives. `state` reads the present state; `request` is the file
    for which the driver checks after each step, None if it does not.
    """

    name: str
    folder: Path
    process: DriverProcess
    state: Callable[[], str]
    request: Path | None


def run_target(run: Run) -> StopTarget:
    """Return the target for a run; raise ConfigError without a readable record."""
    request, process = run.path / STOP_FILE, run.readable_record().process
    return StopTarget(run.name, run.path, process, lambda: reread(run).state, request)


def request_stop(target: StopTarget, now: bool) -> None:
    """Ask the driver to finish its step, save and exit, or with `now` to exit at once.

    No-op for an inactive run. A local driver gets a signal, one on another host or in another
    container the file `request` on the shared disk. Raises UsageError where neither is possible.
    """
    if target.state() not in ACTIVE:
        return
    alive = target.process.alive(target.folder)
    if alive is False:  # it has exited since its state was read
        return
    if alive and target.process.is_visible:
        with suppress(ProcessLookupError):  # it has just exited
            os.kill(target.process.pid, signal.SIGTERM)
            if now:
                time.sleep(_AGAIN_S)
                os.kill(target.process.pid, signal.SIGTERM)
        return
    if target.request is None or now:
        hint = "run this command there" + (", or leave out --now" if target.request else "")
        raise UsageError(
            f"{target.name} is driven by process {target.process.pid} on {target.process.host}",
            hint=hint,
        )
    target.request.touch()


def wait(target: StopTarget, timeout_s: float) -> str:
    """Wait until the driver has exited; return the state. Raises RlctlError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while (state := target.state()) in ACTIVE or target.process.alive(target.folder):
        if time.monotonic() > deadline:
            place = f"process {target.process.pid} on {target.process.host}"
            raise RlctlError(
                f"{target.name} is still {state} {timeout_s:g} s after the request to stop",
                where=place,
                hint="--now interrupts the step, --timeout S waits longer",
            )
        time.sleep(POLL_S)
    return state
