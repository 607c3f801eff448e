"""Endpoint of agent programs: requests that cannot be honoured get errors in the API's form."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from rlctl.runtime.serving.chat import Turn
from rlctl.runtime.serving.chat_api import ChatReply
from rlctl.runtime.serving.chat_request import ChatRequest
from rlctl.runtime.serving.endpoint import Endpoint

USER = {"role": "user", "content": "2 + 3?"}
JSON = "application/json"


class Replies:
    """Session that replies to every request."""

    async def complete(self, request: ChatRequest) -> ChatReply:
        del request
        return ChatReply(1, "5", Turn("5"), "stop", 4, 1)


def send(
    path: str, body: Any, kind: str = JSON, method: str = "POST"
) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of the response."""

    async def exchange() -> tuple[int, dict[str, Any]]:
        async with Endpoint() as endpoint, aiohttp.ClientSession() as client:
            given: Any = {"data": body} if isinstance(body, bytes) else {"json": body}
            headers = {"Authorization": f"Bearer {endpoint.open(Replies())}", "Content-Type": kind}
            url = endpoint.base_url + path
            async with client.request(method, url, headers=headers, **given) as response:
                return response.status, await response.json()

    return asyncio.run(exchange())


Cases = list[tuple[dict[str, Any], str]]
CHAT: Cases = [
    ({"max_completion_tokens": 0, "max_tokens": 3}, "max_completion_tokens must be a whole"),
    ({"max_tokens": True}, "max_tokens must be a whole number of 1 or more, not True"),
    ({"stream": "false"}, "stream must be true or false, not 'false'"),
    ({"stream": True, "stream_options": "usage"}, "stream_options must be an object"),
    ({"stream_options": {"include_usage": 1}}, "include_usage must be true or false"),
    ({"functions": [{"name": "f"}]}, "use tools"),
    ({"messages": [USER, {"role": "assistant", "tool_calls": 5}]}, "tool_calls of a message"),
    ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "a whole number from 0 to 20, not 21"),
    ({"response_format": {"type": "json_object"}}, "to force a form changes the distribution"),
]
MESSAGES: Cases = [
    ({"tools": 5}, "tools must be a list"),
    ({"tool_choice": {"type": "tool", "name": "f"}}, "supported types: auto, any, none"),
    ({"tool_choice": "required"}, "supported types: auto, any, none"),
    ({"messages": [{"role": "user", "content": [{"type": ["text"]}]}]}, "['text']"),
]
RESPONSES: Cases = [
    ({"input": 3}, "input must be a text or a list of items"),
    ({"previous_response_id": "resp_1"}, "send the whole conversation as input"),
    ({"tools": [{"type": "web_search"}]}, "a tool must be of the type function"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "an item of the type"),
    ({"text": {"format": {"type": "json_object"}}}, "response_format="),
    ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice="),
    ({"max_output_tokens": 0}, "max_tokens must be a whole number"),
]
COMPLETIONS: Cases = [
    ({"prompt": None}, "prompt must be a text, a list of token ids, or a list of these"),
    ({"prompt": []}, "prompt must be"),
    ({"prompt": [[1, 2], [True]]}, "prompt must be"),
    ({"prompt": ["a", ""]}, "prompt must be"),
    ({"echo": True}, "echo=True is not supported"),
    ({"best_of": 3, "n": 2}, "best_of=3 is not supported"),
    ({"logprobs": -1}, "top_logprobs must be a whole number"),
    ({"max_tokens": 0}, "max_tokens must be a whole number"),
]
# Path, a right body, and changes with the error that each gives.
WRONG: list[tuple[str, dict[str, Any], Cases]] = [
    ("/chat/completions", {"messages": [USER]}, CHAT),
    ("/messages", {"messages": [USER]}, MESSAGES),
    ("/responses", {"input": "2 + 3?"}, RESPONSES),
    ("/completions", {"prompt": "2 + 3"}, COMPLETIONS),
]


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        pytest.param(path, right | change, text, id=f"{path} {change}")
        for path, right, wrong in WRONG
        for change, text in wrong
    ],
)
def test_wrong_parameters_are_named(path: str, body: dict[str, Any], text: str) -> None:
    status, reply = send(path, body)
    assert status == 400
    if path == "/messages":
        assert reply["type"] == "error"
    else:
        assert reply["error"]["type"] == "invalid_request_error"
    assert text in reply["error"]["message"]


@pytest.mark.parametrize("path", ["/chat/completions", "/messages", "/responses", "/completions"])
def test_a_body_in_an_unknown_charset_is_refused(path: str) -> None:
    status, body = send(path, b"{}", f"{JSON}; charset=none")
    assert (status, body["error"]["message"]) == (400, "the body is not valid JSON")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("POST", "/embeddings", 404), ("GET", "/chat/completions", 405)],
)
def test_other_paths_are_answered_with_those_that_exist(
    method: str, path: str, status: int
) -> None:
    found, body = send(path, {"input": "2 + 3?"}, method=method)
    assert found == status
    assert body["error"]["message"] == (
        f"{method} /v1{path} is not served; served: POST /v1/chat/completions, "
        "POST /v1/responses, POST /v1/completions, POST /v1/messages, GET /v1/models"
    )
