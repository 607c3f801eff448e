"""Rows of all keys and of plug-ins' settings, with type, default and help."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from pydantic.fields import FieldInfo

from rlctl import plugins
from rlctl.errors import MissingExtraError
from rlctl.recipes.compose import base_settings
from rlctl.recipes.keys import Key, model_keys, schema_keys
from rlctl.recipes.layers import MISSING
from rlctl.recipes.slots import SLOTS, Slot, slot_with_setting
from rlctl.suggest import nearest


@dataclass(frozen=True, slots=True)
class KeyRow:
    """One key with its default as text; `(required)` if a recipe must set it."""

    key: Key
    default: str


def key_rows() -> list[KeyRow]:
    """Return all keys except sections, in the order of the schema."""
    defaults = base_settings()
    return [
        KeyRow(key, as_text(defaults[key.name].value))
        for key in schema_keys().values()
        if key.kind != "section"
    ]


def setting_rows(slot: Slot, name: str) -> list[KeyRow]:
    """Return the settings of a plug-in with its defaults. Loads the plug-in.

    A plug-in whose package is missing has no rows. Raises ConfigError for an unknown name.
    """
    section = slot.section(name)
    if section is None:
        return []
    with suppress(MissingExtraError):
        model = plugins.params_model(plugins.load(slot.kind, name))
        if model is not None:
            defaults = model.model_fields
            return [
                KeyRow(key, _default(defaults[key.name.removeprefix(f"{section}.")]))
                for key in model_keys(model, f"{section}.")
            ]
    return []


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "(required)"
    return as_text(field.get_default(call_default_factory=True))


def shipped_settings() -> list[KeyRow]:
    """Return the settings of all installed plug-ins. Loads the plug-ins."""
    return [
        row
        for slot in SLOTS
        if slot.params
        for name in plugins.names(slot.kind)
        for row in setting_rows(slot, name)
    ]


def selected_setting(key: str, container: Mapping[str, Any]) -> KeyRow | None:
    """Return the setting `key` of a plug-in that `container` selects, or None."""
    slot = slot_with_setting(key)
    if slot is None:
        return None
    rows = [setting_rows(slot, name) for name in slot.selected(container)]
    return next((row for group in rows for row in group if row.key.name == key), None)


def matching(pattern: str, names: list[str]) -> list[str]:
    """Return the names that match a glob (`*.lr`), or contain all words, or are most similar."""
    if any(sign in pattern for sign in "*?["):
        return [name for name in names if fnmatchcase(name, pattern)]
    words = pattern.lower().split()
    return [name for name in names if all(word in name.lower() for word in words)] or nearest(
        pattern, names, limit=5
    )


def as_text(value: Any) -> str:
    """Return a value as one line of YAML."""
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
