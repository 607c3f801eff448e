"""Conversations of an agent program, each a training row, and the one that a request continues."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from rlctl.plugins.agents.template_check import TOOL
from rlctl.plugins.agents.tokens import Tokens
from rlctl.runtime.rollout.requests import Completion
from rlctl.runtime.serving.chat import Message, ToolSchema, Turn
from rlctl.runtime.serving.chat_request import ChatRequest


@dataclass
class Conversation:
    """One training row: a conversation, or a text, that has only grown."""

    tokens: Tokens
    messages: list[Message]  # the last turn included; none for a text
    tools: list[ToolSchema]
    turn: Turn = field(default_factory=lambda: Turn(""))  # the last
    completion: Completion | None = None  # of the last turn
    num_turns: int = 0
    is_busy: bool = False  # its next turn is being generated

    @property
    def ids(self) -> list[int]:
        """All tokens so far."""
        return self.tokens.prompt_ids + self.tokens.response_ids


def continued(
    conversations: Sequence[Conversation],
    request: ChatRequest,
    ids: Sequence[int] | None,
    kept_roles: Collection[str],
    stop_token_ids: Collection[int],
) -> Conversation | None:
    """Return the longest conversation that the request extends, or None.

    `ids` are those of a text: it extends what it begins with. Messages extend a conversation if
    the template keeps the tokens before theirs, and the last turn has ended.
    """

    def extends(old: Conversation, last: Completion) -> bool:
        if ids is not None:
            return not old.messages and old.ids == [*ids[: len(old.ids)]]
        fresh = request.messages[len(old.messages) :]
        return (
            bool(old.messages)
            and int(last.response_ids[-1]) in stop_token_ids
            and old.tools == request.tools
            and old.messages == request.messages[: len(old.messages)]
            and bool(fresh)
            and all(message["role"] in kept_roles for message in fresh)
            and (not old.tools or TOOL in kept_roles)
        )

    found = [
        old
        for old in conversations
        if not old.is_busy and old.completion is not None and extends(old, old.completion)
    ]
    return max(found, key=lambda old: len(old.ids), default=None)


def stopped(
    completion: Completion,
    texts: tuple[str, ...],
    stop_token_ids: Collection[int],
    decode: Callable[[list[int]], str],
) -> tuple[Completion, str | None]:
    """Return a turn without the tokens after the first of the stop `texts`, and that text.

    What remains is what an engine samples that stops there.
    """
    ids = completion.response_ids.tolist()
    if ids[-1] in stop_token_ids:
        del ids[-1]

    def found(num_tokens: int) -> list[tuple[int, str]]:
        written = decode(ids[:num_tokens])
        return [(written.find(text), text) for text in texts if text in written]

    if not texts or not found(len(ids)):
        return completion, None
    lengths = range(len(ids))
    length = bisect_left(lengths, True, key=lambda length: bool(found(length)))
    return completion.shortened(length), min(found(length))[1]
