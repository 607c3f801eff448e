"""Stop requests to the driver of a run or sweep, and restarts of a crashed one (`--retries`)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rlctl.errors import PERMANENT_FAILURES, REQUESTED_STOPS, RlctlError, UsageError
from rlctl.files import open_record
from rlctl.process import DriverProcess, start_rlctl
from rlctl.runs.events import read_events
from rlctl.runs.logs import POLL_S, reread
from rlctl.runs.run import ACTIVE, Run
from rlctl.runs.run_dir import RECORD_FILE, STOP_FILE, RunDir

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
    request = run.path / STOP_FILE
    process = run.readable_record().process
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
        hint = "run this command there"
        if target.request:
            hint += ", or leave out --now"
        raise UsageError(
            f"{target.name} is driven by process {target.process.pid} on {target.process.host}",
            hint=hint,
        )
    with open_record(target.request, "ab"):
        pass


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


_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def supervise(
    words: Sequence[str],
    again: Sequence[str],
    options: Callable[[], Sequence[str]],
    folder: Path,
    retries: int,
    say: Callable[[str], object],
) -> int:
    """Run `rlctl WORDS`; after each crash, at most `retries` times, run `rlctl AGAIN`.

    WORDS run again while no attempt has begun: until then the run does not have their overrides.
    `options()` are added to each, such as the time that is left. `folder` is the run's. Ctrl-C,
    SIGTERM and errors that would recur, such as a wrong config, are not crashes. After an
    out-of-memory error the run resumes with the smaller token budget that it proposed, or ends if
    none would fit. Returns the last exit code.
    """
    before = _num_attempts(folder)
    code = _run([*words, *options()])
    for number in range(1, retries + 1):
        if (
            code in (0, *REQUESTED_STOPS, *PERMANENT_FAILURES)
            or not (folder / RECORD_FILE).exists()
        ):
            break
        smaller: list[str] | None = []
        if _num_attempts(folder) > before:
            words = again
            smaller = _proposed(folder)
        if smaller is None:
            break
        RunDir(folder).event("retry", number=number, exit_code=code)
        message = f"{folder.name} failed with exit code {code}; retry {number} of {retries}"
        if smaller:
            message += f" with {' '.join(smaller)}"
        say(message)
        code = _run([*words, *options(), *smaller])
    return code


def _num_attempts(folder: Path) -> int:
    if not (folder / RECORD_FILE).exists():
        return 0
    return RunDir(folder).record.attempts


def _run(words: Sequence[str]) -> int:
    """Run `rlctl WORDS` and forward signals; return the exit code, 128 + N for signal N."""
    process = start_rlctl(words)  # only this process forwards Ctrl-C

    def forward(number: int, _frame: FrameType | None) -> None:
        process.send_signal(number)

    before = {
        number: signal.signal(number, forward)
        for number in _FORWARDED
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if code < 0:
        return 128 - code
    return code


def _proposed(folder: Path) -> list[str] | None:
    """Return the overrides that the last attempt proposed; None if it found none that fits."""
    found: list[str] | None = []
    for event in read_events(folder):
        if event["kind"] == "attempt":
            found = []
        elif event["kind"] == "out_of_memory":
            found = None
            if event["proposed"] is not None:
                found = [f"{event['key']}={event['proposed']}"]
    return found
