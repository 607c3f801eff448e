"""Subfolders of a run, into which commands write on behalf of users who did not make the run."""

from __future__ import annotations

from pathlib import Path

from rlctl.errors import ConflictError


def own_subfolder(folder: Path, name: str) -> Path:
    """Create a subfolder. Raises ConflictError for a link, which leads out of the run."""
    path = folder / name
    if path.is_symlink():
        raise ConflictError("a folder of a run must not be a link", where=str(path))
    path.mkdir(exist_ok=True)
    return path
