"""User-defined tags and note of a run.

They have a separate file because only the driver of the run writes `run.json`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rlctl.files import read_record

LABELS_FILE = "labels.json"


@dataclass(frozen=True)
class Labels:
    """Tags, in the order in which they were added, and a free-text note."""

    tags: tuple[str, ...] = ()
    note: str = ""


def read_labels(folder: Path) -> Labels:
    """Return the labels of the run in `folder`; empty if the file is missing or damaged."""
    try:
        raw = json.loads(read_record(f"{folder}/{LABELS_FILE}"))
        return Labels(tuple(str(tag) for tag in raw["tags"]), str(raw["note"]))
    except (OSError, ValueError, TypeError, KeyError):
        return Labels()
