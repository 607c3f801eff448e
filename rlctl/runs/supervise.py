"""Restart of a crashed run from its latest checkpoint (`--retries`)."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from rlctl.errors import PERMANENT_FAILURES, REQUESTED_STOPS
from rlctl.runs.events import read_events
from rlctl.runs.process import start_rlctl
from rlctl.runs.run_dir import RECORD_FILE, RunDir

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
        has_begun = _num_attempts(folder) > before
        if (smaller := _proposed(folder) if has_begun else []) is None:
            break
        RunDir(folder).event("retry", number=number, exit_code=code)
        changes = f" with {' '.join(smaller)}" if smaller else ""
        say(f"{folder.name} failed with exit code {code}; retry {number} of {retries}{changes}")
        code = _run([*(again if has_begun else words), *options(), *smaller])
    return code


def _num_attempts(folder: Path) -> int:
    return RunDir(folder).record.attempts if (folder / RECORD_FILE).exists() else 0


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
    return code if code >= 0 else 128 - code


def _proposed(folder: Path) -> list[str] | None:
    """Return the overrides that the last attempt proposed; None if it found none that fits."""
    found: list[str] | None = []
    for event in read_events(folder):
        if event["kind"] == "attempt":
            found = []
        elif event["kind"] == "out_of_memory":
            found = (
                [f"{event['key']}={event['proposed']}"] if event["proposed"] is not None else None
            )
    return found
