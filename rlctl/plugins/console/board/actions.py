"""Changes of runs that the board offers: stop, resume, tag, note and export."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlctl.errors import ConflictError, NotFoundError, UsageError
from rlctl.plugins.console.detached import start_detached
from rlctl.plugins.console.label_changes import change_tags, set_note
from rlctl.redaction import redact
from rlctl.runs.ownership import Place, own_folder
from rlctl.runs.run import ACTIVE, Run
from rlctl.runs.stop import request_stop, run_target
from rlctl.runs.subfolders import own_subfolder
from rlctl.terminal import visible

FOLDER = "board"  # of a run: output of the commands that the board started
_TAIL = 20  # lines of a command's output
_MAX_NAME = 100


@dataclass
class Job:
    """Command that the board started; it continues after the board has ended."""

    number: int
    action: str
    run: str
    process: subprocess.Popen[bytes]
    log: Path

    def state(self) -> dict[str, Any]:
        """Return the exit code, None while the command runs, and its last lines of output."""
        text = ""
        with suppress(FileNotFoundError):
            text = self.log.read_text(errors="replace", encoding="utf-8")
        lines = [redact(visible(line)) for line in text.splitlines()[-_TAIL:]]
        fields = {"job": self.number, "action": self.action, "run": self.run}
        return fields | {"exit_code": self.process.poll(), "lines": lines}


@dataclass
class Actions:
    """Actions on runs, and the commands started by them."""

    jobs: dict[int, Job] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _starting: threading.Lock = field(default_factory=threading.Lock)

    def act(self, run: Run, action: str, text: str) -> dict[str, Any]:
        """Carry out `action` with its argument; return what the page shows.

        Raises UsageError for an unknown action or invalid argument, ConflictError where the state
        of the run does not allow it.
        """
        if action == "stop":
            if run.state not in ACTIVE:
                raise ConflictError(f"{run.name} is {run.state}")
            request_stop(run_target(run), now=text == "now")
            return {"message": f"{run.name} stops after its step and saves"}
        if action == "tag":
            labels = change_tags(run.path, text.replace(",", " ").split())
            return {"message": f"tags: {', '.join(labels.tags) or 'none'}"}
        if action == "note":
            set_note(run.path, text)
            return {"message": "note saved"}
        if action == "resume":
            if run.state in ACTIVE:
                raise ConflictError(f"{run.name} is {run.state}")
            return self._start(run, action, ["resume", str(run.path.resolve())])
        if action == "export":
            folder = own_subfolder(run.path.resolve(), "exports") / _export_name(text)
            return self._start(run, action, ["export", str(run.path.resolve()), str(folder)])
        raise UsageError(f"unknown action {action!r}", hint="stop, resume, tag, note or export")

    def job(self, number: int) -> dict[str, Any]:
        """Return the state of a command. Raises NotFoundError for an unknown number."""
        if number not in self.jobs:
            raise NotFoundError(f"no command has the number {number}")
        return self.jobs[number].state()

    def _start(self, run: Run, action: str, words: Sequence[str]) -> dict[str, Any]:
        """Start `rlctl WORDS` in the folder in which this user started the run, or in the board's.

        The record of a run may be another's, and could name any folder.
        """
        with self._starting:
            for job in self.jobs.values():
                if (job.run, job.action) == (run.key, action) and job.process.poll() is None:
                    raise ConflictError(f"{action} of {run.name} is in progress")
            number = next(self._numbers)
            name = f"{action}-{time.strftime('%y%m%d-%H%M%S')}-{number}.log"
            log = own_subfolder(run.path, FOLDER) / name
            cwd = run.record and own_folder(Place.of(run.record.id, run.path))
            if cwd is not None and not os.path.isdir(cwd):
                cwd = None
            with open(log, "xb") as output:
                command = [sys.executable, "-P", "-m", "rlctl", *words]
                process = start_detached(command, output, cwd)
            self.jobs[number] = Job(number, action, run.key, process, log)
        return {"message": f"rlctl {words[0]} {run.name} started", "job": number}


def _export_name(text: str) -> str:
    """Return the name of the folder for an exported model; raise UsageError for a path."""
    name = text.strip()
    plain = name.replace("-", "").replace("_", "").replace(".", "")
    if not plain.isalnum() or name.startswith((".", "-")) or len(name) > _MAX_NAME:
        raise UsageError(
            f"{text!r} is not a name for a folder",
            hint=f"up to {_MAX_NAME} letters, digits, '-', '_' and '.'",
        )
    return name
