"""Replies of OpenAI's chat completions."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlctl.runtime.agents.environments.protocol import Message, Turn, to_call


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
        return "tool_calls" if self.turn.calls and self.finish == "stop" else self.finish

    def choice(self, index: int) -> dict[str, Any]:
        """Return the turn as one of the choices of a response."""
        return {
            "index": index,
            "message": {**self.message, "refusal": None},
            "logprobs": self._logprobs,
            "finish_reason": self.finish_reason,
            **({"token_ids": self.ids[1]} if self.ids else {}),
        }

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
        return {"content": tokens, "refusal": None} if tokens else None


def completion(replies: Sequence[ChatReply], model: str) -> dict[str, Any]:
    """Return the body of the response with the turns `replies`, one or more."""
    choices = [reply.choice(index) for index, reply in enumerate(replies)]
    head = head_of(replies, model, "chat.completion")
    ids = replies[0].ids
    prompt = {"prompt_token_ids": ids[0]} if ids else {}
    return {**head, "choices": choices, "usage": usage_of(replies), **prompt}


def chunks(
    replies: Sequence[ChatReply], model: str, include_usage: bool
) -> Iterator[dict[str, Any]]:
    """Yield the chunks of a stream, turn by turn, and the usage if wanted."""
    head = head_of(replies, model, "chat.completion.chunk")
    for index, reply in enumerate(replies):
        for choice in reply.deltas(index):
            yield {**head, "choices": [choice]}
    if include_usage:
        yield {**head, "choices": [], "usage": usage_of(replies)}


def head_of(replies: Sequence[ChatReply], model: str, kind: str) -> dict[str, Any]:
    """Return the first fields of a body or a chunk."""
    number = f"{'chatcmpl' if kind.startswith('chat') else 'cmpl'}-{replies[0].number}"
    return {"id": number, "object": kind, "created": int(time.time()), "model": model}


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
