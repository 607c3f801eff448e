"""Columns of verl's data files for images, videos and audio, which rlctl does not train on.

A column without content is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlctl.errors import Problem

# Columns that are read if a file has them, to check that they are empty.
CHECKED = ("images", "image", "videos", "video", "audios", "audio", "multi_modal_data")

_NAMES = frozenset(CHECKED)


def unsupported_fields(record: Any) -> list[str]:
    """Return the names of unsupported fields with content, in a column or in `extra_info`."""
    if not isinstance(record, dict):
        return []
    extra_info = record.get("extra_info")
    nested = extra_info if isinstance(extra_info, dict) else {}
    if _NAMES.isdisjoint(record) and _NAMES.isdisjoint(nested):
        return []
    return [name for name in CHECKED if has_content(record.get(name) or nested.get(name))]


def column_problems(places: Mapping[str, Sequence[str]], num_rows: int) -> list[Problem]:
    """Return one problem for each unsupported field; `places` are its rows with content."""
    return [
        Problem(
            f"{len(found)} of {num_rows} rows have {name!r}: images, videos and audio are not "
            "supported",
            found[0],
            f"remove {name!r}, or train on rows without it",
        )
        for name in CHECKED
        if (found := places.get(name))
    ]


def has_content(value: Any) -> bool:
    """Return False for null, empty text or lists, and mappings without content."""
    if isinstance(value, dict):
        return any(has_content(each) for each in value.values())
    return value is not None and value != "" and value != []
