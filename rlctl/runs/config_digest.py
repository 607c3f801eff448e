"""Digest of a run's configuration, fast for thousands of runs that differ in a few values.

Parsing YAML takes milliseconds. The text is therefore split into its sections, as `yaml.safe_dump`
writes them, and sections with the same text are parsed once.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

_NEXT_KEY = [re.compile(rf"^(?={'  ' * depth}[A-Za-z_])", re.MULTILINE) for depth in range(12)]
_HEAD = re.compile(r" *(\w+):\n(?= )")
_MAX_SECTIONS = 2048  # a section that differs in every run is not worth keeping


def config_digest(path: Path) -> dict[str, Any]:
    """Return the composed config as dotted key -> value; empty for an unreadable file."""
    try:
        text = path.read_text(encoding="utf-8")
        try:
            return _parse_sections(text)
        except (yaml.YAMLError, _NotSplitError):  # a reference, or not written by rlctl
            return _parse(text)
    except (OSError, ValueError, yaml.YAMLError, _NotSplitError):
        return {}


class _NotSplitError(Exception):
    """The text is not a mapping whose keys are at the beginning of lines."""


def _parse_sections(text: str, prefix: str = "") -> dict[str, Any]:
    """Return the values of the mapping at `prefix` by dotted key.

    Raises an error where it cannot be split.
    """
    before, *sections = _NEXT_KEY[prefix.count(".")].split(text)
    names = {section.partition(":")[0] for section in sections}
    if before or len(names) < len(sections):
        raise _NotSplitError
    values: dict[str, Any] = {}
    for section in sections:
        values |= _parse_section(section, prefix)
    return values


@functools.lru_cache(_MAX_SECTIONS)
def _parse_section(text: str, prefix: str) -> dict[str, Any]:
    """Return the values of one key and of what is below it, by dotted key."""
    head = _HEAD.match(text)
    deepest = prefix.count(".") + 1 == len(_NEXT_KEY)
    if head is None or deepest or text[head.end() :].lstrip()[:1] in "-#'\"":
        return _parse(text, prefix)
    return _parse_sections(text[head.end() :], f"{prefix}{head[1]}.")


def _parse(text: str, prefix: str = "") -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    container = yaml.load(text, loader)
    if not isinstance(container, dict):
        raise _NotSplitError
    return dict(_flat(container, prefix))


def _flat(section: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
