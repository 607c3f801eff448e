"""Page of all keys and plug-ins."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path

from rlctl import plugins
from rlctl.recipes.key_reference import KeyRow, key_rows, setting_rows
from rlctl.recipes.slots import SLOTS, Slot

_HEAD = """# All keys

`rlctl config keys PATTERN` searches keys in a terminal, `rlctl config why KEY` explains a value.
A default in `${…}` follows another key. [Plug-ins](#plug-ins) are listed at the end."""


def keys() -> str:
    """Return the text of the page."""
    return "\n".join([_HEAD, *_sections(key_rows()), *_plugins()]) + "\n"


def _sections(rows: list[KeyRow]) -> Iterator[str]:
    """Yield a table per section, with keys relative to the section."""
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


def _plugins() -> Iterator[str]:
    """Yield a list of the shipped plug-ins per kind, with their settings."""
    yield "\n## Plug-ins"
    for kind, slots in _slots_by_kind().items():
        selecting = " and ".join(f"`{slot.key}`" for slot in slots)
        yield f"\n### {kind}\n\nSelected by {selecting}."
        slot = slots[0]
        if slot.params:
            yield f"Settings in `{slot.section('NAME')}`."
        yield ""
        for point in sorted(plugins.entry_points_of(kind), key=lambda point: point.name):
            if point.dist is None or point.dist.name != "rlctl":
                continue
            yield f"* `{point.name}`: {_first_line(point)}"
            for row in setting_rows(slot, point.name):
                field = row.key.name.rpartition(".")[2]
                yield f"  * `{field}` = `{row.default}`: {row.key.help}; {row.key.type}"


def _slots_by_kind() -> dict[str, list[Slot]]:
    kinds: dict[str, list[Slot]] = {}
    for slot in SLOTS:
        kinds.setdefault(slot.kind, []).append(slot)
    return kinds


def _first_line(point: EntryPoint) -> str:
    """Return the first docstring line of a plug-in, read without importing its module."""
    spec = find_spec(point.module)
    source = Path(spec.origin).read_text(encoding="utf-8") if spec and spec.origin else ""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == point.attr:
            return (ast.get_docstring(node) or "").partition("\n")[0]
    return ""
