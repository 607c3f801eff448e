"""Requests and replies of OpenAI's Responses API, by way of chat completions.

The endpoint keeps no responses: each request has its whole conversation as `input`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlctl.runtime.serving.chat import Message, ToolSchema, to_call, to_schema
from rlctl.runtime.serving.chat_api import ChatReply
from rlctl.runtime.serving.chat_request import ApiError, ChatRequest

_OTHER = ("input", "instructions", "tools", "max_output_tokens", "text")  # have another form
_STORED = ("previous_response_id", "conversation", "background", "prompt")


def parse_response_request(body: Any) -> list[ChatRequest]:
    """Read the body of a request. Raises ApiError for one that cannot be honoured."""
    if not isinstance(body, dict) or not isinstance(given := body.get("input"), str | list):
        raise ApiError(400, "input must be a text or a list of items", param="input")
    for name in _STORED:
        if body.get(name):
            text = f"{name} is not supported: send the whole conversation as input"
            raise ApiError(400, text, "unsupported_parameter", name)
    if not isinstance(tools := body.get("tools") or [], list):
        raise ApiError(400, "tools must be a list", param="tools")
    items = given
    if isinstance(given, str):
        items = [{"role": "user", "content": given}]
    messages: list[Message] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    for item in items:
        _add(item, messages)
    text = body.get("text")
    request = ChatRequest.parse(
        {
            **{key: value for key, value in body.items() if key not in _OTHER},
            "messages": messages,
            "tools": [_tool(tool) for tool in tools],
            "max_tokens": body.get("max_output_tokens"),
            "response_format": text.get("format") if isinstance(text, Mapping) else None,
        }
    )
    return [replace(request, n=1)]  # the API has no other turns


def _add(item: Any, messages: list[Message]) -> None:
    """Add an item to the messages; a call belongs to the assistant's message before it."""
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    if kind == "message":
        messages.append({"role": item.get("role"), "content": item.get("content")})
    elif kind == "function_call":
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        call = to_call(item.get("call_id"), item.get("name"), item.get("arguments"))
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        result = {"tool_call_id": item.get("call_id"), "content": item.get("output")}
        messages.append({"role": "tool", **result})
    elif kind != "reasoning":
        raise ApiError(400, f"an item of the type {kind!r} is not supported", param="input")


def _tool(tool: Any) -> ToolSchema:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise ApiError(400, "a tool must be of the type function", param="tools")
    return to_schema(tool.get("name"), tool.get("description") or "", tool.get("parameters") or {})


def response_body(replies: Sequence[ChatReply], request: ChatRequest) -> dict[str, Any]:
    """Return a turn as the body of a response."""
    (reply,) = replies
    is_cut = reply.finish == "length"
    part = {"type": "output_text", "text": reply.content, "annotations": [], "logprobs": []}
    base = {"id": f"msg_{reply.number}", "status": "completed"}
    message = {**base, "type": "message", "role": "assistant", "content": [part]}
    calls = [
        {
            **{"type": "function_call", "id": f"fc_{call.id}", "status": "completed"},
            **{"call_id": call.id, "name": call.name},
            "arguments": json.dumps(call.arguments, ensure_ascii=False),
        }
        for call in reply.turn.calls
    ]
    num_tokens = reply.num_tokens
    num_prompt = reply.num_prompt_tokens
    status = "completed"
    details = None
    if is_cut:
        status = "incomplete"
        details = {"reason": "max_output_tokens"}
    output = calls
    if reply.content or not calls:
        output = [message, *calls]
    return {
        **{"id": f"resp_{reply.number}", "object": "response", "created_at": int(time.time())},
        **{"status": status, "error": None},
        "model": request.model,
        "incomplete_details": details,
        "output": output,
        **{"parallel_tool_calls": True, "tool_choice": "auto", "tools": []},
        "usage": {
            **{"input_tokens": num_prompt, "input_tokens_details": {"cached_tokens": 0}},
            **{"output_tokens": num_tokens, "output_tokens_details": {"reasoning_tokens": 0}},
            "total_tokens": num_prompt + num_tokens,
        },
    }


def response_events(replies: Sequence[ChatReply], request: ChatRequest) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream: the start, the items one by one, and the end."""
    for number, event in enumerate(_events(response_body(replies, request))):
        yield {**event, "sequence_number": number}


def _events(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {
        "type": "response.created",
        "response": {**body, "status": "in_progress", "output": [], "usage": None},
    }
    for index, item in enumerate(body["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        is_call = item["type"] == "function_call"
        empty: dict[str, Any] = {"content": []}
        if is_call:
            empty = {"arguments": ""}
        begun = {**item, **empty, "status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": index, "item": begun}
        if is_call:
            kind = "response.function_call_arguments"
            arguments = item["arguments"]
            yield {"type": f"{kind}.delta", **place, "delta": arguments}
            yield {"type": f"{kind}.done", **place, "name": item["name"], "arguments": arguments}
        else:
            [part] = item["content"]
            place = {**place, "content_index": 0}
            text = part["text"]
            nothing = {**part, "text": ""}
            yield {"type": "response.content_part.added", **place, "part": nothing}
            more = {**place, "logprobs": []}
            yield {"type": "response.output_text.delta", **more, "delta": text}
            yield {"type": "response.output_text.done", **more, "text": text}
            yield {"type": "response.content_part.done", **place, "part": part}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{body['status']}", "response": body}
