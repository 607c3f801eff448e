"""Requests, replies and errors of Anthropic's Messages API, by way of chat completions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlctl.runtime.serving.chat import Message, ToolSchema, to_call, to_schema
from rlctl.runtime.serving.chat_api import ChatReply
from rlctl.runtime.serving.chat_request import ApiError, ChatRequest

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {401: "authentication_error", 404: "not_found_error"}
_OTHER = ("messages", "system", "tools", "tool_choice", "stop_sequences")  # have another form
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def parse_messages(body: Any) -> list[ChatRequest]:
    """Read the body of a request. Raises ApiError for one that cannot be honoured."""
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        raise ApiError(400, "messages must be a list with a message", param="messages")
    if not isinstance(tools := body.get("tools") or [], list):
        raise ApiError(400, "tools must be a list", param="tools")
    system: list[Message] = []
    if body.get("system"):
        system.append({"role": "system", "content": body["system"]})
    request = ChatRequest.parse(
        {
            **{key: value for key, value in body.items() if key not in _OTHER},
            "messages": [
                *system,
                *(new for message in body["messages"] for new in _messages(message)),
            ],
            "tools": [_tool(tool) for tool in tools],
            "tool_choice": _tool_choice(body.get("tool_choice")),
            "stop": body.get("stop_sequences"),
        }
    )
    return [replace(request, n=1)]  # the API has no other turns


def _tool_choice(choice: Any) -> str | None:
    """Return the choice in OpenAI's form."""
    if choice is None:
        return None
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if not isinstance(kind, str) or kind not in _CHOICES:
        text = f"tool_choice={choice!r} is not supported; supported types: {', '.join(_CHOICES)}"
        raise ApiError(400, text, "unsupported_parameter", "tool_choice")
    return _CHOICES[kind]


def error_body(error: ApiError) -> dict[str, Any]:
    """Return the body of an error."""
    other = "invalid_request_error" if error.status < 500 else "api_error"
    kind = _ERRORS.get(error.status, other)
    return {"type": "error", "error": {"type": kind, "message": error.text}}


def message_body(replies: Sequence[ChatReply], request: ChatRequest) -> dict[str, Any]:
    """Return a turn as the body of a response."""
    (reply,) = replies
    blocks: list[dict[str, Any]] = []
    if reply.content:
        blocks.append({"type": "text", "text": reply.content})
    blocks += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}
        for call in reply.turn.calls
    ]
    reason = "stop_sequence" if reply.stop else _STOP_REASONS[reply.finish_reason]
    return {
        "id": f"msg_{reply.number}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": blocks,
        "stop_reason": reason,
        "stop_sequence": reply.stop,
        "usage": {"input_tokens": reply.num_prompt_tokens, "output_tokens": reply.num_tokens},
    }


def message_events(replies: Sequence[ChatReply], request: ChatRequest) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream: the start, the blocks one by one, and the end."""
    body = message_body(replies, request)
    blocks = body["content"]
    usage = body["usage"]
    begun = {
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**usage, "output_tokens": 0},
    }
    yield {"type": "message_start", "message": {**body, **begun}}
    for index, block in enumerate(blocks):
        if block["type"] == "text":
            empty = {"text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            arguments = json.dumps(block["input"], ensure_ascii=False)
            empty = {"input": {}}
            delta = {"type": "input_json_delta", "partial_json": arguments}
        yield {"type": "content_block_start", "index": index, "content_block": {**block, **empty}}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    end = {key: body[key] for key in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": end, "usage": usage}
    yield {"type": "message_stop"}


def _messages(message: Any) -> list[Message]:
    """Return the messages of chat completions for one, in which results of tools are blocks."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return [message]
    blocks: dict[str, list[Mapping[str, Any]]] = {"text": [], "tool_use": [], "tool_result": []}
    for block in content:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if not isinstance(kind, str) or kind not in blocks:
            raise ApiError(400, f"a block of the type {kind!r} is not supported", param="messages")
        blocks[kind].append(block)
    found: list[Message] = [
        {
            "role": "tool",
            "tool_call_id": result.get("tool_use_id"),
            "content": result.get("content"),
        }
        for result in blocks["tool_result"]
    ]
    if blocks["text"] or blocks["tool_use"] or not found:
        said: Message = {"role": message.get("role"), "content": blocks["text"]}
        if blocks["tool_use"]:
            said["tool_calls"] = [
                to_call(call.get("id"), call.get("name"), call.get("input"))
                for call in blocks["tool_use"]
            ]
        found.append(said)
    return found


def _tool(tool: Any) -> ToolSchema:
    if not isinstance(tool, Mapping) or "input_schema" not in tool:
        raise ApiError(400, "a tool needs name and input_schema", param="tools")
    return to_schema(tool.get("name"), tool.get("description") or "", tool["input_schema"])
