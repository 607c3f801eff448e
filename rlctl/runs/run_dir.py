"""Folder of a run: layout and writing. A copy of the folder is a complete run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

from rlctl.errors import FULL_DISK, ConflictError, ResourceError, RlctlError
from rlctl.files import append, overwrite, put_in_place, step_name, write_text
from rlctl.process import MODES, Access, DriverProcess, lock_folder, uptime
from rlctl.redaction import redact_texts
from rlctl.runs.events import EVENTS_FILE, read_events
from rlctl.runs.naming import check_free, fresh_name, remove_abandoned, unfinished
from rlctl.runs.provenance import git_state, installed_versions
from rlctl.runs.record import RunRecord, State, failure_of, now
from rlctl.tracking.jsonl import METRICS_FILE, drop_torn_tail

if TYPE_CHECKING:
    from rlctl.recipes.layers import Origin

RECORD_FILE = "run.json"
CONFIG_FILE = "config.yaml"
STOP_FILE = "stop"
SWEEP_VARIABLE = "RLCTL_SWEEP"  # set by a sweep for its runs: the name of the sweep


class RunDir:
    """Folder `runs/<project>/<run>/` of a run, written by the process that drives it.

    `RunDir(path)` opens an existing folder (ConfigError without a readable record);
    `RunDir.creating` makes a new one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.home = path  # its path once it is complete
        self.record = RunRecord.read(path / RECORD_FILE)
        self._began: float | None = None  # time.monotonic at the start of this process's attempt
        self._writing = threading.Lock()
        self._pending = b""  # events that did not fit on the disk
        self._lock: IO[bytes] | None = None  # while this process drives the run
        self.locks: list[IO[bytes]] = []  # of its folders elsewhere

    @classmethod
    @contextmanager
    def creating(
        cls, root: Path, project: str, name: str | None, recipe: str, access: Access = "owner"
    ) -> Iterator[RunDir]:
        """Yield the folder of a new run; it appears under its name when the block succeeds.

        The name is `name` or `<recipe>-<yymmdd-hhmmss>-<3 letters>`. `access` says who can read the
        folder, whatever the umask. A failed block leaves nothing, and what a killed one leaves is
        hidden and removed later. Raises ConflictError when the name is taken, UsageError when it is
        not a valid folder name, ResourceError when the folder cannot be written.
        """
        chosen = name or fresh_name(recipe)
        check_free(root, project, chosen)
        path = root / project / chosen
        aside = unfinished(path.parent)
        record = RunRecord(
            id=os.urandom(4).hex(),
            name=chosen,
            project=project,
            recipe=recipe,
            command=["rlctl", *sys.argv[1:]],
            cwd=str(Path.cwd()),
            created=now(),
            process=DriverProcess.current(),
            git=git_state(Path.cwd()),
            versions=installed_versions(),
            sweep=os.environ.get(SWEEP_VARIABLE),
        )
        try:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                remove_abandoned(path.parent)
                aside.mkdir(MODES["owner"])
                aside.chmod(MODES[access])
                lock = lock_folder(aside)
                record.write(aside / RECORD_FILE)
                for part in ("generations", "attempts", "checkpoints"):
                    (aside / part).mkdir()
                run = cls(aside)
                run.home = path
                run._lock = lock
                run.new_attempt()
            except OSError as error:
                raise ResourceError(
                    f"cannot create the run's folder: {error}",
                    hint="trainer.run_dir=DIR selects another folder",
                ) from error
            yield run
            try:
                put_in_place(aside, path)
            except OSError as error:
                if path.exists():  # created by another process in the meantime
                    from rlctl.runs.name_errors import taken

                    raise taken(path) from error
                raise
            run.path = path
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    @classmethod
    def create(
        cls, root: Path, project: str, name: str | None, recipe: str, access: Access = "owner"
    ) -> RunDir:
        """Create the folder of a new run without anything more; see `creating`."""
        with cls.creating(root, project, name, recipe, access) as run:
            pass
        return run

    @classmethod
    def reopen(cls, path: Path, force: bool = False) -> Self:
        """Open an existing run for its next attempt; this process becomes its driver.

        Raises ConflictError while another process drives the run or, without `force`, while it is
        recorded as running where this cannot be checked.
        """
        from rlctl.runs.idle import check_idle

        before = RunRecord.read(path / RECORD_FILE)
        check_idle(path, before, force)
        lock = lock_folder(path)
        run = cls(path)
        if run.record.attempts != before.attempts or (
            lock is None and before.process.alive(path) is not None
        ):
            raise ConflictError(f"another process is resuming {path.name!r}", where=str(path))
        run._lock = lock
        run.new_attempt()
        return run

    def is_gone(self) -> bool:
        """Return True if the folder was removed or moved, or is that of another run now."""
        try:
            return RunRecord.read(self.path / RECORD_FILE).id != self.record.id
        except RlctlError:
            return not (self.path / RECORD_FILE).exists()

    def update(self, **changes: Any) -> None:
        """Change fields of `run.json` atomically."""
        is_gone = self.is_gone()
        self.record = dataclasses.replace(self.record, **changes)
        if not is_gone:
            self.record.write(self.path / RECORD_FILE)

    def finish(self, state: State, exit_code: int, error: Exception | None = None) -> None:
        """Record the final state, finished, failed or stopped, and the error that caused it."""
        failure = failure_of(error) if error is not None else None
        end = {"state": state, "exit_code": exit_code, "failure": failure, "ended": now()}
        try:
            self.update(**end, seconds=self.seconds())
        except OSError as error:  # no room for a second file: `update` has set the record
            if error.errno not in FULL_DISK:
                raise
            overwrite(self.path / RECORD_FILE, self.record.text().encode())
        self.stop_request.unlink(missing_ok=True)
        if self._began is not None:
            self._began = time.monotonic()  # the record has the seconds until here
        self.event(state, exit_code=exit_code)
        for lock in (self._lock, *self.locks):
            if lock is not None:
                lock.close()

    def seconds(self) -> float:
        """Return the duration of all attempts so far, measured by the monotonic clock."""
        running = time.monotonic() - self._began if self._began is not None else 0.0
        return round((self.record.seconds or 0.0) + running, 3)

    def event(self, kind: str, /, **fields: Any) -> None:
        """Append one line to `events.jsonl`: time (UTC), kind and `fields` without secrets.

        The driver adds `seconds`, the run's duration so far. On a full disk the line stays in
        memory and is written with the next one.
        """
        row = {"time": now(), "kind": kind, **redact_texts(fields)}
        if self._began is not None:
            row["seconds"] = self.seconds()
        line = json.dumps(row, ensure_ascii=False, default=str).encode() + b"\n"
        path = self.path / EVENTS_FILE
        if self.is_gone():
            return
        with self._writing:  # the checkpoint's thread writes events too
            self._pending += line
            try:
                drop_torn_tail(path)
                append(path, self._pending)
            except OSError as error:
                if error.errno not in FULL_DISK:
                    raise
            else:
                self._pending = b""

    def write_config(self, config: str, origins: Mapping[str, Sequence[Origin]]) -> None:
        """Write the composed config (YAML) and the origins of every key, newest last."""
        chains = {
            key: [dataclasses.asdict(setting) for setting in chain]
            for key, chain in origins.items()
        }
        write_text(self.path / CONFIG_FILE, config)
        write_text(
            self.path / "origins.json", json.dumps(chains, ensure_ascii=False, default=str) + "\n"
        )
        from rlctl.runs.ownership import Place, register

        digest = hashlib.sha256(config.encode()).hexdigest()
        self.update(config_sha256=digest)
        register(Place.of(self.record.id, self.path, self.home), digest, str(Path.cwd()))

    def new_attempt(self) -> Path:
        """Start a new attempt driven by this process; return its log folder.

        `attempts/latest` links to the folder.
        """
        number = self.record.attempts + 1
        folder = self.path / "attempts" / str(number)
        folder.mkdir(parents=True, exist_ok=True)  # a killed process made it; a copy has none
        aside = folder.with_name(".latest")
        aside.unlink(missing_ok=True)
        aside.symlink_to(folder.name)
        latest = folder.with_name("latest")
        if latest.is_dir() and not latest.is_symlink():
            shutil.rmtree(latest)  # the run was copied without symbolic links
        aside.replace(latest)
        self.stop_request.unlink(missing_ok=True)
        self.update(
            attempts=number,
            process=DriverProcess.current(),
            state="starting",
            exit_code=None,
            failure=None,
            ended=None,
            seconds=max(
                (event.get("seconds", 0.0) for event in read_events(self.path)), default=0.0
            ),
            began=uptime(),
        )
        self._began = time.monotonic()
        self.event(
            "attempt", number=number, pid=self.record.process.pid, host=self.record.process.host
        )
        return folder

    @property
    def attempt(self) -> Path:
        """Log folder of the current attempt."""
        return self.path / "attempts" / str(self.record.attempts)

    @property
    def stop_request(self) -> Path:
        """File whose presence asks the driver, on any host, to save and exit after its step."""
        return self.path / STOP_FILE

    @property
    def metrics(self) -> Path:
        """Metrics file of the run."""
        return self.path / METRICS_FILE

    def checkpoint(self, step: int) -> Path:
        """Return the folder of a step's checkpoint."""
        return self.path / "checkpoints" / step_name(step)
