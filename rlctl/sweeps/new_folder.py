"""Folder of a new sweep, which appears under its name when it is complete."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

from rlctl.files import put_in_place, write_text
from rlctl.process import MODES, Access, lock_folder
from rlctl.runs.naming import remove_abandoned, unfinished
from rlctl.runs.ownership import register
from rlctl.sweeps.sweep_record import RECORD_FILE, SweepDir, SweepRecord


def create(root: Path, record: SweepRecord, access: Access) -> SweepDir:
    """Create the folder; what a killed process leaves is hidden and removed later, as of runs.

    Raises ConflictError if the name is taken.
    """
    path = root / record.project / record.name
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(path.parent)
    aside = unfinished(path.parent)
    try:
        aside.mkdir(MODES["owner"])
        aside.chmod(MODES[access])
        lock = lock_folder(aside)  # the file of the lock also marks the place
        (aside / "logs").mkdir()
        text = json.dumps(dataclasses.asdict(record), indent=2, ensure_ascii=False)
        write_text(aside / RECORD_FILE, text + "\n")
        sweep = SweepDir(aside)
        register(sweep.place_at(path), sweep.digest, record.cwd)
        try:
            put_in_place(aside, path)
        except OSError as error:
            if path.exists():  # created by another process in the meantime
                from rlctl.runs.name_errors import taken

                raise taken(path) from error
            raise
        if lock is not None:
            lock.close()
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return SweepDir(path)
