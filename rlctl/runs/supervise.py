"""A run that is started again when it crashes, from its last checkpoint."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from rlctl.errors import ASKED, HOPELESS
from rlctl.runs.events import read_events
from rlctl.runs.process import die_with_parent
from rlctl.runs.run_dir import RECORD_FILE, RunDir

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def supervise(
    words: Sequence[str],
    again: Sequence[str],
    folder: Path,
    retries: int,
    say: Callable[[str], object],
) -> int:
    """Run `rlctl WORDS`, whose run is in `folder`; as often as it crashes, and `retries` times at most, `rlctl AGAIN`. The last exit code.

    A crash is what neither was asked for nor would happen again for sure: not Ctrl-C or SIGTERM, not a wrong configuration. After running
    out of memory the run goes on with the smaller token budget that it proposed, and ends where none would do.
    """
    code = _run(words)
    for number in range(1, retries + 1):
        if code in (0, *ASKED, *HOPELESS) or not (folder / RECORD_FILE).exists():
            break
        if (smaller := _proposed(folder)) is None:
            break
        RunDir(folder).event("retry", number=number, exit_code=code)
        told = f", with {' '.join(smaller)}" if smaller else ""
        say(
            f"{folder.name} ended with exit code {code}; it is started again ({number} of {retries}){told}"
        )
        code = _run([*again, *smaller])
    return code


def _run(words: Sequence[str]) -> int:
    """`rlctl WORDS` to its end; signals to this process are passed on. The exit code, 128 + N for signal N."""
    command = [sys.executable, "-m", "rlctl", *words]
    process = subprocess.Popen(
        command, preexec_fn=die_with_parent, process_group=0
    )  # Ctrl-C comes from here alone, once

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
    """What the last attempt said it would need, as overrides; None where it said that nothing would do."""
    found: list[str] | None = []
    for event in read_events(folder):
        if event["kind"] == "attempt":
            found = []
        elif event["kind"] == "out_of_memory":
            found = (
                [f"{event['key']}={event['proposed']}"] if event["proposed"] is not None else None
            )
    return found
