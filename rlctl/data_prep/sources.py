"""Data files that a source names: files, an address, a folder of a data set, or one on the hub."""

from __future__ import annotations

import glob
import re
from collections.abc import Collection, Iterable, Sequence
from itertools import takewhile
from pathlib import Path

from rlctl.data_prep.hub import hub_parquet, one_configuration
from rlctl.errors import ConfigError, NotFoundError
from rlctl.storage import is_url, local

TRAIN, VALIDATION = "train", "test"  # splits of data sets that are named without one
VALIDATIONS = ("validation", "val", "dev", "test")  # names of splits, the first one that exists
_SUFFIXES = (".parquet", ".jsonl", ".json")
RAW_SUFFIXES = (*_SUFFIXES, ".csv", ".tsv", ".arrow")  # of files that `rlctl new` reads
_ABOUT = {"dataset_info.json", "dataset_dict.json", "state.json"}  # of `save_to_disk`
_SET = re.compile(r"(?P<name>.+?)(?::(?:(?P<config>[\w.+-]+)/)?(?P<split>[\w-]*))?")
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def data_files(source: str | Path, split: str, suffixes: Collection[str] = _SUFFIXES) -> list[Path]:
    """Return the local files of `source`, downloaded if necessary.

    `source` is a file or its URL, a pattern of files or folders (`part-*.jsonl`), else `DATASET`,
    which means `split`, `DATASET:SPLIT`, `DATASET:CONFIG/SPLIT` or `DATASET:CONFIG/`. A data set is
    a folder in the layout of the Hugging Face hub, or `owner/name` on the hub. A file that does not
    exist is returned as it is. Raises NotFoundError for an unknown split and a pattern without
    files, ConfigError for a data set of several configurations, ResourceError for a data set of the
    hub that cannot be downloaded.
    """
    text = str(source)
    path = Path(local(text)).expanduser()
    if path.is_file() or is_url(text):
        return [path]
    match = _SET.fullmatch(text)
    assert match is not None, "every text matches"
    name, config, wanted = match["name"], match["config"], match["split"] or split
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _split_files(folder, config, wanted, suffixes)
    if glob.has_magic(text):
        return _matching(path, split, suffixes)
    if _HUB_NAME.fullmatch(name) and folder.suffix.lower() not in suffixes:
        return hub_parquet(name, wanted, config)
    return [path]


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
        found = files_of(folder, RAW_SUFFIXES) if folder.is_dir() else []
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


def files_of(folder: Path, suffixes: Collection[str]) -> list[Path]:
    """Return the data files below a folder; hidden ones and those about a data set left out."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in suffixes
        and path.name not in _ABOUT
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def _matching(pattern: Path, split: str, suffixes: Collection[str]) -> list[Path]:
    """Return the files that match a pattern, and those of `split` in folders that do."""
    found = [Path(path) for path in sorted(glob.glob(str(pattern), recursive=True))]
    if not found:
        raise NotFoundError("no file matches the pattern", where=str(pattern))
    return [
        file
        for path in found
        for file in (_split_files(path, None, split, suffixes) if path.is_dir() else [path])
    ]


def _split_files(
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
    return "/".join(folders[1:] if folders[:1] == ("data",) else folders)
