"""Parts of a run's folder that are links to another disk, such as its checkpoints.

A file beside such a folder, its claim, says which run has it, and where that run is. A copy of a
run has the same links and the same id, so it gets other folders: what is not certainly the run's
is copied, and neither moved nor deleted.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from rlctl.errors import ConflictError
from rlctl.files import remove, replacing, write_text
from rlctl.process import is_locked, lock_folder
from rlctl.runs.ownership import Place
from rlctl.runs.record import RunRecord
from rlctl.runs.run_dir import RunDir
from rlctl.tracking.json_lines import json_object

log = logging.getLogger(__name__)

PARTS = ("checkpoints", "rollouts", "generations")


def place(run: RunDir, part: str, outside: str | None) -> None:
    """Make the subfolder `part` of a run a link to `outside/<project>/<run>`; None: a real folder.

    The content of an existing part moves there: it is copied, then the link is changed, then the
    old copy is deleted, unless it may be another run's. The folder is readable for the same users
    as the run, and locked until the run ends. A copy of the run that has it gets another name.
    Raises ConflictError when that folder has files of another run or is in use, OSError when they
    do not fit; the part then stays where it was.
    """
    link = run.path / part
    here = Place.of(run.record.id, run.path, run.home)
    old = None
    if link.is_symlink():
        old = link.resolve()
    is_own = old is None or _is_own(old, here, run.path, run.record)
    if outside is None:
        if old is not None:
            _bring_in(run, link, old, is_own)
        return
    project = Path(outside).expanduser().absolute() / run.record.project
    if old is not None and is_own and old.parent == project.resolve():
        _hold(run, old)
        write_text(claim_of(old), json.dumps(here.to_dict()))
        return
    target = project / run.record.name
    is_copy = read_claim(target).get("run") == here.run and not _is_own(
        target, here, run.path, run.record
    )
    if is_copy or (not is_own and old == target.resolve()):
        digest = hashlib.sha256(f"{here.host}:{here.folder}".encode()).hexdigest()[:8]
        target = project / f"{run.record.name}-copy-{digest}"
    has_others = _names(target) and _names(target) != _names(link)
    if has_others or not _claim(target, here, run):
        raise ConflictError(
            f"the folder has files of another run named {run.record.name!r}",
            where=str(target),
            hint="choose another --name; if that run is gone, delete its files there and "
            f"{claim_of(target)}",
        )
    if _names(link) and not _names(target):  # else there is nothing, or a killed process copied it
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as aside:
            _copy(link, aside, is_own)
    target.mkdir(parents=True, exist_ok=True)
    target.chmod(run.path.stat().st_mode & 0o777)
    _hold(run, target)
    _link(link, target)
    if old is not None:
        _leave(run, link, old, is_own)


def is_foreign(run: Path, record: RunRecord, part: str) -> bool:
    """Return True if the part is a link to a folder that may be another run's."""
    link = run / part
    return link.is_symlink() and not _is_own(link.resolve(), Place.of(record.id, run), run, record)


def linked(run: Path, record: RunRecord, home: Path) -> list[Path]:
    """Return the folders elsewhere that are the run's; those that may be another's are left out.

    `home` is the folder that the run had before it was moved into the trash.
    """
    here = Place.of(record.id, run, home)
    targets = [(run / part).resolve() for part in PARTS if (run / part).is_symlink()]
    return [target for target in targets if _is_own(target, here, run, record)]


def delete(target: Path) -> None:
    """Delete a folder that `linked` returned, and free its name. Raises OSError."""
    if target.exists():
        shutil.rmtree(target)
    _free(target)


def complete(run: Path) -> None:
    """Finish what a kill of `place` left: a part is missing between its two renames."""
    for part in PARTS:
        link = run / part
        for aside in (link.with_name(f".{part}.link"), link.with_name(f".{part}.partial")):
            if os.path.lexists(aside) and not os.path.lexists(link):
                aside.replace(link)
            remove(aside)
        remove(link.with_name(f".{part}.old"))


def _bring_in(run: RunDir, link: Path, old: Path, is_own: bool) -> None:
    """Replace a link by a folder with the content of `old`."""
    with replacing(link, unique=False) as aside:
        _copy(old, aside, is_own)
        link.unlink()
    _leave(run, link, old, is_own)


def _leave(run: RunDir, link: Path, old: Path, is_own: bool) -> None:
    """Delete `old`, which `link` referred to, if it is the run's alone; otherwise report it."""
    if not is_own:
        log.warning(
            "%s in %s is not certainly this run's: copied to %s, and left there; if no other "
            "run needs it, delete it",
            link.name,
            old,
            link.resolve(),
        )
    elif old not in [(run.path / part).resolve() for part in PARTS]:
        shutil.rmtree(old, ignore_errors=True)
        _free(old)


def _link(link: Path, target: Path) -> None:
    """Make `link` a link to `target`; delete the folder that it was."""
    aside = link.with_name(f".{link.name}.link")
    aside.unlink(missing_ok=True)
    aside.symlink_to(target)
    before = link.with_name(f".{link.name}.old")
    if link.is_dir() and not link.is_symlink():
        link.rename(before)
    aside.replace(link)
    shutil.rmtree(before, ignore_errors=True)


def _copy(source: Path, target: Path, is_own: bool) -> None:
    """Copy a part; raise ConflictError while another run writes to it."""
    if not is_own and is_locked(source.resolve().parent, _lock_of(source.resolve())):
        _refuse_locked(source)
    shutil.copytree(source, target, symlinks=True)


def _hold(run: RunDir, target: Path) -> None:
    """Lock a folder elsewhere until the run ends; raise ConflictError if it is locked."""
    lock = lock_folder(target.parent, _lock_of(target))
    if lock is None:
        _refuse_locked(target)
    else:
        run.locks.append(lock)


def _refuse_locked(folder: Path) -> NoReturn:
    raise ConflictError(
        "another run writes to the folder at the moment",
        where=str(folder.resolve()),
        hint="wait for its end, or stop it",
    )


def _claim(target: Path, here: Place, run: RunDir) -> bool:
    """Write beside `target` which run has it; return False if another run does.

    Runs of one name have the same target if their roots or machines differ. A claim of a run that
    was deleted, or never created, counts until its file is deleted.
    """
    claim = claim_of(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with claim.open("x", encoding="utf-8") as file:
            file.write(json.dumps(here.to_dict()))
    except FileExistsError:
        return _is_own(target, here, run.path, run.record)
    return True


def _is_own(target: Path, here: Place, path: Path, record: RunRecord) -> bool:
    """Return True if a folder elsewhere is certainly of the run at `here`, whose folder is `path`.

    The claim of an earlier version has no place: it is the run's that is where it was started.
    """
    claim = read_claim(target)
    if "folder" in claim:
        return here.matches(claim)
    if claim.get("run") != here.run or record.process.host != socket.gethostname():
        return False
    from rlctl.runs.settings import read_settings

    root = read_settings(path).get("trainer.run_dir")
    started = Path(record.cwd, str(root), record.project, record.name)
    return root is not None and str(started.resolve()) == here.folder


def read_claim(target: Path) -> Mapping[str, Any]:
    """Return the claim beside `target`; empty if there is none."""
    try:
        return json_object(claim_of(target).read_bytes()) or {}
    except OSError:
        return {}


def claim_of(target: Path) -> Path:
    """Return the file that says which run has a folder elsewhere."""
    return target.with_name(f".{target.name}.run")


def _lock_of(target: Path) -> str:
    return f".{target.name}.lock"


def _free(target: Path) -> None:
    """Remove the claim of a deleted folder, and its lock."""
    claim_of(target).unlink(missing_ok=True)
    target.with_name(_lock_of(target)).unlink(missing_ok=True)


def _names(folder: Path) -> set[str]:
    if not folder.is_dir():
        return set()
    return {path.name for path in folder.iterdir()}
