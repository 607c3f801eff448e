"""The reference of all keys: from schema and base, as rows for a listing and as docs/reference.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from rlctl.recipes.compose import base_settings
from rlctl.recipes.keys import Key, schema_keys
from rlctl.recipes.layers import MISSING
from rlctl.suggest import nearest

_HEAD = """# Reference: every key

Written by `python -m rlctl.recipes.reference` from the schema and the base recipe; a test says when it is stale.
`rlctl config keys PATTERN` shows the same in a terminal, `rlctl config why KEY` where a value comes from.
A default in `${…}` follows another key."""


@dataclass(frozen=True, slots=True)
class KeyRow:
    """One key for the reader: its default as text (`required` where a recipe must set it)."""

    key: Key
    default: str


def key_rows() -> list[KeyRow]:
    """All keys but sections, in the order of the schema."""
    defaults = base_settings()
    return [
        KeyRow(key, as_text(defaults[key.name].value))
        for key in schema_keys().values()
        if key.kind != "section"
    ]


def matching(pattern: str, names: list[str]) -> list[str]:
    """Names that a pattern means: a glob (`*.lr`), else all that hold every word of it, else the nearest."""
    if any(sign in pattern for sign in "*?["):
        return [name for name in names if fnmatchcase(name, pattern)]
    words = pattern.lower().split()
    return [name for name in names if all(word in name.lower() for word in words)] or nearest(
        pattern, names, limit=5
    )


def as_text(value: Any) -> str:
    """A value as it is written in YAML, in one line."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case list() | tuple():
            return f"[{', '.join(as_text(item) for item in value)}]"
        case dict():
            return "{" + ", ".join(f"{name}: {as_text(item)}" for name, item in value.items()) + "}"
        case str() if value == MISSING:
            return "(required)"
        case _:
            return str(value)


def reference() -> str:
    """The text of docs/reference.md."""
    return "\n".join([_HEAD, *_sections(key_rows())]) + "\n"


def _sections(rows: list[KeyRow]) -> Iterator[str]:
    """A table for every section, keys without the section's name."""
    sections: dict[str, list[KeyRow]] = {}
    for row in rows:
        sections.setdefault(row.key.name.rpartition(".")[0], []).append(row)
    for section, members in sections.items():
        yield f"\n## {section}\n\n| key | type | default | |\n|---|---|---|---|"
        for row in members:
            cells = (
                f"`{row.key.name.rpartition('.')[2]}`",
                row.key.type,
                f"`{row.default}`",
                row.key.help,
            )
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main() -> None:
    """Write docs/reference.md of the repository that the current folder is."""
    from pathlib import Path

    Path("docs").mkdir(exist_ok=True)
    Path("docs/reference.md").write_text(reference(), encoding="utf-8")


if __name__ == "__main__":
    main()
