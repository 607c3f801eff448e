"""Removal of runs into a hidden folder of the same root, and their restoration.

A removed run is in `.trash/<time>/<project>/<run>/`, so that several runs of one name can be in the
trash. Each move is one atomic rename.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rlctl.errors import ConflictError, NotFoundError, ResourceError, UsageError
from rlctl.runs import folders_elsewhere
from rlctl.runs.prune import num_bytes
from rlctl.runs.run import ACTIVE, Run, read_run

TRASH = ".trash"
_TIME = "%Y%m%d-%H%M%S-%f"


@dataclass(frozen=True)
class Removed:
    """Run in the trash: its present path and the time of its removal (UTC)."""

    path: Path
    removed: datetime

    @property
    def key(self) -> str:
        """`project/name` of the run."""
        return f"{self.path.parent.name}/{self.path.name}"

    @property
    def elsewhere(self) -> list[Path]:
        """Folders of the run on other disks, such as those of `trainer.default_local_dir`."""
        record = read_run(self.path).record
        if record is None:
            return []
        return folders_elsewhere.linked(self.path, record, self.home)

    @property
    def home(self) -> Path:
        """Path of the run before its removal; `path` of one that is not in the trash."""
        parents = self.path.absolute().parents
        if len(parents) > 3 and parents[2].name == TRASH:
            return parents[3] / self.key
        return self.path

    @property
    def num_bytes(self) -> int:
        """Size of all files of the run, also of those elsewhere."""
        return num_bytes(self.path, *self.elsewhere)


def check_removable(run: Run) -> None:
    """Raise ConflictError for an active run, here or on another host."""
    if run.state in ACTIVE:
        host = "?"
        hint = "stop it first"
        if run.record is not None:
            host = run.record.process.host
            if run.record.process.alive(run.path) is None:
                hint = "the state of a process on another host is unknown: --force removes the run"
        raise ConflictError(
            f"the run {run.name} is {run.state} on {host}", where=str(run.path), hint=hint
        )


def remove(run: Run) -> Path:
    """Move a run into the trash of its folder of runs; return its new path.

    Raises ResourceError when it cannot be moved.
    """
    root = run.path.absolute().parent.parent
    target = root / TRASH / datetime.now(UTC).strftime(_TIME) / run.project / run.name
    try:
        target.parent.mkdir(parents=True)
        run.path.rename(target)
    except OSError as error:
        raise ResourceError(
            f"cannot move the run into the trash: {error}", where=str(run.path)
        ) from error
    return target


def removed_runs(root: Path) -> list[Removed]:
    """Return the runs in the trash, most recently removed first."""
    found = []
    for path in (root / TRASH).glob("*/*/*/"):
        try:
            when = datetime.strptime(path.parent.parent.name, _TIME).replace(tzinfo=UTC)
        except ValueError:
            continue
        found.append(Removed(path, when))
    return sorted(found, key=lambda item: item.removed, reverse=True)


def restore(root: Path, name: str) -> Path:
    """Restore the most recently removed run of this name; return its path.

    `name` may be `project/name` or an unambiguous prefix. Raises NotFoundError, UsageError when
    several runs match, ConflictError when the name is in use.
    """
    if not name:
        raise UsageError("the name of the run is empty", hint="`rlctl runs trash` lists the names")
    removed = removed_runs(root)
    exact = [item for item in removed if name in (item.path.name, item.key)]
    matches = exact or [
        item for item in removed if item.path.name.startswith(name) or item.key.startswith(name)
    ]
    keys = list(dict.fromkeys(item.key for item in matches))
    if not keys:
        raise NotFoundError(
            f"no run {name!r} in the trash",
            where=str(root / TRASH),
            hint="`rlctl runs trash` lists what can be restored",
        )
    if len(keys) > 1:
        raise UsageError(
            f"{name!r} names {len(keys)} removed runs", hint=f"one of: {', '.join(keys)}"
        )
    chosen = matches[0]
    place = root / keys[0]
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        chosen.path.rename(place)  # fails for a folder that is not empty
    except OSError as error:
        if not place.exists():
            raise ResourceError(
                f"cannot restore the run: {error}", where=str(chosen.path)
            ) from error
        raise ConflictError(
            f"a run {keys[0]} already exists", where=str(place), hint="remove that run first"
        ) from error
    for folder in (chosen.path.parent, chosen.path.parent.parent):
        folder.rmdir()
    return place


def empty(root: Path) -> list[Removed]:
    """Delete all runs in the trash permanently, also their folders elsewhere; return them.

    Raises ResourceError for what cannot be deleted, after the others were.
    """
    removed = removed_runs(root)
    failures: list[str] = []
    for run in removed:
        try:
            for folder in run.elsewhere:
                folders_elsewhere.delete(folder)
            shutil.rmtree(run.path)
        except OSError as error:
            failures.append(f"{run.key}: {error}")
    if failures:
        raise ResourceError(
            f"{len(failures)} of {len(removed)} runs cannot be deleted: {'; '.join(failures)}",
            where=str(root / TRASH),
        )
    shutil.rmtree(root / TRASH, ignore_errors=True)  # what is left has no run
    return removed
