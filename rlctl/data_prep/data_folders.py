"""Files of data sets that are folders, and of patterns."""

from __future__ import annotations

import glob
import re
from collections.abc import Collection
from pathlib import Path

from rlctl.errors import NotFoundError
from rlctl.hub import one_configuration

_ABOUT = {"dataset_info.json", "dataset_dict.json", "state.json"}  # of `save_to_disk`


def files_of(folder: Path, suffixes: Collection[str]) -> list[Path]:
    """Return the data files below a folder; hidden ones and those about a data set left out."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in suffixes
        and path.name not in _ABOUT
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def matching_files(pattern: Path, split: str, suffixes: Collection[str]) -> list[Path]:
    """Return the files that match a pattern, and those of `split` in folders that do."""
    found = [Path(path) for path in sorted(glob.glob(str(pattern), recursive=True))]
    if not found:
        raise NotFoundError("no file matches the pattern", where=str(pattern))
    files: list[Path] = []
    for path in found:
        if path.is_dir():
            files += files_of_split(path, None, split, suffixes)
        else:
            files.append(path)
    return files


def files_of_split(
    folder: Path, config: str | None, split: str, suffixes: Collection[str]
) -> list[Path]:
    """Return the data files of a split: `train.parquet`, `data/train-00000-of-00002.parquet` …"""
    files = files_of(folder, suffixes)
    by_config: dict[str, list[Path]] = {}
    for file in files:
        of_file = _configuration(file.relative_to(folder), split)
        if of_file is not None:
            by_config.setdefault(of_file, []).append(file)
    if not by_config:
        names = ", ".join(str(path.relative_to(folder)) for path in files[:5]) or "none"
        raise NotFoundError(
            f"the data set has no files of the split {split!r}",
            where=str(folder),
            hint=f"its data files: {names}; name a file, or FOLDER:SPLIT",
        )
    return by_config[one_configuration(str(folder), by_config, split, config)]


def _configuration(file: Path, split: str) -> str | None:
    """Return the configuration of a file: the folders above its split; None for another split."""
    folders = file.parts[:-1]
    if split in folders:
        folders = folders[: folders.index(split)]
    elif not re.fullmatch(rf"{re.escape(split)}(?:[-_.].*)?", file.name):
        return None
    if folders[:1] == ("data",):
        folders = folders[1:]
    return "/".join(folders)
