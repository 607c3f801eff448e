"""Runs that were removed: moved into a hidden folder under the same root, from where they can be brought back.

`.trash/<time>/<project>/<run>/`: a run may be removed, made anew under its name and removed again. Moving is one rename, so that a run is
at every moment whole, in one place or in the other.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rlctl.errors import ConflictError, NotFoundError, ResourceError, UsageError
from rlctl.runs.store import ACTIVE, Run

TRASH = ".trash"
_TIME = "%Y%m%d-%H%M%S-%f"


@dataclass(frozen=True)
class Removed:
    """A run in the trash: where it lies, and when it was removed (UTC)."""

    path: Path
    removed: datetime

    @property
    def key(self) -> str:
        return f"{self.path.parent.name}/{self.path.name}"

    @property
    def num_bytes(self) -> int:
        return sum(
            file.lstat().st_size
            for file in self.path.rglob("*")
            if file.is_symlink() or file.is_file()
        )


def check_removable(run: Run) -> None:
    """Errors: ConflictError for a run that goes on, here or on a host that cannot be asked."""
    if run.state in ACTIVE:
        host = run.record.process.host if run.record else "?"
        elsewhere = run.record is not None and run.record.process.alive() is None
        hint = (
            "a run on another host cannot be asked whether it lives: --force"
            if elsewhere
            else "stop it first"
        )
        raise ConflictError(
            f"the run {run.name} is {run.state} on {host}", where=str(run.path), hint=hint
        )


def remove(root: Path, run: Run) -> Path:
    """Move a run into the trash of `root`. Where it lies then. Errors: UsageError for a run elsewhere, ResourceError of the disk."""
    if run.path.resolve().parent.parent != root.resolve():
        raise UsageError(
            f"{run.path} is no run of {root.resolve()}",
            hint=f"--root {run.path.resolve().parent.parent}",
        )
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
    """What is in the trash, what was removed last first."""
    found = []
    for path in (root / TRASH).glob("*/*/*/"):
        try:
            when = datetime.strptime(path.parent.parent.name, _TIME).replace(tzinfo=UTC)
        except ValueError:
            continue
        found.append(Removed(path, when))
    return sorted(found, key=lambda each: each.removed, reverse=True)


def restore(root: Path, name: str) -> Path:
    """Bring the run removed last under `name` (or `project/name`, or a beginning that no other shares) back to its place: where that is.

    Errors: NotFoundError, UsageError when several match, ConflictError when its name is taken again.
    """
    there = removed_runs(root)
    exact = [each for each in there if name in (each.path.name, each.key)]
    matches = exact or [
        each for each in there if each.path.name.startswith(name) or each.key.startswith(name)
    ]
    keys = list(dict.fromkeys(each.key for each in matches))
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
    chosen, place = matches[0], root / keys[0]
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        chosen.path.rename(place)  # onto an empty folder it would succeed, but no run is one
    except OSError as error:
        if not place.exists():
            raise ResourceError(
                f"cannot bring the run back: {error}", where=str(chosen.path)
            ) from error
        raise ConflictError(
            f"there is a run {keys[0]} again", where=str(place), hint="remove that one first"
        ) from error
    for folder in (chosen.path.parent, chosen.path.parent.parent):
        folder.rmdir()
    return place


def empty(root: Path) -> list[Removed]:
    """Delete what is in the trash for good, and list it."""
    gone = removed_runs(root)
    shutil.rmtree(root / TRASH, ignore_errors=True)
    return gone
