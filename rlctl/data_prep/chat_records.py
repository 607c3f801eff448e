"""Chats of records: messages of {role, content}, or ShareGPT's {from, value}."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlctl.data_prep.message_parts import ASSISTANT, shortened

Chat = list[dict[str, str]]

FORMS = "a list of {role, content}, or of ShareGPT's {from, value}"
_KEYS = (("role", "content"), ("from", "value"))
_ROLES = {"human": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT, "model": ASSISTANT}


def is_chat(value: Any) -> bool:
    """Return True for a non-empty list of messages, whose content may be of any kind."""
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and len(value) > 0
        and all(_keys(message) is not None for message in value)
    )


def chat_in(text: str) -> list[Any] | None:
    """Return the chat that a text contains as JSON; None for any other text."""
    if not text.lstrip().startswith("[") or not text.rstrip().endswith("]"):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not is_chat(value):
        return None
    return value


def ends_with_response(value: Any) -> bool:
    """Return True for a chat whose last message is the assistant's."""
    if not is_chat(value):
        return False
    role = next(value[-1][role] for role, _ in _KEYS if role in value[-1])
    return _ROLES.get(role, role) == ASSISTANT


def read_chat(value: Any, name: str) -> Chat:
    """Return a chat as {role, content}; `name` names it in errors.

    Raises ValueError for anything else, or for a message whose content is no text.
    """
    if not is_chat(value):
        raise ValueError(f"{name!r} is {shortened(value)}, expected a chat: {FORMS}")
    return [
        _message(message, f"{name!r}, message {number}") for number, message in enumerate(value)
    ]


def split_response(chat: Chat, name: str) -> tuple[Chat, str]:
    """Return the messages before the last one of the assistant, and its text.

    Messages after it are left out. Raises ValueError without such a message or any before it.
    """
    last = _last(chat, name)
    if not any(message["role"] != "system" for message in chat[:last]):
        raise ValueError(f"{name!r} has no message of a user before the assistant's")
    return chat[:last], chat[last]["content"]


def last_response(chat: Chat, name: str) -> str:
    """Return the text of the assistant's last message. Raises ValueError without one."""
    return chat[_last(chat, name)]["content"]


def _last(chat: Chat, name: str) -> int:
    last = max((i for i, message in enumerate(chat) if message["role"] == ASSISTANT), default=None)
    if last is None:
        raise ValueError(f"{name!r} has no message of the assistant, which would be the answer")
    return last


def _keys(message: Any) -> tuple[str, str] | None:
    """Return the names of the fields of role and content; None if it has no role."""
    if not isinstance(message, Mapping):
        return None
    return next((keys for keys in _KEYS if isinstance(message.get(keys[0]), str)), None)


def _message(message: Mapping[str, Any], where: str) -> dict[str, str]:
    keys = _keys(message)
    assert keys is not None, "checked by is_chat"
    role = str(message[keys[0]])
    content = message.get(keys[1])
    if not isinstance(content, str):
        raise ValueError(f"{where} has {keys[1]!r} {shortened(content)}, expected a text")
    if keys[0] == "from":
        role = _ROLES.get(role, role)
    return {"role": role, "content": content}
