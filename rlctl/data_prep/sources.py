"""Data files that a source names: files, an address, a folder of a data set, or one on the hub."""

from __future__ import annotations

import glob
import hashlib
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from rlctl.redaction import redact
from rlctl.storage import is_url, local

TRAIN = "train"  # splits of data sets that are named without one
VALIDATION = "test"
_SUFFIXES = (".parquet", ".jsonl", ".json")
RAW_SUFFIXES = (*_SUFFIXES, ".csv", ".tsv", ".arrow")  # of files that `rlctl new` reads
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
    name, config = match.group("name", "config")
    wanted = match["split"] or split
    folder = Path(name).expanduser()
    if folder.is_dir():
        from rlctl.data_prep.data_folders import files_of_split

        return files_of_split(folder, config, wanted, suffixes)
    if glob.has_magic(text):
        from rlctl.data_prep.data_folders import matching_files

        return matching_files(path, split, suffixes)
    if _HUB_NAME.fullmatch(name) and folder.suffix.lower() not in suffixes:
        from rlctl.hub import hub_parquet

        return hub_parquet(name, wanted, config)
    return [path]


def data_hashes(files: Iterable[str], split: str) -> dict[str, str]:
    """Return the SHA-256 of each file's content, by path or URL without secrets.

    Files of a data set, of `split` if it names none, are named by the data set and their name;
    those of a pattern, or of one name in several folders, by their path.
    """
    hashes = {}
    for name, path in named_files(files, split):
        with path.open("rb") as file:
            hashes[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


def named_files(files: Iterable[str], split: str) -> Iterator[tuple[str, Path]]:
    """Yield name and path of each file; see `data_hashes`."""
    for source in files:
        paths = data_files(source, split)
        single = paths == [Path(local(source)).expanduser()]
        by_path = "*" in source or len({path.name for path in paths}) < len(paths)
        for path in paths:
            name = redact(source) if single else f"{source}/{path.name}"
            yield (str(path) if by_path else name), path
