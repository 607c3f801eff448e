"""Replies of OpenAI's chat completions, and requests and replies of its completions.

A completion continues a text, or token ids.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from rlctl.runtime.serving.chat import Message, Turn, to_call
from rlctl.runtime.serving.chat_request import ApiError, ChatRequest


@dataclass(frozen=True)
class LogProb:
    """Log-prob of a token of a turn, and of the most probable ones in its place."""

    text: str
    number: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class ChatReply:
    """A turn of the policy."""

    number: int  # of the request in its episode
    content: str
    turn: Turn
    finish: str  # "stop" or "length"
    num_prompt_tokens: int
    num_tokens: int
    stop: str | None = None  # the text of `ChatRequest.stop` that ended the turn
    log_probs: tuple[LogProb, ...] = ()  # of its tokens, if they were asked for
    ids: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # of prompt and turn, likewise

    @property
    def message(self) -> Message:
        """The turn as a message."""
        message: Message = {"role": "assistant", "content": self.content or None}
        if self.turn.calls:
            message["tool_calls"] = [
                to_call(call.id, call.name, json.dumps(call.arguments, ensure_ascii=False))
                for call in self.turn.calls
            ]
        return message

    @property
    def finish_reason(self) -> str:
        """The reason in OpenAI's words."""
        if self.turn.calls and self.finish == "stop":
            return "tool_calls"
        return self.finish

    def choice(self, index: int) -> dict[str, Any]:
        """Return the turn as one of the choices of a response."""
        choice: dict[str, Any] = {
            "index": index,
            "message": {**self.message, "refusal": None},
            "logprobs": self._logprobs,
            "finish_reason": self.finish_reason,
        }
        if self.ids:
            choice["token_ids"] = self.ids[1]
        return choice

    def deltas(self, index: int) -> Iterator[dict[str, Any]]:
        """Yield the choices of a stream's chunks: role, text, calls and the end."""
        calls = self.message.get("tool_calls", [])
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        if self.content:
            deltas.append({"content": self.content})
        deltas += [{"tool_calls": [{"index": i, **call}]} for i, call in enumerate(calls)]
        for delta in deltas:
            yield {"index": index, "delta": delta, "finish_reason": None}
        end = {"delta": {}, "logprobs": self._logprobs, "finish_reason": self.finish_reason}
        yield {"index": index, **end}

    @property
    def _logprobs(self) -> dict[str, Any] | None:
        tokens = [
            {
                **_token(token.text, token.number),
                "top_logprobs": [_token(text, number) for text, number in token.top],
            }
            for token in self.log_probs
        ]
        if not tokens:
            return None
        return {"content": tokens, "refusal": None}


def completion(replies: Sequence[ChatReply], request: ChatRequest) -> dict[str, Any]:
    """Return the body of the response with the turns `replies`, one or more."""
    choices = [reply.choice(index) for index, reply in enumerate(replies)]
    head = head_of(replies, request.model, "chat.completion")
    body = {**head, "choices": choices, "usage": usage_of(replies)}
    if ids := replies[0].ids:
        body["prompt_token_ids"] = ids[0]
    return body


def chunks(replies: Sequence[ChatReply], request: ChatRequest) -> Iterator[dict[str, Any]]:
    """Yield the chunks of a stream, turn by turn, and the usage if wanted."""
    head = head_of(replies, request.model, "chat.completion.chunk")
    for index, reply in enumerate(replies):
        for choice in reply.deltas(index):
            yield {**head, "choices": [choice]}
    if request.include_usage:
        yield {**head, "choices": [], "usage": usage_of(replies)}


def head_of(replies: Sequence[ChatReply], model: str, kind: str) -> dict[str, Any]:
    """Return the first fields of a body or a chunk."""
    prefix = "chatcmpl" if kind.startswith("chat") else "cmpl"
    name = f"{prefix}-{replies[0].number}"
    return {"id": name, "object": kind, "created": int(time.time()), "model": model}


def _token(text: str, number: float) -> dict[str, Any]:
    return {"token": text, "logprob": number, "bytes": [*text.encode()]}


def usage_of(replies: Sequence[ChatReply], n: int | None = None) -> dict[str, int]:
    """Return the numbers of tokens; `n` turns, by default all, continue the same prompt."""
    num_prompt = sum(reply.num_prompt_tokens for reply in replies[:: n or len(replies)])
    num_tokens = sum(reply.num_tokens for reply in replies)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt + num_tokens,
    }


def parse_completions(body: Any) -> list[ChatRequest]:
    """Read the body of a request: one for each prompt. Raises ApiError as `ChatRequest.parse`."""
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    num_top = body.get("logprobs")
    given = {key: value for key, value in body.items() if key not in ("prompt", "tools")}
    given |= {"logprobs": num_top is not None, "top_logprobs": num_top}
    request = ChatRequest.with_options([], given)
    prompt = body.get("prompt")
    prompts = [prompt]
    if isinstance(prompt, list) and not all(map(_is_id, prompt)):
        prompts = prompt
    return [replace(request, prompt=_prompt(prompt)) for prompt in prompts]


def _is_id(part: Any) -> bool:
    return isinstance(part, int) and not isinstance(part, bool)


def _prompt(prompt: Any) -> str | tuple[int, ...]:
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(map(_is_id, prompt)):
        return tuple(prompt)
    text = "prompt must be a text, a list of token ids, or a list of these"
    raise ApiError(400, text, param="prompt")


def text_completion(replies: Sequence[ChatReply], request: ChatRequest) -> dict[str, Any]:
    """Return the body of the response with the turns `replies`, one or more."""
    choices = [_choice(reply, index) for index, reply in enumerate(replies)]
    head = head_of(replies, request.model, "text_completion")
    return {**head, "choices": choices, "usage": usage_of(replies, request.n)}


def text_chunks(replies: Sequence[ChatReply], request: ChatRequest) -> Iterator[dict[str, Any]]:
    """Yield the chunks of a stream, one for each turn, and the usage if wanted."""
    body = text_completion(replies, request)
    for choice in body["choices"]:
        yield {**body, "choices": [choice], "usage": None}
    if request.include_usage:
        yield {**body, "choices": []}


def _choice(reply: ChatReply, index: int) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": index,
        "text": reply.content,
        "logprobs": _logprobs(reply),
        "finish_reason": reply.finish,
    }
    if reply.ids:
        choice["prompt_token_ids"], choice["token_ids"] = reply.ids
    return choice


def _logprobs(reply: ChatReply) -> dict[str, Any] | None:
    tokens = reply.log_probs
    if not tokens:
        return None
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.number for token in tokens],
        "top_logprobs": [dict(token.top) for token in tokens],
        "text_offset": [*accumulate((len(token.text) for token in tokens[:-1]), initial=0)],
    }
