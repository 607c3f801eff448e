"""Data files that a source names: a file, an address, a folder of a data set, or one on the hub."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from rlctl.data_prep.hub import hub_parquet
from rlctl.errors import NotFoundError
from rlctl.storage import is_url, local

TRAIN, VALIDATION = "train", "test"  # splits of data sets that are named without one
_SUFFIXES = (".parquet", ".jsonl", ".json")
RAW_SUFFIXES = (*_SUFFIXES, ".csv", ".tsv", ".arrow")  # of files that `rlctl new` reads
_ABOUT = {"dataset_info.json", "dataset_dict.json", "state.json"}  # of `save_to_disk`
_SET = re.compile(r"(?P<name>.+?)(?::(?P<split>[\w-]+))?")
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def data_files(source: str | Path, split: str, suffixes: Collection[str] = _SUFFIXES) -> list[Path]:
    """Return the local files of `source`, downloaded if necessary.

    `source` is a file or its URL, else `DATASET:SPLIT` or `DATASET`, which means `split`. A data
    set is a folder in the layout of the Hugging Face hub, or `owner/name` on the hub. A file that
    does not exist is returned as it is. Raises NotFoundError for an unknown split, ResourceError
    for a data set of the hub that cannot be downloaded.
    """
    text = str(source)
    path = Path(local(text)).expanduser()
    if path.is_file() or is_url(text):
        return [path]
    match = _SET.fullmatch(text)
    assert match is not None, "every text matches"
    name, wanted = match["name"], match["split"] or split
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _split_files(folder, wanted, suffixes)
    if _HUB_NAME.fullmatch(name) and folder.suffix not in suffixes:
        return hub_parquet(name, wanted)
    return [path]


def files_of(folder: Path, suffixes: Collection[str]) -> list[Path]:
    """Return the data files below a folder, those about a data set left out."""
    return sorted(
        each for each in folder.rglob("*") if each.suffix in suffixes and each.name not in _ABOUT
    )


def _split_files(folder: Path, split: str, suffixes: Collection[str]) -> list[Path]:
    """Return the data files of a split: `train.parquet`, `data/train-00000-of-00002.parquet` …"""
    files = files_of(folder, suffixes)
    pattern = re.compile(rf"{re.escape(split)}(?:[-_.].*)?")
    found = [
        each
        for each in files
        if pattern.fullmatch(each.name) or split in each.relative_to(folder).parts[:-1]
    ]
    if not found:
        names = ", ".join(str(each.relative_to(folder)) for each in files[:5]) or "none"
        raise NotFoundError(
            f"the data set has no files of the split {split!r}",
            where=str(folder),
            hint=f"its data files: {names}; name a file, or FOLDER:SPLIT",
        )
    return found
