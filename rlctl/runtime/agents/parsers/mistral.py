"""Calls as Mistral writes them after `[TOOL_CALLS]`.

Earlier models write a JSON list of `{"name": …, "arguments": {…}, "id": …}`, later models the name
and the arguments: `[TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{…}`, in which the marks may be missing.
"""

from __future__ import annotations

import json
import re

from rlctl.runtime.agents.parsers.base import InvalidCall, PatternParser, TurnBuilder, read_json

_NAMED = re.compile(r"\s*([\w.:/-]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\])?\s*(?=\{)")


class MistralParser(PatternParser):
    """Parser of both formats after `[TOOL_CALLS]`."""

    start = re.compile(r"\[TOOL_CALLS\]")

    def read(self, builder: TurnBuilder, text: str, start: re.Match[str]) -> int:
        if named := _NAMED.match(text, start.end()):
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
