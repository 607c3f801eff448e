"""Files of raw records that sources name, for `rlctl prep` and `rlctl new`."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path

from rlctl.data_prep.data_folders import files_of
from rlctl.data_prep.sources import RAW_SUFFIXES, TRAIN, data_files
from rlctl.errors import ConfigError, NotFoundError
from rlctl.storage import is_url

VALIDATIONS = ("validation", "val", "dev", "test")  # names of splits, the first one that exists


def record_files(sources: Iterable[str], split: str) -> list[Path]:
    """Return the files of records that sources name, all of a folder that has no splits.

    Raises NotFoundError for one that does not exist, ConfigError for one that is no file.
    """
    files = [file for source in sources for file in _record_files(source, split)]
    for file in files:
        if not file.exists():
            raise NotFoundError(
                "the data does not exist",
                where=str(file),
                hint=f"give a file ({', '.join(RAW_SUFFIXES)}), the folder of a data set, or "
                "owner/name on the hub",
            )
        if not file.is_file():
            raise ConfigError(
                "the data is not a regular file, and it is read more than once",
                where=str(file),
                hint="write the records to a file first",
            )
    return files


def _record_files(source: str, split: str) -> list[Path]:
    folder = Path(source).expanduser()
    try:
        return data_files(source, split, RAW_SUFFIXES)
    except NotFoundError:
        found: list[Path] = []
        if folder.is_dir():
            found = files_of(folder, RAW_SUFFIXES)
        if not found or any(split_files(source, split) for split in (TRAIN, *VALIDATIONS)):
            raise
        return found


def split_files(source: str, split: str) -> list[Path]:
    """Return the files of a split, or nothing."""
    try:
        return data_files(source, split, RAW_SUFFIXES)
    except NotFoundError:
        return []


def name_of(sources: Sequence[str]) -> str:
    """Return the name of a source, or what the names of several ones start with."""
    paths = [Path(source if is_url(source) else source.partition(":")[0]) for source in sources]
    names = [
        path.stem if path.is_file() or path.suffix.lower() in RAW_SUFFIXES else path.name
        for path in paths
    ]
    if len(names) == 1 and not glob.has_magic(names[0]):
        return names[0]
    letters = zip(*(re.split(r"[*?[]", name)[0] for name in names), strict=False)
    start = "".join(group[0] for group in takewhile(lambda group: len({*group}) == 1, letters))
    return start.rstrip("-_. 0123456789") or "data"
