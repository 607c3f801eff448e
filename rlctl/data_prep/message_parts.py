"""Messages of chats: content parts as in TRL, such as `{"type": "image"}`, become text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ASSISTANT = "assistant"
IMAGE_KEY = "images"  # default column of the images of a row
PLACEHOLDER = "<image>"


def text_of(content: Any) -> Any:
    """Return the text of a message with a placeholder for each image part; other values as is."""
    if not isinstance(content, list):
        return content
    texts = [_text(part) for part in content]
    if None in texts:
        return content
    return "".join(map(str, texts))


def with_text(message: Any) -> Any:
    """Return a message with `<image>` in its text in place of content parts."""
    if not isinstance(message, Mapping) or "content" not in message:
        return message
    return {**message, "content": text_of(message["content"])}


def _text(part: Any) -> str | None:
    if not isinstance(part, dict):
        return None
    if part.get("type") == "image":
        return PLACEHOLDER
    return part.get("text") if part.get("type") == "text" else None


def shortened(value: Any) -> str:
    """Return the repr of a value, cut to 60 characters."""
    text = repr(value)
    if len(text) <= 60:
        return text
    return f"{text[:59]}…"
