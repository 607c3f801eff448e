"""Folder of a run: layout and writing. A copy of the folder is a complete run."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import random
import secrets
import shlex
import shutil
import string
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rlctl.errors import ConflictError, ResourceError, UsageError
from rlctl.files import existing_parent, write_text
from rlctl.runs.events import EVENTS_FILE
from rlctl.runs.process import DriverProcess
from rlctl.runs.provenance import git_state, installed_versions
from rlctl.runs.record import RunRecord, State, now
from rlctl.tracking.jsonl import METRICS_FILE, drop_torn_tail, generations_file

if TYPE_CHECKING:
    from rlctl.recipes.layers import Origin

RECORD_FILE = "run.json"
STOP_FILE = "stop"
_LONGEST_NAME = 200  # bytes: file systems allow 255, and temporary names are longer
SWEEP_VARIABLE = "RLCTL_SWEEP"  # set by a sweep for its runs: the name of the sweep


class RunDir:
    """Folder `runs/<project>/<run>/` of a run, written by the process that drives it.

    `RunDir(path)` opens an existing folder (ConfigError without a readable record);
    `RunDir.create` makes a new one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record = RunRecord.read(path / RECORD_FILE)

    @classmethod
    def create(cls, root: Path, project: str, name: str | None, recipe: str) -> RunDir:
        """Create the folder of a new run named `name` or `<recipe>-<yymmdd-hhmmss>-<3 letters>`.

        Raises ConflictError when the name is taken, UsageError when it is not a valid folder name,
        ResourceError when the folder cannot be written.
        """
        chosen = name or fresh_name(recipe)
        check_free(root, project, chosen)
        path = root / project / chosen
        record = RunRecord(
            id=secrets.token_hex(4),
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
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir()
            record.write(path / RECORD_FILE)
            for part in ("generations", "attempts", "checkpoints"):
                (path / part).mkdir()
        except FileExistsError as error:  # created by another process in the meantime
            raise _taken(path) from error
        except OSError as error:
            shutil.rmtree(path, ignore_errors=True)
            raise ResourceError(
                f"cannot create the run's folder: {error}",
                hint="trainer.run_dir=DIR selects another folder",
            ) from error
        run = cls(path)
        run.new_attempt()
        return run

    @classmethod
    def reopen(cls, path: Path, force: bool = False) -> Self:
        """Open an existing run for its next attempt; this process becomes its driver.

        Raises ConflictError while another process drives the run or, without `force`, while it is
        recorded as running on another host.
        """
        with (path / ".lock").open("w") as lock:
            try:
                # Held until the record names this process.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConflictError(
                    f"another process is resuming {path.name!r}", where=str(path)
                ) from error
            run = cls(path)
            check_idle(run.path, run.record, force)
            run.new_attempt()
        return run

    def place(self, part: str, outside: str | None) -> None:
        """Replace the subfolder `part` by a link to `outside/<project>/<run>`; no-op for None.

        Raises ConflictError when that folder has files of another run.
        """
        if outside is None:
            return
        folder = Path(outside).expanduser().absolute() / self.record.project / self.record.name
        if folder.exists() and any(folder.iterdir()):
            raise ConflictError(
                f"the folder has files of another run named {self.record.name!r}",
                where=str(folder),
                hint="choose another --name",
            )
        folder.mkdir(parents=True, exist_ok=True)
        link = self.path / part
        if link.is_dir():
            link.rmdir()
        link.symlink_to(folder)

    def update(self, **changes: Any) -> None:
        """Change fields of `run.json` atomically."""
        self.record = dataclasses.replace(self.record, **changes)
        self.record.write(self.path / RECORD_FILE)

    def finish(self, state: State, exit_code: int) -> None:
        """Record the final state: finished, failed or stopped."""
        self.update(state=state, exit_code=exit_code, ended=now())
        self.stop_request.unlink(missing_ok=True)
        self.event(state, exit_code=exit_code)

    def event(self, kind: str, /, **fields: Any) -> None:
        """Append one line to `events.jsonl`: time (UTC), kind and `fields`."""
        path = self.path / EVENTS_FILE
        drop_torn_tail(path)
        with path.open("a", encoding="utf-8") as file:
            file.write(
                json.dumps({"time": now(), "kind": kind, **fields}, ensure_ascii=False, default=str)
                + "\n"
            )

    def write_config(self, config: str, origins: Mapping[str, Sequence[Origin]]) -> None:
        """Write the composed config (YAML) and the origins of every key, newest last."""
        chains = {
            key: [{"value": each.value, "where": each.where, "level": each.level} for each in chain]
            for key, chain in origins.items()
        }
        write_text(self.path / "config.yaml", config)
        write_text(
            self.path / "origins.json", json.dumps(chains, ensure_ascii=False, default=str) + "\n"
        )

    def new_attempt(self) -> Path:
        """Start a new attempt driven by this process; return its log folder.

        `attempts/latest` links to the folder.
        """
        number = self.record.attempts + 1
        folder = self.path / "attempts" / str(number)
        folder.mkdir()
        aside = folder.with_name(".latest")
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
            ended=None,
        )
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

    def generations(self, step: int) -> Path:
        """Return the file of a step's validation samples."""
        return generations_file(self.path, step)

    def rollouts(self, step: int) -> Path:
        """Return the file of a step's training responses."""
        return self.path / "rollouts" / self.generations(step).name

    def checkpoint(self, step: int) -> Path:
        """Return the folder of a step's checkpoint."""
        return self.path / "checkpoints" / f"step_{step:06d}"


def check_idle(path: Path, record: RunRecord, force: bool = False) -> None:
    """Raise ConflictError if the driver is running or, without `force`, may run on another host."""
    process = record.process
    alive = process.alive() if record.state in ("starting", "running") else False
    if alive or (alive is None and not force):
        status = "is running" if alive else "is recorded as running"
        hint = (
            "`rlctl watch` follows it"
            if alive
            else "make sure that the process has exited, then use --force"
        )
        raise ConflictError(
            f"{record.name!r} {status}: process {process.pid} on {process.host}",
            where=str(path),
            hint=hint,
        )


def check_free(root: Path, project: str, name: str | None) -> None:
    """Raise the error that `create` would raise for these names; write nothing."""
    _check_root(root)
    for what, given in (("project", project), ("run", name)):
        if given is not None and len(given.encode()) > _LONGEST_NAME:
            raise UsageError(
                f"the {what} name has {len(given.encode())} bytes, and {_LONGEST_NAME} are allowed",
                where="trainer.project_name" if what == "project" else "trainer.experiment_name",
                hint="choose a shorter name; trainer.tracking.description holds longer text",
            )
        if given is not None and (
            not given
            or given.startswith((".", "-", "@"))
            or "/" in given
            or not given.isprintable()
        ):
            raise UsageError(
                f"{given!r} is not a valid {what} name: it must not be empty, contain a slash "
                "or begin with '.', '-' or '@'",
                where="trainer.project_name" if what == "project" else "trainer.experiment_name",
            )
    if name is not None and (root / project / name).exists():
        raise _taken(root / project / name)


def _check_root(root: Path) -> None:
    """Raise ResourceError if `root` is not a writable folder and cannot become one."""
    parent = existing_parent(root)
    problem = "not a folder" if not parent.is_dir() else "not writable"
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ResourceError(
            f"cannot create the run's folder: {parent} is {problem}",
            where="trainer.run_dir",
            hint="trainer.run_dir=DIR selects another folder",
        )


def _taken(path: Path) -> ConflictError:
    free = next(
        name
        for number in range(2, sys.maxsize)
        if not (path.parent / (name := f"{path.name}-{number}")).exists()
    )
    hint = f"--name {shlex.quote(free)} is free; without a name each run gets a new one"
    return ConflictError(f"a run named {path.name!r} already exists", where=str(path), hint=hint)


def fresh_name(recipe: str) -> str:
    """Return `<recipe>-<yymmdd-hhmmss>-<3 letters>`; the letters do not depend on a seed."""
    letters = "".join(random.SystemRandom().choices(string.ascii_lowercase, k=3))
    return f"{Path(recipe).stem}-{time.strftime('%y%m%d-%H%M%S')}-{letters}"
