"""Columns of verl's data files for images, videos and audio, which rlctl does not train on.

A column without content is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlctl.errors import Problem

# Columns that are read if a file has them, to check that they are empty.
CHECKED = ("images", "image", "videos", "video", "audios", "audio", "multi_modal_data")

Records = Sequence[tuple[str, Any]]


def column_problems(records: Records) -> list[Problem]:
    """Return one problem per unsupported field with content, in a column or in `extra_info`."""
    return [
        Problem(
            f"{len(found)} of {len(records)} rows have {name!r}: images, videos and audio are not "
            "supported",
            found[0],
            f"remove {name!r}, or train on rows without it",
        )
        for name in CHECKED
        if (found := [where for where, record in records if has_content(_field(record, name))])
    ]


def _field(record: Any, name: str) -> Any:
    """Return the value of a column, or of a field of `extra_info`."""
    if not isinstance(record, dict):
        return None
    extra_info = record.get("extra_info")
    nested = extra_info.get(name) if isinstance(extra_info, dict) else None
    return record.get(name) or nested


def has_content(value: Any) -> bool:
    """Return False for null, empty text or lists, and mappings without content."""
    if isinstance(value, dict):
        return any(has_content(each) for each in value.values())
    return value is not None and value != "" and value != []
