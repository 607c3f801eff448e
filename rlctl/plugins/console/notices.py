"""Process that watches one attempt of a run and sends notices: `python -m` this module.

It ends when it has sent the notice of the attempt's end, at most `END_S` later. Each receiver gets
a notice again after an error, `TRIES` times in total. What it sent is in `notices.log` of the
attempt.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rlctl.errors import RlctlError
from rlctl.redaction import redact
from rlctl.runs.events import EVENTS_FILE
from rlctl.runs.record import RunRecord, now
from rlctl.runs.run import read_run
from rlctl.runs.run_dir import RECORD_FILE
from rlctl.text import duration
from rlctl.tracking.run_summary import percent_or_number

POLL_S = 1.0
TRIES = 4
PAUSES_S = (1.0, 5.0, 20.0)
COMMAND_S = 30.0  # limit of a command
END_S = 150  # limit of everything after the end of the attempt
MOST_ALARMS = 20  # of one attempt

_ENDS = ("finished", "failed", "stopped")
_TYPES = {"finished": "success", "failed": "failure", "lost": "failure"}
_CTRL_C = 130
_VARIABLE = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Notice:
    """Notice of an `event`, with its `title` and text."""

    event: str
    run: str
    title: str
    body: str


@dataclass(frozen=True)
class Watch:
    """Watch of the attempt of a run in `folder`, whose events start at byte `begin`."""

    folder: Path
    attempt: int
    begin: int
    targets: Sequence[str]
    events: Collection[str]

    def run(self) -> None:
        """Send the notices of the attempt until it has ended."""
        alarms: set[str] = set()
        for event in self._events():
            kind = event["kind"]
            if kind == "alarm" and event.get("name") not in alarms and len(alarms) < MOST_ALARMS:
                alarms.add(event["name"])
                self._send(kind, f"step {event['step']}: {event['message']}\n{event['hint']}")
            elif kind in (*_ENDS, "lost"):
                signal.alarm(END_S)
                if (name := _name_of_end(event)) is not None:
                    self._send(name, _reason(event))

    def _events(self) -> Iterator[dict[str, Any]]:
        """Yield the events as they come, at last the end of the attempt or `lost`."""
        position = self.begin
        path = self.folder / EVENTS_FILE
        while True:
            alive = self._is_alive()  # before the events: the last ones are read below
            with suppress(OSError), path.open("rb") as file:
                file.seek(position)
                lines = file.read().split(b"\n")
                position += sum(len(line) + 1 for line in lines[:-1])
                for line in lines[:-1]:
                    with suppress(ValueError):
                        event = json.loads(line)
                        yield event
                        if event["kind"] in _ENDS:
                            return
            if not alive:
                yield {"kind": "lost"}
                return
            time.sleep(POLL_S)

    def _is_alive(self) -> bool:
        """Return True while the process of the attempt runs, and the folder is there."""
        try:
            record = RunRecord.read(self.folder / RECORD_FILE)
        except RlctlError:
            return self.folder.exists()  # its disk may be away
        return record.attempts == self.attempt and record.process.alive(self.folder) is not False

    def _send(self, event: str, text: str) -> None:
        if event not in self.events:
            return
        words = {"alarm": "has an alarm", "lost": "was killed", "preempted": "was stopped"}
        name = self.folder.name
        title = f"{name} {words.get(event, event)}"
        body = redact("\n".join(filter(None, [text, *_facts(self.folder), f"rlctl show {name}"])))
        for target in self.targets:
            deliver(Notice(event, name, title, body), target)


def _name_of_end(event: dict[str, Any]) -> str | None:
    """Return the notice of the end of an attempt; None after Ctrl-C, which needs no notice."""
    if event["kind"] != "stopped":
        return event["kind"]
    if event.get("exit_code") == _CTRL_C:
        return None
    return "preempted"


def _reason(event: dict[str, Any]) -> str:
    if event["kind"] == "lost":
        return "its process ended without a word, as after `kill -9` or out of memory"
    if event["kind"] != "stopped":
        return ""
    code = int(event.get("exit_code") or 0)
    if code > 128:
        return f"by signal {code - 128}"
    return "its time is up"


def _facts(folder: Path) -> Iterator[str]:
    """Yield lines about the run: its error, steps and validation, and where it is."""
    with suppress(RlctlError, OSError):
        run = read_run(folder)
        if run.record is not None and run.record.failure is not None:
            yield "{message}".format_map(run.record.failure)
            yield run.record.failure["hint"] or ""
        figures = run.metrics.figures
        if figures is not None and figures.step is not None:
            line = f"step {figures.step}"
            if run.record is not None:
                line += f" of {run.record.total_steps}"
            if run.seconds is not None:
                line += f", {duration(run.seconds)}"
            yield line
            if figures.metric is not None:
                first, last, best = (
                    percent_or_number(figures.metric, value)
                    for value in (figures.first, figures.last, figures.best)
                )
                yield f"{figures.metric}: {first} → {last}, best {best}"
    yield f"{folder} on {socket.gethostname()}"


def is_variable(target: str) -> bool:
    """Return True for the name of an environment variable; other receivers are commands."""
    return _VARIABLE.fullmatch(target) is not None


def deliver(notice: Notice, target: str) -> bool:
    """Send a notice to a receiver, again after an error; print the result. Raises nothing."""
    for number in range(1, TRIES + 1):
        error = error_of(notice, target)
        shown = "sent" if error is None else f"not sent: {error}"
        print(f"{now()} {notice.event} {target} try {number}: {redact(shown)}", flush=True)
        if error is None:
            return True
        if number < TRIES:
            time.sleep(PAUSES_S[number - 1])
    return False


def error_of(notice: Notice, target: str) -> str | None:
    """Send a notice once; return the error."""
    try:
        if is_variable(target):
            return _by_address(notice, target)
        return _by_command(notice, target)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _by_address(notice: Notice, variable: str) -> str | None:
    from apprise import Apprise, LogCapture

    receiver = Apprise()
    receiver.add(os.environ.get(variable, ""))
    with LogCapture(level=logging.WARNING, fmt="%(message)s") as messages:
        kind = _TYPES.get(notice.event, "warning")
        if receiver.notify(notice.body, notice.title, notify_type=kind):
            return None
        text = " ".join(cast(io.StringIO, messages).getvalue().split())
    return text.replace(os.environ.get(variable) or "\0", variable)[:300] or "no answer"


def _by_command(notice: Notice, command: str) -> str | None:
    variables = {
        "RLCTL_EVENT": notice.event,
        "RLCTL_RUN": notice.run,
        "RLCTL_TITLE": notice.title,
        "RLCTL_BODY": notice.body,
    }
    process = subprocess.Popen(
        command,
        shell=True,
        stdin=subprocess.DEVNULL,
        env=os.environ | variables,
        start_new_session=True,
    )
    try:
        code = process.wait(COMMAND_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"it took longer than {COMMAND_S:g} s"
    return f"exit code {code}" if code else None


def main() -> None:
    """Watch the run that stdin describes."""
    order = json.load(sys.stdin)
    Watch(**{**order, "folder": Path(order["folder"])}).run()


if __name__ == "__main__":
    main()
