"""Names of runs: validity, conflicts, fresh names, and folders of runs that are being created."""

from __future__ import annotations

import glob
import os
import random
import secrets
import shutil
import socket
import string
import time
from pathlib import Path

from rlctl.errors import ResourceError, UsageError
from rlctl.files import existing_parent
from rlctl.process import is_locked

DEFAULT_ROOT = Path("runs")

_ABANDONED_S = 86400.0
_LOCKED_AFTER_S = 60.0  # another process may have made the folder, and not locked it yet
_LONGEST_NAME = 200  # bytes: file systems allow 255, and temporary names are longer


def check_free(root: Path, project: str, name: str | None) -> None:
    """Raise the error that `RunDir.creating` would raise for these names; write nothing."""
    check_writable(root, "trainer.run_dir")
    _check_name("project", project, "trainer.project_name")
    if name is not None:
        _check_name("run", name, "trainer.experiment_name")
        if (root / project / name).exists():
            from rlctl.runs.name_errors import taken

            raise taken(root / project / name)


def _check_name(what: str, given: str, key: str) -> None:
    """Raise UsageError, at `key`, for a name that cannot be that of a folder."""
    if (length := len(os.fsencode(given))) > _LONGEST_NAME:
        raise UsageError(
            f"the {what} name has {length} bytes, and {_LONGEST_NAME} are allowed",
            where=key,
            hint="choose a shorter name; trainer.tracking.description holds longer text",
        )
    if not given.isprintable() or not given or given.startswith((".", "-", "@")) or "/" in given:
        raise UsageError(
            f"{given!r} is not a valid {what} name: it must not be empty, contain a slash "
            "or begin with '.', '-' or '@'",
            where=key,
        )


def check_writable(root: Path, key: str, what: str = "the run's folder") -> None:
    """Raise ResourceError, at `key`, if `root` is not a writable folder and cannot become one."""
    parent = existing_parent(root)
    problem = "not a folder" if not parent.is_dir() else "not writable"
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        hint = f"{key}=DIR selects another folder"
        raise ResourceError(f"cannot create {what}: {parent} is {problem}", where=key, hint=hint)


def unfinished(project: Path) -> Path:
    """Return a new hidden path in the folder of a project for a run that is being created."""
    return project / f"{_prefix()}{os.getpid()}-{secrets.token_hex(4)}"


def remove_abandoned(project: Path) -> None:
    """Remove the `unfinished` folders of processes of this host that were killed.

    Their creators lock them within seconds; without locks, only those of an older day are removed.
    """
    for folder in project.glob(f"{glob.escape(_prefix())}*"):
        pid = folder.name.removeprefix(_prefix()).partition("-")[0]
        if pid == str(os.getpid()):
            continue
        locked = is_locked(folder)
        limit = _ABANDONED_S if locked is None else _LOCKED_AFTER_S
        if not locked and _age_s(folder) > limit:
            shutil.rmtree(folder, ignore_errors=True)


def _age_s(folder: Path) -> float:
    try:
        return time.time() - folder.stat().st_mtime
    except OSError:  # it has just got its name, or been removed
        return 0.0


def _prefix() -> str:
    return f".new-{socket.gethostname()}-"


def fresh_name(recipe: str) -> str:
    """Return `<recipe>-<yymmdd-hhmmss>-<3 letters>`; the letters do not depend on a seed."""
    letters = "".join(random.SystemRandom().choices(string.ascii_lowercase, k=3))
    return f"{Path(recipe).stem}-{time.strftime('%y%m%d-%H%M%S')}-{letters}"
