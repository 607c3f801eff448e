"""Start of Ray within a deadline: daemons that end during it are noticed at once, and named."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from rlctl.errors import ResourceError
from rlctl.runs.logs import format_tails
from rlctl.runtime.cluster.health import DAEMONS, is_alive
from rlctl.runtime.cluster.start_deadline import LoadedDeadline, slowness

_POLL_S = 0.2
_LOGS = ("raylet.err", "raylet.out", "gcs_server.err", "gcs_server.out")
# Ray logs "[time, severity pid thread] (program) file:line: text"; C is a failed check, F is fatal.
_FATAL = re.compile(r"^\[[^\]]* [CF] \d+ \d+\] \(\w+\)")
_SIGNAL = re.compile(r"\*\*\* SIG\w+ received")
_ENOUGH_LINES = 100_000


class DaemonEndedError(ResourceError):
    """Ray's GCS or raylet ended while Ray was starting."""


class RayStart:
    """One start of Ray by this process; `others` are its children that do not belong to Ray.

    `given_up` is set when the start has failed, for waits inside of `ray.init`.
    """

    def __init__(self, others: set[psutil.Process]) -> None:
        self.given_up = threading.Event()
        self._others = others
        self._daemons: dict[psutil.Process, str] = {}
        self._over = threading.Event()
        self._returned = threading.Event()
        self._failure: BaseException | None = None

    def run(self, options: dict[str, Any], folder: Path | None, timeout_s: float) -> None:
        """Run `ray.init` in a thread, because it has no deadline and cannot always be interrupted.

        The thread runs until `close`: the kernel kills Ray's processes when the thread that started
        them exits. `folder` is that of a cluster on this machine. Raises DaemonEndedError if one
        of its daemons ends, ResourceError if Ray does not start within `timeout_s`,
        which last longer on a busy machine.
        """
        thread = threading.Thread(target=self._init, args=(options,), name="ray-init", daemon=True)
        thread.start()
        deadline = LoadedDeadline(timeout_s)
        while not self._returned.wait(_POLL_S):
            if folder is not None and (name := self._ended_daemon()) is not None:
                self.given_up.set()
                raise DaemonEndedError(
                    f"Ray's {name} ended while Ray was starting", where=reasons(folder), hint=_HINT
                )
            if deadline.is_over():
                self.given_up.set()
                busy = slowness()
                load = ""
                if busy >= 2:
                    load = f", and more on a busy machine (now {busy:.0f} to a core)"
                raise ResourceError(
                    f"Ray did not start within {timeout_s:g} s{load}",
                    where=folder and reasons(folder),
                    hint="trainer.timeouts.ray_start_s sets the deadline",
                )
        if self._failure is not None:
            raise ResourceError(
                f"Ray did not start: {self._failure}",
                where=folder and reasons(folder),
                hint=_HINT if folder is not None else _REMOTE_HINT,
            ) from self._failure

    def has_returned(self, timeout_s: float) -> bool:
        """Wait for `ray.init` to return or raise; return False if it has not in `timeout_s`."""
        return self._returned.wait(timeout_s)

    def close(self) -> None:
        """Let the thread exit."""
        self._over.set()

    def _init(self, options: dict[str, Any]) -> None:
        import ray

        try:
            ray.init(**options)
        except BaseException as error:  # raised again by the waiting thread
            self._failure = error
        self._returned.set()
        self._over.wait()

    def _ended_daemon(self) -> str | None:
        """Return the name of a daemon that was seen and has ended."""
        for process in set(psutil.Process().children()) - self._others - set(self._daemons):
            name = _daemon_name(process)
            if name is not None:
                self._daemons[process] = name
        return next((name for one, name in self._daemons.items() if not is_alive(one)), None)


_HINT = "train without Ray: --inline"
_REMOTE_HINT = (
    "is the address right, and is RAY_AUTH_MODE=token set here if the cluster requires a token? "
    "`rlctl train --inline` needs no cluster"
)


def reasons(folder: Path) -> str | None:
    """Return the first fatal line of each log of a session's daemons, otherwise their last lines.

    `folder` is Ray's temporary folder; None if it has no log.
    """
    logs = [log for name in _LOGS for log in folder.glob(f"session_2*/logs/{name}")]
    found = {log: line for log in logs if (line := _first_fatal_line(log)) is not None}
    if found:
        return "\n".join(f"{log}\n    {line}" for log, line in found.items())
    return format_tails(logs, 10) or None


def _first_fatal_line(log: Path) -> str | None:
    """Return the first failed check of a daemon, otherwise the signal that ended it."""
    signal: str | None = None
    for line in _lines(log):
        if _FATAL.match(line):
            return line
        if signal is None and _SIGNAL.search(line):
            signal = line
    return signal


def _lines(log: Path) -> Iterator[str]:
    with log.open(encoding="utf-8", errors="replace") as file:
        for _, line in zip(range(_ENOUGH_LINES), file, strict=False):
            yield line.rstrip("\n")


def _daemon_name(process: psutil.Process) -> str | None:
    try:
        return DAEMONS.get(process.name())
    except psutil.NoSuchProcess:
        return None
