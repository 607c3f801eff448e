"""Tags and a note that people give a run. They have a file of their own: `run.json` belongs to the process that drives the run."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from rlctl.errors import UsageError
from rlctl.files import write_text

LABELS_FILE = "labels.json"


@dataclass(frozen=True)
class Labels:
    """`tags` in the order they were given, `note` in free text."""

    tags: tuple[str, ...] = ()
    note: str = ""


def read_labels(folder: Path) -> Labels:
    """The labels of the run in `folder`; none where there is no such file or it is damaged: nothing hangs on them."""
    try:
        raw = json.loads((folder / LABELS_FILE).read_text(encoding="utf-8"))
        return Labels(tuple(str(tag) for tag in raw["tags"]), str(raw["note"]))
    except (OSError, ValueError, TypeError, KeyError):
        return Labels()


def change_tags(folder: Path, changes: list[str]) -> Labels:
    """Apply `changes` (`TAG` or `+TAG` adds, `-TAG` or `^TAG` takes away) and write the labels. UsageError for a tag with blanks."""
    labels = read_labels(folder)
    tags = list(labels.tags)
    for change in changes:
        tag = change.lstrip("+-^")
        if not tag or any(char.isspace() or char in ",@" for char in tag):
            raise UsageError(
                f"{change!r} is no tag",
                hint="a tag is one word without commas; `^TAG` takes one away",
            )
        tags = [each for each in tags if each != tag] + ([] if change[0] in "-^" else [tag])
    return _write(folder, dataclasses.replace(labels, tags=tuple(tags)))


def set_note(folder: Path, note: str) -> Labels:
    """Write the note; an empty one takes it away."""
    return _write(folder, dataclasses.replace(read_labels(folder), note=note))


def _write(folder: Path, labels: Labels) -> Labels:
    write_text(
        folder / LABELS_FILE,
        json.dumps(dataclasses.asdict(labels), ensure_ascii=False, indent=2) + "\n",
    )
    return labels
