"""Token ids of a prompt, and of the messages between two turns of the policy.

Ids are only ever appended: what the policy wrote is never tokenized again. The ids that follow it
come from a synthetic conversation, rendered by the chat template: a user, an assistant whose text
is a sentinel, and the new messages. The bridge is what comes after the assistant's stop token. It
is tokenized together with that token, so that no token spans the boundary. The cost depends on
the new messages, not on the length of the episode.

Text of messages cannot act as markup (`plain_text.py`). Special tokens in a message of any role are
encoded as plain text, and in results of tools also added tokens such as `<tool_call>`.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlctl.data_prep.message_parts import text_of
from rlctl.errors import ConfigError, InternalError
from rlctl.plugins.agents.plain_text import NONCHARACTERS, openings, pieces, plain
from rlctl.runtime.data.image_prompts import ImagePrompts, expanded
from rlctl.runtime.data.tokenizer import ends_with_assistant, render_prompt
from rlctl.runtime.serving.chat import Message, ToolSchema, Turn, to_call, to_schema

# A template may write it as an escape of JSON.
_SENTINEL = NONCHARACTERS[1]
_SENTINELS = re.compile(rf"{_SENTINEL}|\\u{ord(_SENTINEL):x}")
_MARKUP = re.compile(r"[^\w\s].*[^\w\s]", re.DOTALL)  # not indentation, and no word

_NUM_KEPT = 2048  # texts whose ids are kept
_LONGEST_KEPT = 8192  # characters of such a text

_TOOL = "tool"  # role of the results of calls
_USER: Message = {"role": "user", "content": "Hello."}
# Replaces the real tools: their schemas do not change the messages after a turn.
_ANY_TOOL = to_schema("tool", "A tool.", {"type": "object", "properties": {}})


@dataclass(frozen=True)
class _CallStyle:
    """Form of the calls in an assistant's message that the template accepts."""

    as_text: bool  # arguments as JSON text, not as a mapping
    several: bool  # several calls in one message


class ChatBridge:
    """Token ids of prompts and of the messages that follow a turn, by one chat template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: Sequence[int],
        template_kwargs: Mapping[str, Any] | None = None,
        images: ImagePrompts | None = None,
    ) -> None:
        """Build the bridge; `images` renders those of messages, None: they may have none."""
        self.tokenizer = tokenizer
        self._images = images
        self._kwargs = dict(template_kwargs or {})
        added = tokenizer.added_tokens_decoder
        self.stop_token_ids = frozenset(stop_token_ids)
        self.stops = tuple(added[number].content for number in stop_token_ids if number in added)
        if not self.stops:
            raise ConfigError(
                f"none of the stop tokens {sorted(stop_token_ids)} is an added token of the "
                "tokenizer, so a turn has no clear end",
                where=tokenizer.name_or_path,
                hint="set eos_token of the tokenizer to the token that ends a turn",
            )
        special = {
            token.content: number
            for number, token in added.items()
            if token.special or number in self.stop_token_ids
        }
        framed = {
            token.content: number
            for number, token in added.items()
            if _MARKUP.fullmatch(token.content)
        }
        self._special = special
        self._markup = special | framed
        self._patterns = {True: openings(self._markup), False: openings(self._special)}
        # Replies of tools repeat, and so do the prompts of a group.
        self._kept_ids = lru_cache(_NUM_KEPT)(lambda text: array("q", self._ids(text)))

    @property
    def source(self) -> str:
        """Folder or name of the tokenizer, for errors."""
        return self.tokenizer.name_or_path

    @property
    def has_images(self) -> bool:
        """True if messages may have images."""
        return self._images is not None

    @property
    def several_calls(self) -> bool:
        """True if the template has a form for several calls in one message."""
        return self._style.several

    def markup(self, role: str) -> Mapping[str, int]:
        """Return texts and ids of the tokens that are plain text in messages of `role`."""
        return self._markup if role == _TOOL else self._special

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """Return the ids of `messages`, up to the start of the policy's turn.

        Raises ConfigError if the template rejects the messages.
        """
        return self.encode(expanded(self.render(messages, tools), messages, self._images))

    def opening_ids(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """Return the ids with which an episode begins, which continues an assistant's message.

        Raises ConfigError as `prompt_ids`, and if the template cannot continue it.
        """
        if not ends_with_assistant(messages):
            return self.prompt_ids(messages, tools)
        prepared = [self._prepared(message, self._style) for message in messages]
        rendered = self._render(prepared, tools, None)
        return self.encode(expanded(rendered, messages, self._images))

    def bridge_ids(
        self,
        response_ids: Sequence[int],
        turn: Turn,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
    ) -> list[int]:
        """Return the ids between a response and the next turn of the policy.

        `response_ids` must end with a stop token; whichever it is counts as the end of the turn.
        `turn` names the calls to which messages of the role tool reply. Raises ConfigError if the
        template rejects the messages or does not end a turn with a stop token.
        """
        if not response_ids or response_ids[-1] not in self.stop_token_ids:
            raise InternalError("a bridge needs a response that ends with a stop token")
        names = {call.id: call.name for call in turn.calls}
        fresh = [_identified(message, number, names) for number, message in enumerate(messages)]
        rendered, start = self._synthetic(fresh, tools)
        end = self.end_of_turn(rendered, start) if start else None
        if end is None:
            raise ConfigError(
                "the chat template does not end an assistant's turn with a stop token",
                where=self.source,
                hint=f"the stop tokens are {', '.join(self.stops)}",
            )
        stop, *ids = self.encode(expanded(rendered[end[0] :], messages, self._images))
        if stop not in self.stop_token_ids:
            raise ConfigError(
                f"the tokenizer splits the stop token {rendered[slice(*end)]!r} in a text",
                where=self.source,
            )
        return ids

    def shares(self, messages: Sequence[Message], num_ids: int) -> list[int]:
        """Split the number of ids that `messages` have together; the last has all markup."""
        texts = [self._prepared(message, self._style)["content"] for message in messages[:-1]]
        found = [len(self.encode(text_of(text))) for text in texts]
        if not messages:
            return []
        return [*found, num_ids - sum(found)]

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        generation_prompt: bool = True,
    ) -> str:
        """Return the rendered text, with a noncharacter in each text that is not markup."""
        return self._render(
            [self._prepared(message, self._style) for message in messages], tools, generation_prompt
        )

    def is_longer(self, text: str, num_tokens: int) -> bool:
        """Return True if `text` has more than `num_tokens` tokens for sure; tokenize nothing."""
        return len(text) > num_tokens * self._longest_token

    @cached_property
    def _longest_token(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self.tokenizer.get_vocab()))

    def encode(self, rendered: str) -> list[int]:
        """Return the ids of a rendered text."""
        if len(rendered) <= _LONGEST_KEPT:
            return list(self._kept_ids(rendered))
        return self._ids(rendered)

    def _ids(self, rendered: str) -> list[int]:
        # verbose=False: the caller checks the length.
        return [
            number
            for piece in pieces(rendered)
            for number in self.tokenizer.encode(piece, add_special_tokens=False, verbose=False)
        ]

    def end_of_turn(self, rendered: str, start: int) -> tuple[int, int] | None:
        """Return start and end of the first stop token of a rendered text after `start`."""
        found = [
            (place, place + len(stop))
            for stop in self.stops
            if (place := rendered.find(stop, start)) >= 0
        ]
        return min(found, default=None)

    def _synthetic(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> tuple[str, int]:
        """Return a rendered conversation with `messages`, and the place after the sentinel.

        The sentinel is an argument of the last call, since a template may write the text of a turn
        with calls after their results; or the text, if there are no calls or no calls are written.
        """
        following = [self._prepared(message, self._style) for message in messages]
        calls = [_call(message, self._style) for message in following if message["role"] == _TOOL]
        if not self._style.several:
            calls = calls[-1:]
        given = [_ANY_TOOL] if tools else []
        assistants: list[Message] = [{"role": "assistant", "content": _SENTINEL}]
        if calls:
            assistants = [
                {"role": "assistant", "content": text, "tool_calls": calls}
                for text in ("", _SENTINEL)
            ]
        rendered = ""
        for assistant in assistants:
            rendered = self._render([_USER, assistant, *following], given)
            if written := list(_SENTINELS.finditer(rendered)):
                return rendered, written[-1].end()
        return rendered, 0

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        generation_prompt: bool | None = True,
    ) -> str:
        kwargs = dict(self._kwargs)
        if generation_prompt is not None:
            kwargs["add_generation_prompt"] = generation_prompt
        return render_prompt(self.tokenizer, messages, tools=list(tools) or None, **kwargs)

    def _prepared(self, message: Message, style: _CallStyle) -> Message:
        """Return a message as templates expect it: no None, and no markup in its texts."""
        pattern = self._patterns[message["role"] == _TOOL]
        prepared: Message = {
            key: plain(value, pattern) for key, value in message.items() if value is not None
        }
        prepared.setdefault("content", "")
        if calls := prepared.get("tool_calls"):
            prepared["tool_calls"] = [_with_arguments(call, style) for call in calls]
        return prepared

    @cached_property
    def _style(self) -> _CallStyle:
        """First form of calls that the template renders.

        Templates that write a mapping with the syntax of Python expect JSON text.
        """
        ids = ("call00000", "call00001")
        replies = [
            {"role": _TOOL, "content": "1", "tool_call_id": call_id, "name": "tool"}
            for call_id in ids
        ]
        wrong = repr({_ARGUMENT: _SENTINEL})
        for several, as_text in product((True, False), (False, True)):
            style = _CallStyle(as_text, several)
            calls = [_call(reply, style) for reply in replies]
            if not several:
                del calls[0]
            assistant = {"role": "assistant", "content": "", "tool_calls": calls}
            try:
                rendered = self._render([_USER, assistant, *replies], [_ANY_TOOL])
            except ConfigError:
                continue
            if wrong not in rendered and not (several and len(_SENTINELS.findall(rendered)) < 2):
                return style
        return _CallStyle(as_text=False, several=True)


_ARGUMENT = "value"


def _call(reply: Message, style: _CallStyle) -> dict[str, Any]:
    """Return a call to which `reply` is the result; its argument is the sentinel."""
    call = to_call(reply["tool_call_id"], reply["name"], {_ARGUMENT: _SENTINEL})
    return _with_arguments(call, style)


def _with_arguments(call: dict[str, Any], style: _CallStyle) -> dict[str, Any]:
    """Return `call` with its arguments as a mapping or as JSON text."""
    if isinstance(function := call.get("function"), dict):
        return {**call, "function": _with_arguments(function, style)}
    arguments = call.get("arguments")
    if style.as_text and not isinstance(arguments, str):
        return {**call, "arguments": json.dumps(arguments or {}, ensure_ascii=False)}
    if not style.as_text and isinstance(arguments, str):
        try:
            return {**call, "arguments": json.loads(arguments)}
        except ValueError:
            return call
    return call


def _identified(message: Message, number: int, names: Mapping[str, str]) -> Message:
    """Return a message of the role tool with the id and the name of its call."""
    if message["role"] != _TOOL:
        return message
    call_id = message.get("tool_call_id") or f"call{number:05d}"
    name = message.get("name") or names.get(call_id, "tool")
    return {**message, "tool_call_id": call_id, "name": name}
