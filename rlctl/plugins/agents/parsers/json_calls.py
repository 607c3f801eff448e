"""Calls in JSON, as Hermes and Qwen, Mistral, and Llama 3 write them.

<tool_call>{"name": …, "arguments": {…}}</tool_call>       hermes
[TOOL_CALLS][{"name": …, "arguments": {…}, "id": …}, …]     mistral, earlier models
[TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{…}                        later ones; marks may be missing
{"name": …, "parameters": {…}}; …                           llama3_json
"""

from __future__ import annotations

import json
import re
from typing import Any

from rlctl.plugins.agents.parsers.base import (
    InvalidCall,
    PatternParser,
    TurnBuilder,
    read_json,
)

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_HERMES_TAG = re.compile(f"{OPEN}|{CLOSE}")


class HermesParser(PatternParser):
    """Parser of JSON calls between `<tool_call>` and `</tool_call>`, which must not be missing."""

    start = _HERMES_TAG
    closing = CLOSE

    def read(self, builder: TurnBuilder, text: str, start: re.Match[str]) -> int:
        if start[0] == CLOSE:
            builder.add_malformed(CLOSE, f"{CLOSE} without {OPEN}")
            return start.end()
        end = start.end()
        try:
            # A tag in a text of the JSON is part of that text.
            payload, end = read_json(text, end, "contents of the call")
            tag = _HERMES_TAG.search(text, end)
            if tag is None or tag[0] == OPEN:
                raise InvalidCall(f"the call is not closed by {CLOSE}")
            if text[end : tag.start()].strip():
                raise InvalidCall(f"there is text between the JSON and {CLOSE}")
            builder.add_payload(payload)
        except InvalidCall as error:
            end = self.skip(text, end)
            builder.add_malformed(text[start.start() : end], str(error))
            return end
        return tag.end()


_WITH_NAME = re.compile(r"\s*([\w.:/-]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\])?\s*(?=\{)")


class MistralParser(PatternParser):
    """Parser of both formats after `[TOOL_CALLS]`."""

    start = re.compile(r"\[TOOL_CALLS\]")

    def read(self, builder: TurnBuilder, text: str, start: re.Match[str]) -> int:
        if named := _WITH_NAME.match(text, start.end()):
            arguments, end = read_json(text, named.end(), f"arguments of {named[1]}")
            builder.add_call(named[1], arguments, named[2])
            return end
        payload, end = read_json(text, start.end(), "calls")
        for call in payload if isinstance(payload, list) else [payload]:
            try:
                builder.add_payload(call)
            except InvalidCall as error:
                builder.add_malformed(json.dumps(call, ensure_ascii=False), str(error))
        if payload == []:
            raise InvalidCall("the list of calls is empty")
        return end


_TAG = "<|python_tag|>"
# Objects that may be calls: one key of a call comes first.
_OBJECT = r'\{\s*"(?:name|type|function|parameters|arguments|id)"\s*:'
_NAMED = re.compile(r'\{\s*"(?:name|function)"')
_ARGUMENTS = ("parameters", "arguments")
_SEPARATOR = re.compile(r"\s*;?\s*")


class Llama3JsonParser(PatternParser):
    """Parser of JSON calls without tags.

    After `<|python_tag|>` everything must be a call. Without it, an object is a call if it has a
    name and arguments; other JSON, such as a result that the model reports, is text.
    """

    start = re.compile(f"{re.escape(_TAG)}|{_OBJECT}")

    def read(self, builder: TurnBuilder, text: str, start: re.Match[str]) -> int:
        if start[0] == _TAG:
            _add_tagged(builder, text[start.end() :])
            return len(text)
        try:
            payload, end = read_json(text, start.start(), "contents of the call")
        except InvalidCall:
            if _NAMED.match(start[0]):
                raise
            builder.add_text(start[0])
            return start.end()
        if not _is_call(payload):
            builder.add_text(text[start.start() : end])
            return end
        return _add_payload(builder, payload, text, start.start(), end)


def _add_tagged(builder: TurnBuilder, code: str) -> None:
    """Add the calls after the tag; anything else there is malformed."""
    position = 0
    while code[position:].strip() or not position:
        try:
            payload, end = read_json(code, position, "contents of the call")
        except InvalidCall as error:
            builder.add_malformed(_TAG + code[position:], str(error))
            return
        position = _add_payload(builder, payload, code, position, end)


def _is_call(payload: Any) -> bool:
    if not isinstance(payload, dict):
        return False
    inner = payload.get("function")
    return any(
        "name" in layer and any(key in layer for key in _ARGUMENTS)
        for layer in (payload, inner)
        if isinstance(layer, dict)
    )


def _add_payload(builder: TurnBuilder, payload: Any, text: str, start: int, end: int) -> int:
    """Add the call that `text` has from `start` to `end`; return the place of the next one."""
    try:
        builder.add_payload(payload)
    except InvalidCall as error:
        builder.add_malformed(text[start:end], str(error))
    separator = _SEPARATOR.match(text, end)
    assert separator is not None, "it matches the empty text, too"
    return separator.end()
