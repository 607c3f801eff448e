"""Calls as Hermes and Qwen write them: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

from __future__ import annotations

import re

from rlctl.runtime.agents.parsers.base import InvalidCall, PatternParser, TurnBuilder, read_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_TAG = re.compile(f"{OPEN}|{CLOSE}")


class HermesParser(PatternParser):
    """Parser of JSON calls between `<tool_call>` and `</tool_call>`, which must not be missing."""

    start, closing = _TAG, CLOSE

    def read(self, builder: TurnBuilder, text: str, start: re.Match[str]) -> int:
        if start[0] == CLOSE:
            builder.add_malformed(CLOSE, f"{CLOSE} without {OPEN}")
            return start.end()
        end = start.end()
        try:
            # A tag in a text of the JSON is part of that text.
            payload, end = read_json(text, end, "contents of the call")
            tag = _TAG.search(text, end)
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
