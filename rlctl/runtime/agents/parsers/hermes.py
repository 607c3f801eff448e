"""Calls as Hermes and Qwen write them: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlctl.runtime.agents.environments.protocol import ToolSchema, Turn
from rlctl.runtime.agents.parsers.base import InvalidCall, TurnBuilder, read_json, split_thought

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_TAG = re.compile(f"{OPEN}|{CLOSE}")


class HermesParser:
    """Parser of JSON calls between `<tool_call>` and `</tool_call>`."""

    def parse(self, text: str, tools: Sequence[ToolSchema], offset: int = 0) -> Turn:  # noqa: ARG002
        """Return the calls of a turn; a call without its closing tag is malformed."""
        builder = TurnBuilder(offset)
        thought, rest = split_thought(text)
        builder.add_text(thought)
        position = 0
        while tag := _TAG.search(rest, position):
            builder.add_text(rest[position : tag.start()])
            position = tag.end()
            if tag[0] == CLOSE:
                builder.add_malformed(CLOSE, f"{CLOSE} without {OPEN}")
            else:
                position = _add_call(builder, rest, tag.end())
        builder.add_text(rest[position:])
        return builder.build()


def _add_call(builder: TurnBuilder, text: str, start: int) -> int:
    """Add the call whose JSON is at `start` of `text`; return the end of the call."""
    try:
        # A tag in a text of the JSON is part of that text.
        payload, end = read_json(text, start, "contents of the call")
    except InvalidCall as error:
        return _skip(builder, text, start, start, str(error))
    tag = _TAG.search(text, end)
    if tag is None or tag[0] == OPEN:
        return _skip(builder, text, start, end, f"the call is not closed by {CLOSE}")
    if text[end : tag.start()].strip():
        return _skip(builder, text, start, end, f"there is text between the JSON and {CLOSE}")
    try:
        builder.add_payload(payload)
    except InvalidCall as error:
        builder.add_malformed(text[start - len(OPEN) : tag.end()], str(error))
    return tag.end()


def _skip(builder: TurnBuilder, text: str, start: int, read: int, reason: str) -> int:
    """Add a malformed call that ends after `read` at the next tag, and return its end."""
    tag = _TAG.search(text, read)
    end = len(text) if tag is None else tag.start() if tag[0] == OPEN else tag.end()
    builder.add_malformed(text[start - len(OPEN) : end], reason)
    return end
