"""Folders of a run that are links, which somebody else may have made to read files of the user."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from rlctl.errors import ConflictError
from rlctl.runs.folders_elsewhere import PARTS, read_claim
from rlctl.runs.ownership import Place, own_folder
from rlctl.runs.run import Run

_DEPTH = 5  # of folders in a run: checkpoints/step_000001/huggingface/…


def refuse_links(run: Run) -> Run:
    """Return the run; raise ConflictError for a folder of it that is a link out of the run.

    Runs that this user made may have links. In others a part may be a link to a folder whose claim,
    which is beside it, names the run.
    """
    run_id = run.record.id if run.record else ""
    for link in _links(run.path, _DEPTH):
        if own_folder(Place.of(run_id, run.path)) is not None:
            break
        target = link.resolve()
        is_part = link.parent == run.path and link.name in PARTS
        if is_part and _is_claimed(target, run_id):
            inner = next(_links(target, _DEPTH), None)
            if inner is None:
                continue
            link = inner
        raise ConflictError(
            "a folder of a run must not be a link",
            where=str(link),
            hint="you did not make this run: read where the link leads, and replace it by a copy "
            "of that folder, or delete it",
        )
    return run


def _is_claimed(target: Path, run_id: str) -> bool:
    return read_claim(target).get("run") == run_id != ""


def _links(folder: Path, depth: int) -> Iterator[Path]:
    """Yield links to folders, except those to a folder beside them, as `attempts/latest` is."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.is_symlink():
            is_near = os.readlink(entry.path) in {other.name for other in entries} - {entry.name}
            if entry.is_dir() and not is_near:
                yield Path(entry.path)
        elif depth and entry.is_dir():
            yield from _links(Path(entry.path), depth - 1)
