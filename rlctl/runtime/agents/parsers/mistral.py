"""Calls as Mistral writes them after `[TOOL_CALLS]`.

Earlier models write a JSON list of `{"name": …, "arguments": {…}, "id": …}`, later models the name
and the arguments: `[TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{…}`, in which the marks may be missing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from rlctl.runtime.agents.environments.protocol import ToolSchema, Turn
from rlctl.runtime.agents.parsers.base import InvalidCall, TurnBuilder, read_json, split_thought

_TAG = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([\w.:/-]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\])?\s*(?=\{)")


class MistralParser:
    """Parser of both formats after `[TOOL_CALLS]`."""

    def parse(self, text: str, tools: Sequence[ToolSchema], offset: int = 0) -> Turn:  # noqa: ARG002
        """Return the calls of a turn; a tag without a call is malformed."""
        builder = TurnBuilder(offset)
        thought, rest = split_thought(text)
        builder.add_text(thought)
        position = 0
        while (start := rest.find(_TAG, position)) >= 0:
            builder.add_text(rest[position:start])
            try:
                position = _add_calls(builder, rest, start + len(_TAG))
            except InvalidCall as error:
                following = rest.find(_TAG, start + len(_TAG))
                position = len(rest) if following < 0 else following
                builder.add_malformed(rest[start:position], str(error))
        builder.add_text(rest[position:])
        return builder.build()


def _add_calls(builder: TurnBuilder, text: str, start: int) -> int:
    """Add the calls of one tag, which ends at `start`; return the end of the last of them."""
    if named := _NAMED.match(text, start):
        arguments, end = read_json(text, named.end(), f"arguments of {named[1]}")
        builder.add_call(named[1], arguments, named[2])
        return end
    payload, end = read_json(text, start, "calls")
    for each in payload if isinstance(payload, list) else [payload]:
        try:
            builder.add_payload(each)
        except InvalidCall as error:
            builder.add_malformed(json.dumps(each, ensure_ascii=False), str(error))
    if payload == []:
        raise InvalidCall("the list of calls is empty")
    return end
