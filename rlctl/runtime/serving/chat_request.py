"""Requests and errors of OpenAI's chat completions."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rlctl.log import warn_once
from rlctl.runtime.serving.chat import Message, ToolSchema, to_call

MODEL = "policy"

_ROLES = ("system", "user", "assistant", "tool")
# Parameters without which a program would not get what it asks for, and their harmless values.
_REFUSED: dict[str, tuple[object, ...]] = {
    "response_format": ({"type": "text"},),
    "functions": ([],),
    "function_call": ("auto",),
    **{"echo": (False,), "suffix": ("",), "best_of": (1,)},
}
_FORCED = (
    "to force a form changes the distribution that tokens are sampled from, and training needs the "
    "log-probs of the policy's own"
)
_REASONS = {
    "response_format": _FORCED,
    "functions": "use tools",
    "function_call": "use tool_choice",
}
# Parameters that `ChatRequest` has. All others are ignored: those of sampling would change the
# distribution of the responses, which is the run's.
_USED = (
    *("model", "messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stop"),
    *("stream", "stream_options", "n", "logprobs", "top_logprobs", "return_token_ids"),
)
_MOST_TOP = 20  # log-probs of a token, as in OpenAI's API and vLLM
_CHOICES = ("auto", "none", "required")  # of tools


def new_key() -> str:
    """Return a random API key."""
    return f"rlctl-{secrets.token_urlsafe(24)}"


class ApiError(Exception):
    """Error that a request gets, in OpenAI's form."""

    def __init__(
        self, status: int, text: str, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        """Return the body of the response."""
        kind = "server_error"
        if self.status < 500:
            kind = "invalid_request_error"
        return {
            "error": {"message": self.text, "type": kind, "param": self.param, "code": self.code}
        }


@dataclass(frozen=True)
class ChatRequest:
    """A conversation, or a text, to continue."""

    messages: list[Message]  # see `normalized`; none if there is a `prompt`
    tools: list[ToolSchema]
    max_tokens: int | None
    stop: tuple[str, ...] = ()  # texts that end the turn and are not part of it
    may_call: bool = True  # False: what looks like a call is text
    model: str = MODEL
    stream: bool = False
    include_usage: bool = False  # at the end of a stream
    n: int = 1  # turns, each the continuation of a separate conversation
    logprobs: bool = False  # of the tokens of the turn
    num_top: int = 0  # log-probs of the most probable tokens in place of each token
    return_ids: bool = False  # of the prompt and of the turn
    prompt: str | tuple[int, ...] | None = None  # of a completion: a text, or its token ids

    @classmethod
    def parse(cls, body: Any) -> ChatRequest:
        """Read the body of a request. Raises ApiError for one that cannot be honoured."""
        if not isinstance(body, dict):
            raise ApiError(400, "the body must be a JSON object")
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise ApiError(400, "messages must be a list with a message", param="messages")
        return cls.with_options(messages, body)

    @classmethod
    def with_options(cls, messages: Sequence[Any], body: Mapping[str, Any]) -> ChatRequest:
        """Read all parameters but messages and prompt. Raises ApiError as `parse`."""
        _check_parameters(body)
        options = body.get("stream_options")
        if options is not None and not isinstance(options, Mapping):
            text = f"stream_options must be an object, not {options!r}"
            raise ApiError(400, text, param="stream_options")
        return cls(
            [normalized(message) for message in messages],
            _tools(body.get("tools") or []),
            _whole_number(body, "max_completion_tokens") or _whole_number(body, "max_tokens"),
            _stop(body.get("stop")),
            body.get("tool_choice") != "none",
            str(body.get("model") or MODEL),
            _flag(body, "stream"),
            _flag(options or {}, "include_usage"),
            _whole_number(body, "n") or 1,
            _flag(body, "logprobs"),
            _num_top(body),
            _flag(body, "return_token_ids"),
        )


def normalized(message: Any) -> Message:
    """Return the parts of a message that templates see, in one form, so that equal is equal.

    Content is a text, arguments of calls are mappings, and nothing is None. Raises ApiError for
    what cannot be a message.
    """
    if not isinstance(message, Mapping):
        raise ApiError(400, f"a message is {message!r}, not an object", param="messages")
    role = message.get("role")
    if role == "developer":
        role = "system"
    if role not in _ROLES:
        raise ApiError(400, f"a message has the unknown role {role!r}", param="messages")
    found: Message = {"role": role, "content": _text(message.get("content"))}
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise ApiError(400, "tool_calls of a message must be a list", param="messages")
        found["tool_calls"] = [_call(call) for call in calls]
    if role != "assistant":
        for key in ("tool_call_id", "name"):
            if message.get(key) is not None:
                found[key] = str(message[key])
    return found


def _text(content: Any) -> str:
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise ApiError(400, "the content of a message must be text", param="messages")
    return content or ""


def _call(call: Any) -> dict[str, Any]:
    try:
        function = call["function"]
        name = function["name"]
        arguments = function.get("arguments")
        call_id = call["id"]
    except (KeyError, TypeError, AttributeError):
        text = "a tool call needs id, function.name and function.arguments"
        raise ApiError(400, text, param="messages") from None
    if isinstance(arguments, str):
        with suppress(ValueError):  # what the program wrote itself need not be JSON
            arguments = json.loads(arguments)
    if arguments is None:
        arguments = {}
    return to_call(str(call_id), str(name), arguments)


def _tools(tools: Any) -> list[ToolSchema]:
    if not isinstance(tools, list):
        raise ApiError(400, "tools must be a list", param="tools")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            text = 'a tool must be {"type": "function", "function": {"name": …}}'
            raise ApiError(400, text, param="tools")
    return tools


def _whole_number(body: Mapping[str, Any], name: str) -> int | None:
    number = body.get(name)
    if number is None:
        return None
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        text = f"{name} must be a whole number of 1 or more, not {number!r}"
        raise ApiError(400, text, param=name)
    return number


def _num_top(body: Mapping[str, Any]) -> int:
    number = body.get("top_logprobs") or 0
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= _MOST_TOP:
        text = f"top_logprobs must be a whole number from 0 to {_MOST_TOP}, not {number!r}"
        raise ApiError(400, text, param="top_logprobs")
    if number and not body.get("logprobs"):
        raise ApiError(400, "top_logprobs needs logprobs", param="top_logprobs")
    return number


def _flag(options: Mapping[str, Any], name: str) -> bool:
    flag = options.get(name)
    if flag is not None and not isinstance(flag, bool):
        raise ApiError(400, f"{name} must be true or false, not {flag!r}", param=name)
    return bool(flag)


def _stop(stop: Any) -> tuple[str, ...]:
    texts = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ApiError(400, f"stop={stop!r} is neither a text nor a list of texts", param="stop")
    return tuple(text for text in texts if text)


def _check_parameters(body: Mapping[str, Any]) -> None:
    """Refuse parameters that cannot be honoured; warn once about each that is ignored."""
    for name, harmless in _REFUSED.items():
        value = body.get(name)
        if value is not None and value not in harmless:
            text = f"{name}={value!r} is not supported"
            if name in _REASONS:
                text += f": {_REASONS[name]}"
            raise ApiError(400, text, "unsupported_parameter", name)
    choice = body.get("tool_choice")
    if choice is not None and choice not in _CHOICES:
        text = (
            f"tool_choice={choice!r} is not supported: {_FORCED}; supported: {', '.join(_CHOICES)}"
        )
        raise ApiError(400, text, "unsupported_parameter", "tool_choice")
    ignored = [name for name in body if name not in (*_USED, *_REFUSED) and body[name] is not None]
    if choice == "required":
        ignored.append("tool_choice=required")
    for name in ignored:
        warn_once(
            f"requests of the agent program set {name}, which has no effect: responses are sampled "
            "with the settings of actor_rollout_ref.rollout, and nothing forces their form",
        )
