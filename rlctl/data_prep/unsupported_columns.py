"""Columns of verl's data files for images, tools and agents, which rlctl does not train on.

A column without content is ignored. `agent_name` alone selects the loop of a multi-turn rollout;
verl's single-turn rollouts do not depend on it, so it is reported and not used.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlctl.errors import Problem

log = logging.getLogger(__name__)

_MEDIA = ("images", "image", "videos", "video", "audios", "audio", "multi_modal_data")
_TOOLS = ("tools", "tools_kwargs", "interaction_kwargs")
_AGENT = "agent_name"
_SINGLE_TURN = ("", "single_turn_agent")
# Columns that are read if a file has them, to check that they are empty.
CHECKED = (*_MEDIA, *_TOOLS, _AGENT)

Records = Sequence[tuple[str, Any]]


def column_problems(records: Records, path: Path) -> list[Problem]:
    """Return one problem per unsupported field with content, in a column or in `extra_info`."""
    problems = [
        Problem(
            f"{len(found)} of {len(records)} rows have {name!r}: {_reason(name)}",
            found[0],
            f"remove {name!r}, or train on rows without it",
        )
        for name in (*_MEDIA, *_TOOLS)
        if (found := [where for where, record in records if _has(record, name)])
    ]
    agents = {str(_field(record, _AGENT) or "") for _, record in records}
    if agents.difference(_SINGLE_TURN):
        names = ", ".join(sorted(agents.difference(_SINGLE_TURN)))
        log.warning(
            "%s: the column agent_name (%s) is not used: responses have a single turn", path, names
        )
    return problems


def _reason(name: str) -> str:
    if name in _MEDIA:
        return "images, videos and audio are not supported"
    return "tools and multi-turn rollouts are not supported"


def _has(record: Any, name: str) -> bool:
    return has_content(_field(record, name))


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
