"""Parts of a run's folder that are links to another disk, such as its checkpoints."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from rlctl.errors import ConflictError
from rlctl.files import remove, replacing
from rlctl.runs.run_dir import RunDir
from rlctl.tracking.json_lines import json_object

PARTS = ("checkpoints", "rollouts", "generations")


def place(run: RunDir, part: str, outside: str | None) -> None:
    """Make the subfolder `part` of a run a link to `outside/<project>/<run>`; None: a real folder.

    The content of an existing part moves there: it is copied, then the link is changed, then the
    old copy is deleted. It is readable for the same users as the run. Raises ConflictError when
    that folder has files of another run, OSError when they do not fit; the part then stays where it
    was.
    """
    link = run.path / part
    if outside is None:
        if link.is_symlink():
            old = link.resolve()
            with replacing(link, unique=False) as aside:
                shutil.copytree(old, aside, symlinks=True)
                link.unlink()
            shutil.rmtree(old)
            _claim_of(old).unlink(missing_ok=True)
        return
    target = Path(outside).expanduser().absolute() / run.record.project / run.record.name
    if link.is_symlink() and link.resolve() == target.resolve():
        return
    has_others = _names(target) and _names(target) != _names(link)
    if has_others or not _claim(target, run):
        raise ConflictError(
            f"the folder has files of another run named {run.record.name!r}",
            where=str(target),
            hint="choose another --name; if that run is gone, delete its files there and "
            f"{_claim_of(target)}",
        )
    if _names(link) and not _names(target):  # else there is nothing, or a killed process copied it
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as aside:
            shutil.copytree(link, aside, symlinks=True)
    target.mkdir(parents=True, exist_ok=True)
    target.chmod(run.path.stat().st_mode & 0o777)
    _link(link, target)


def _claim(target: Path, run: RunDir) -> bool:
    """Write beside `target` which run has it; return False if another run does.

    Runs of one name have the same target if their roots or machines differ. A claim of a run that
    was deleted, or never created, counts until its file is deleted.
    """
    claim = _claim_of(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with claim.open("x", encoding="utf-8") as file:
            file.write(json.dumps({"run": run.record.id}))
    except FileExistsError:
        return _claimed_by(target) == run.record.id
    return True


def _claimed_by(target: Path) -> object:
    """Return the id of the run that has `target`, None if no run has it."""
    try:
        return (json_object(_claim_of(target).read_bytes()) or {}).get("run")
    except OSError:
        return None


def _claim_of(target: Path) -> Path:
    return target.with_name(f".{target.name}.run")


def linked(run: Path, run_id: str) -> list[Path]:
    """Return the folders elsewhere that belong to the run; folders of other runs are left out."""
    targets = [(run / part).resolve() for part in PARTS if (run / part).is_symlink()]
    return [target for target in targets if _claimed_by(target) == run_id]


def delete(target: Path) -> None:
    """Delete a folder that `linked` returned, and free its name. Raises OSError."""
    if target.exists():
        shutil.rmtree(target)
    _claim_of(target).unlink(missing_ok=True)


def complete(run: Path) -> None:
    """Finish what a kill of `place` left: a part is missing between its two renames."""
    for part in PARTS:
        link = run / part
        for aside in (link.with_name(f".{part}.link"), link.with_name(f".{part}.partial")):
            if os.path.lexists(aside) and not os.path.lexists(link):
                aside.replace(link)
            remove(aside)
        remove(link.with_name(f".{part}.old"))


def _link(link: Path, target: Path) -> None:
    """Make `link` a link to `target` and delete what it was."""
    old = link.resolve() if link.is_symlink() else link.with_name(f".{link.name}.old")
    aside = link.with_name(f".{link.name}.link")
    aside.unlink(missing_ok=True)
    aside.symlink_to(target)
    if link.is_dir() and not link.is_symlink():
        link.rename(old)
    aside.replace(link)
    shutil.rmtree(old, ignore_errors=True)
    _claim_of(old).unlink(missing_ok=True)


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()
