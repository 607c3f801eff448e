"""Calls as Qwen3-Coder writes them, with one tag for each argument:

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

Values are texts; the schema of the tool gives their types. The tags of `tool_call` may be missing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlctl.plugins.agents.parsers.base import InvalidCall, PatternParser, TurnBuilder, load_json
from rlctl.runtime.serving.chat import ToolSchema

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_TAG = re.compile(rf"(?:{_OPEN}\s*)?<function=|{_OPEN}|{_CLOSE}")
_CLOSING = re.compile(rf"\s*{_CLOSE}")
_NAME = re.compile(r"([^<>\n]+)>")
_END = re.compile(r"\s*</function>")
# A value ends at a closing tag that another tag follows, so it may contain other tags.
_PARAMETER = re.compile(
    r"\s*<parameter=([^<>\n]+)>(.*?)</parameter>(?=\s*(?:<parameter=|</function>))", re.DOTALL
)
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}


class Qwen3CoderParser(PatternParser):
    """Parser of calls between `<function=NAME>` and `</function>`.

    The schemas of the tools give the types of arguments.
    """

    start = _TAG
    closing = _CLOSE

    def read(self, builder: TurnBuilder, text: str, start: re.Match[str]) -> int:
        if start[0] == _CLOSE:
            raise InvalidCall(f"{_CLOSE} without {_OPEN}")
        if start[0] == _OPEN:
            raise InvalidCall(f"{_OPEN} is not followed by <function=NAME>")
        name = _NAME.match(text, start.end())
        if name is None:
            raise InvalidCall("the call has no <function=NAME>")
        values: dict[str, str] = {}
        position = name.end()
        while parameter := _PARAMETER.match(text, position):
            key = parameter[1].strip()
            if key in values:
                raise InvalidCall(f"the parameter {key} of {name[1]} is given twice")
            values[key] = parameter[2].removeprefix("\n").removesuffix("\n")
            position = parameter.end()
        end = _END.match(text, position)
        if end is None:
            raise InvalidCall(
                f"the call of {name[1]} has {len(values)} complete parameters, and then neither "
                "<parameter=KEY>VALUE</parameter> nor </function>"
            )
        closing = _CLOSING.match(text, end.end())
        if closing is None and start[0].startswith(_OPEN):
            raise InvalidCall(f"the call is not closed by {_CLOSE}")
        schemas = _properties(name[1].strip(), builder.tools)
        arguments = {key: _typed(key, value, schemas.get(key)) for key, value in values.items()}
        builder.add_call(name[1], arguments)
        return (closing or end).end()


def _properties(name: str, tools: Sequence[ToolSchema]) -> Mapping[str, Any]:
    """Return the schemas of the arguments of the tool `name`; empty for an unknown tool."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            return (function.get("parameters") or {}).get("properties") or {}
    return {}


def _typed(key: str, text: str, schema: Any) -> Any:
    """Return a value of the type in `schema`; a text without one. Raises InvalidCall."""
    types = _types(schema)
    others = [name for name in types if name in _TYPES]
    if not others:
        return text
    try:
        # Models also write the constants of Python.
        value = load_json(
            {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text), key
        )
    except InvalidCall:
        value = text
    for name in others:
        fits = isinstance(value, _TYPES[name]) and (
            name == "boolean" or not isinstance(value, bool)
        )
        if name == "integer" and isinstance(value, float) and value.is_integer():
            return int(value)
        if fits:
            return value
    if "string" in types:
        return text
    raise InvalidCall(f"the argument {key} must be of type {' or '.join(types)}, not {text[:60]!r}")


def _types(schema: Any) -> list[str]:
    """Return the types that a JSON schema permits; empty if it does not say."""
    if not isinstance(schema, Mapping):
        return []
    declared = schema.get("type")
    types = [declared] if isinstance(declared, str) else list(declared or ())
    for alternatives in (schema.get("anyOf"), schema.get("oneOf")):
        types += [name for option in alternatives or () for name in _types(option)]
    return types
