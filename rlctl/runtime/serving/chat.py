"""Messages, tools and turns of a chat, in the form of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# A chat message as in OpenAI's API: `role`, `content`, and optionally `tool_calls` (of the role
# "assistant"), `tool_call_id` and `name` (of the role "tool").
Message = dict[str, Any]
# {"type": "function", "function": {"name", "description", "parameters": JSON schema}}
ToolSchema = dict[str, Any]


def to_schema(name: Any, description: str, parameters: Mapping[str, Any]) -> ToolSchema:
    """Return the schema of a tool; `parameters` is a JSON schema."""
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def to_call(call_id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """Return an entry of `tool_calls` of a message."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


@dataclass(frozen=True)
class ToolCall:
    """A call that the model wrote, with its arguments parsed."""

    id: str  # unique in the episode
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class MalformedCall:
    """Malformed call in a text; the model gets the reason as a tool message."""

    text: str
    reason: str


@dataclass(frozen=True)
class Turn:
    """Text that the policy wrote, without its calls, and the calls in their order."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    malformed: tuple[MalformedCall, ...] = ()
