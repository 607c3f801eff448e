"""Texts of a row that a config key selects: a worked solution, a response of a pair, a source."""

from __future__ import annotations

from typing import Any

from rlctl.data_prep.rows import PromptRow
from rlctl.errors import ConfigError
from rlctl.recipes import schema


def text_field(row: PromptRow, dotted: str, key: str) -> str:
    """Return the text at `dotted`, such as `extra_info.answer`, which the config `key` names.

    Raises ConfigError if it is missing.
    """
    value: Any = {
        "data_source": row.data_source,
        "extra_info": row.extra_info,
        "ground_truth": row.ground_truth,
    }
    for part in dotted.split("."):
        if not isinstance(value, dict) or part not in value:
            raise ConfigError(
                f"a row of {row.data_source!r} has no field {dotted!r} ({key})",
                hint=f"extra_info has: {', '.join(row.extra_info) or 'nothing'}",
            )
        value = value[part]
    return str(value)


def pair_texts(row: PromptRow, data: schema.Data) -> list[str]:
    """Return the chosen and the rejected response of a row.

    Raises ConfigError if one is missing.
    """
    keys = {"data.chosen_key": data.chosen_key, "data.rejected_key": data.rejected_key}
    return [text_field(row, dotted, key) for key, dotted in keys.items()]
