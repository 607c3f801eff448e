"""Settings of a run: the values of its `config.yaml` by dotted key.

Parsing YAML takes milliseconds. In a file that the run has written, as its recorded hash proves,
the lines of one key are found in the text, which is fast enough for thousands of runs.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from rlctl.files import read_record
from rlctl.runs.run_dir import CONFIG_FILE


def read_settings(folder: Path) -> dict[str, Any]:
    """Return all values by key; empty for an unreadable file."""
    try:
        container = _parse(read_record(folder / CONFIG_FILE))
    except OSError:
        return {}
    if not isinstance(container, dict):
        return {}
    return dict(_flat(container, ""))


def read_setting(folder: Path, key: str, sha256: str | None) -> Any:
    """Return the value of a key; None if it is missing. `sha256` is the file's recorded hash."""
    try:
        content = read_record(folder / CONFIG_FILE)
    except OSError:
        return None
    if hashlib.sha256(content).hexdigest() != sha256:
        return read_settings(folder).get(key)
    value = _parse(_find("\n" + content.decode(errors="replace"), key) or "")
    if isinstance(value, dict) and value:
        return None
    return value


def _parse(text: str | bytes) -> Any:
    """Return the value of a YAML text, None if it cannot be read."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        if "&" in text if isinstance(text, str) else b"&" in text:
            from rlctl.recipes.yaml_errors import check_size

            check_size(yaml.compose(text, loader))
        return yaml.load(text, loader)
    except (ValueError, RecursionError, yaml.YAMLError):
        return None


def _flat(section: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _find(text: str, key: str, indent: str = "") -> str | None:
    """Return the text of a key's value, in the block style of `yaml.safe_dump`.

    `text` is that of a section; its keys begin after a line break and `indent`. They may contain
    dots.
    """
    parts = key.split(".")
    for length in range(1, len(parts) + 1):
        name = ".".join(parts[:length])
        for head in (f"\n{indent}{name}:", f"\n{indent}'{name}':"):
            _, found, below = text.partition(head)
            if not found:
                continue
            value = re.split(rf"\n{indent}[^\s-]", below, maxsplit=1)[0]
            if length == len(parts):
                return value
            if value.startswith(f"\n{indent}  "):
                return _find(value, ".".join(parts[length:]), indent + "  ")
    return None
