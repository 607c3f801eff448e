"""Requests and replies of OpenAI's completions: a text, or token ids, that the policy continues."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from rlctl.runtime.agents.programs.chat_api import ChatReply, head_of, usage_of
from rlctl.runtime.agents.programs.chat_request import ApiError, ChatRequest


def parse_completions(body: Any) -> list[ChatRequest]:
    """Read the body of a request: one for each prompt. Raises ApiError as `ChatRequest.parse`."""
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    num_top = body.get("logprobs")
    given = {key: value for key, value in body.items() if key not in ("prompt", "tools")}
    given |= {"logprobs": num_top is not None, "top_logprobs": num_top}
    request = ChatRequest.with_options([], given)
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and not all(map(_is_id, prompt))
    prompts = prompt if isinstance(prompt, list) and several else [prompt]
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
    names = ("prompt_token_ids", "token_ids")
    return {
        "index": index,
        "text": reply.content,
        "logprobs": _logprobs(reply),
        "finish_reason": reply.finish,
        **(dict(zip(names, reply.ids, strict=True)) if reply.ids else {}),
    }


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
