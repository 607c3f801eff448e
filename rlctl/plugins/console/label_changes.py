"""Changes of the tags and the note of a run."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlctl.errors import UsageError
from rlctl.files import write_text
from rlctl.runs.labels import LABELS_FILE, Labels, read_labels


def change_tags(folder: Path, changes: list[str]) -> Labels:
    """Add (`TAG`, `+TAG`) and remove (`-TAG`, `^TAG`) tags, and write the labels.

    Raises UsageError for a tag with spaces, commas or @.
    """
    names = [change.lstrip("+-^") for change in changes]
    for change, tag in zip(changes, names, strict=True):
        if not tag or any(char.isspace() or char in ",@" for char in tag):
            raise UsageError(
                f"{change!r} is not a tag",
                hint="a tag is one word without commas; `^TAG` removes one",
            )
    with _locked(folder):
        labels = read_labels(folder)
        tags = list(labels.tags)
        for change, tag in zip(changes, names, strict=True):
            tags = [known for known in tags if known != tag]
            if change[0] not in "-^":
                tags.append(tag)
        return _write(folder, dataclasses.replace(labels, tags=tuple(tags)))


def set_note(folder: Path, note: str) -> Labels:
    """Write the note; an empty one removes it."""
    with _locked(folder):
        return _write(folder, dataclasses.replace(read_labels(folder), note=note))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Exclude other changes of the labels, as far as the file system has locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write(folder: Path, labels: Labels) -> Labels:
    write_text(
        folder / LABELS_FILE,
        json.dumps(dataclasses.asdict(labels), ensure_ascii=False, indent=2) + "\n",
    )
    return labels
