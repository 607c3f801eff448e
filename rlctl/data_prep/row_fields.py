"""Fields of rows that an algorithm reads: texts, which may be the end of a chat, and numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlctl.data_prep.chat_records import chat_in, is_chat, read_chat
from rlctl.data_prep.contract import Fault
from rlctl.data_prep.message_parts import ASSISTANT, shortened, with_text
from rlctl.data_prep.rows import PromptRow
from rlctl.errors import ConfigError


@dataclass(frozen=True)
class RowField:
    """Field at a dotted path, such as `extra_info.answer`, which the config `key` names.

    A text may be a chat that ends with the assistant's message, which is the text, after nothing or
    the prompt. With `is_number` the field is an integer or a float.
    """

    path: str
    key: str
    is_number: bool = False


def read_text(row: PromptRow, field: RowField) -> str:
    """Return the text of a field. Raises ConfigError for a row without one."""
    value = read_field(row, field)
    if isinstance(value, Fault):
        raise ConfigError(f"a row of {row.data_source!r}: {value.message}", hint=value.hint)
    return str(value)


def read_field(row: PromptRow, field: RowField) -> str | float | Fault:
    """Return the text or number of a field, or what is wrong with it."""
    value: Any = {
        "data_source": row.data_source,
        "extra_info": row.extra_info,
        "ground_truth": row.ground_truth,
    }
    for part in field.path.split("."):
        if not isinstance(value, dict) or part not in value:
            known = ", ".join(row.extra_info) or "nothing"
            message = f"the row has no field {field.path!r} ({field.key})"
            return Fault(f"{field.path} is missing", message, f"extra_info has: {known}")
        value = value[part]
    if value is None:
        return Fault(f"{field.path} is null", f"{field.path!r} is null ({field.key})")
    if field.is_number:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number:
            return _wrong_type(field, value, "a number")
        return value
    return _text(row, field, value)


def _text(row: PromptRow, field: RowField, value: Any) -> str | Fault:
    if isinstance(value, str):
        value = chat_in(value) or value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if is_chat(value):
        value = _response(row, field, value)
    elif not isinstance(value, str):
        return _wrong_type(field, value, "a text, or a chat that ends with the assistant's message")
    if isinstance(value, str) and not value.strip():
        return Fault(f"{field.path} is empty", f"{field.path!r} is empty ({field.key})")
    return value


def _response(row: PromptRow, field: RowField, value: Any) -> str | Fault:
    """Return the text of the last message of a chat, which the row's prompt may begin."""
    try:
        *start, last = read_chat(list(map(with_text, value)), field.path)
    except ValueError as error:
        return Fault(f"{field.path} has the wrong type", f"{error} ({field.key})")
    if last["role"] != ASSISTANT:
        return Fault(
            f"{field.path} does not end with the assistant",
            f"{field.path!r} ends with a message of {last['role']!r}, not of the assistant "
            f"({field.key})",
        )
    if start and row.prompt[-len(start) :] != start:
        return Fault(
            f"{field.path} does not follow the prompt",
            f"{field.path!r} is a chat whose messages before the last are not those of the row's "
            f"prompt ({field.key})",
            "give the assistant's last message alone, or the prompt's messages and that message",
        )
    return last["content"]


def _wrong_type(field: RowField, value: Any, expected: str) -> Fault:
    return Fault(
        f"{field.path} has the wrong type",
        f"{field.path!r} is {shortened(value)}, expected {expected} ({field.key})",
    )
