"""Calls as Llama 3 writes them: `{"name": …, "parameters": {…}}`, several separated by `;`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rlctl.runtime.agents.environments.protocol import ToolSchema, Turn
from rlctl.runtime.agents.parsers.base import InvalidCall, TurnBuilder, read_json, split_thought

_TAG = "<|python_tag|>"
# Objects that may be calls: one key of a call comes first.
_OBJECT = re.compile(r'\{\s*"(?:name|type|function|parameters|arguments|id)"\s*:')
_NAMED = re.compile(r'\{\s*"(?:name|function)"')
_ARGUMENTS = ("parameters", "arguments")
_SEPARATOR = re.compile(r"\s*;?\s*")


class Llama3JsonParser:
    """Parser of JSON calls without tags.

    After `<|python_tag|>` everything must be a call. Without it, an object is a call if it has a
    name and arguments; other JSON, such as a result that the model reports, is text.
    """

    def parse(self, text: str, tools: Sequence[ToolSchema], offset: int = 0) -> Turn:  # noqa: ARG002
        """Return the calls of a turn; JSON that begins like a call and is invalid is malformed."""
        builder = TurnBuilder(offset)
        thought, rest = split_thought(text)
        builder.add_text(thought)
        before, tag, code = rest.partition(_TAG)
        _add_calls(builder, before)
        if tag:
            _add_tagged(builder, code)
        return builder.build()


def _add_calls(builder: TurnBuilder, text: str) -> None:
    """Add the calls in a text, and the text around them."""
    position = 0
    while start := _OBJECT.search(text, position):
        builder.add_text(text[position : start.start()])
        try:
            payload, end = read_json(text, start.start(), "contents of the call")
        except InvalidCall as error:
            following = _OBJECT.search(text, start.end())
            end = following.start() if following else len(text)
            if _NAMED.match(text, start.start()):
                builder.add_malformed(text[start.start() : end], str(error))
            else:
                builder.add_text(text[start.start() : end])
        else:
            if _is_call(payload):
                _add_payload(builder, payload, text[start.start() : end])
                separator = _SEPARATOR.match(text, end)
                end = separator.end() if separator else end
            else:
                builder.add_text(text[start.start() : end])
        position = end
    builder.add_text(text[position:])


def _add_tagged(builder: TurnBuilder, code: str) -> None:
    """Add the calls after the tag; anything else there is malformed."""
    position = 0
    while code[position:].strip() or not position:
        try:
            payload, end = read_json(code, position, "contents of the call")
        except InvalidCall as error:
            builder.add_malformed(_TAG + code[position:], str(error))
            return
        _add_payload(builder, payload, code[position:end])
        separator = _SEPARATOR.match(code, end)
        position = separator.end() if separator else end


def _is_call(payload: Any) -> bool:
    if not isinstance(payload, dict):
        return False
    inner = payload.get("function")
    return any(
        "name" in layer and any(key in layer for key in _ARGUMENTS)
        for layer in (payload, inner)
        if isinstance(layer, dict)
    )


def _add_payload(builder: TurnBuilder, payload: Any, text: str) -> None:
    try:
        builder.add_payload(payload)
    except InvalidCall as error:
        builder.add_malformed(text, str(error))
