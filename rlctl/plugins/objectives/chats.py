"""Conversations in the columns of verl's SFT trainer: SFT learns the assistant's turns.

The tokens of a turn are those that the chat template writes for it at the end of the messages up to
it, after the tokens that it writes for the messages before: the model sees them when it generates
the turn. Turns share a row while the template only appends. A template that changes earlier
messages when others follow, such as one that removes thoughts, begins another row.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product, takewhile
from typing import Any, Literal

from pydantic import Field

from rlctl.data_prep.chat_records import ASSISTANT, is_chat, read_chat, shortened
from rlctl.data_prep.message_parts import PLACEHOLDER, text_of
from rlctl.data_prep.records import convert
from rlctl.data_prep.rows import PromptRow
from rlctl.data_prep.skipping import report_skipped
from rlctl.errors import ConfigError, Problem
from rlctl.plugins import Params, declare
from rlctl.runtime.data.readers import Source
from rlctl.runtime.data.tokenizer import render_prompt, stop_token_ids

LOG = logging.getLogger(__name__)

_MARK = "\ufdd0"  # a noncharacter, which no text has
_MASKS = ("loss_mask", "weight")  # names of the field of a message; `weight` is OpenAI's

Message = dict[str, Any]


class ChatsParams(Params):
    """Columns of conversations, and the turns that are learned."""

    messages_key: str = Field(default="messages", description="column of the messages")
    tools_key: str = Field(default="tools", description="column of the tools, as a list or JSON")
    enable_thinking_key: str = Field(
        default="enable_thinking",
        description="column of the template's variable enable_thinking",
    )
    enable_thinking_default: bool | None = Field(
        default=None, description="enable_thinking of rows without it; null = not set"
    )
    turns: Literal["all", "last"] = Field(
        default="all",
        description="turns of the assistant that are learned; `loss_mask` of a message comes first",
    )


@dataclass(frozen=True)
class _Conversation:
    """Messages as templates expect them; `learned` (one per message) are to be learned."""

    messages: Sequence[Message]
    learned: Sequence[bool]
    render: Callable[[Sequence[Message], bool], str]  # (messages, add_generation_prompt)

    def texts(self) -> Iterator[tuple[str, list[tuple[int, int]]]]:
        """Yield the text of each row with start and end of its learned turns."""
        text = ""
        spans = list[tuple[int, int]]()
        for number, is_learned in enumerate(self.learned):
            if not is_learned:
                continue
            before = self.render(self.messages[:number], True) if number else ""
            written = self.render(self.messages[: number + 1], False)
            pairs = zip(before, written, strict=False)
            start = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            if start == len(written):
                raise ValueError(f"the chat template writes nothing for message {number}")
            if spans and not written.startswith(text):
                yield text, spans
                spans = []
            text = written
            spans = [*spans, (start, len(written))]
        yield text, spans


@declare(Params=ChatsParams)
def chats(source: Source, params: ChatsParams) -> Iterator[PromptRow | None]:
    """Yield rows of the tokens of each conversation of a file."""
    tokenizer = source.tokenizer
    if not tokenizer.is_fast:
        raise ConfigError(
            f"the tokenizer {type(tokenizer).__name__} does not tell where its tokens are",
            hint="a model with a tokenizer.json",
        )
    stops = frozenset(stop_token_ids(tokenizer, tokenizer.name_or_path))
    num_open = 0

    def read(record: Any, index: int, path: Any) -> list[PromptRow | None]:
        nonlocal num_open
        del path
        found: list[PromptRow | None] = []
        for text, spans in _conversation(record, source, params).texts():
            ids, mask, is_open = _tokens(tokenizer, text, spans, stops)
            num_open += is_open
            found.append(source.tokens(ids, mask, f"conversation {index}"))
        return found

    skipped: list[Problem] | None = [] if source.skips else None
    hint = "data.skip_invalid=true leaves such rows out of training, and counts them"
    count = 0
    for rows in convert([source.path], read, hint, skipped):
        count += 1
        yield from rows
    report_skipped(skipped or (), count + len(skipped or ()))
    if num_open:
        LOG.warning(
            "%s: the chat template ends %d turns without a stop token: the model does not learn to "
            "end them",
            source.path,
            num_open,
        )


def _tokens(
    tokenizer: Any, text: str, spans: Sequence[tuple[int, int]], stops: frozenset[int]
) -> tuple[list[int], list[int], int]:
    """Return ids and mask of a text, and how many of its turns have no stop token.

    A turn ends with its last stop token if only spaces follow, which the model does not write.
    """
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids: list[int] = encoded["input_ids"]
    places: list[tuple[int, int]] = encoded["offset_mapping"]
    mask = [0] * len(ids)
    num_open = 0
    for start, end in spans:
        of_turn = [n for n, (first, stop) in enumerate(places) if first < end and stop > start]
        last = next((number for number in reversed(of_turn) if ids[number] in stops), None)
        if last is None or text[places[last][1] : end].strip():
            last = max(of_turn, default=-1)
            num_open += 1
        for number in of_turn:
            mask[number] = int(number <= last)
    length = len(ids) - mask[::-1].index(1) if 1 in mask else 0
    return ids[:length], mask[:length], num_open


def _conversation(record: Any, source: Source, params: ChatsParams) -> _Conversation:
    """Read a record. Raises ValueError for one that cannot be learned."""
    if not isinstance(record, dict):
        record = {}
    chat = _parsed(record.get(params.messages_key))
    if not is_chat(chat):
        raise ValueError(f"{params.messages_key!r} is {shortened(chat)}, expected a chat")
    if any("role" not in message for message in chat):
        chat = read_chat(chat, params.messages_key)
    given = [_message(message, number) for number, message in enumerate(chat)]
    read = [message for message, _ in given]
    last = max((i for i, message in enumerate(read) if message["role"] == ASSISTANT), default=-1)
    learned: list[bool] = []
    for number, (message, mask) in enumerate(given):
        if mask is None:
            mask = message["role"] == ASSISTANT and (number == last or params.turns == "all")
        learned.append(mask)
    if not any(learned):
        raise ValueError(f"{params.messages_key!r} has no turn of the assistant to learn")
    kwargs = dict(source.data.apply_chat_template_kwargs)
    thinking = record.get(params.enable_thinking_key)
    if thinking is None:
        thinking = params.enable_thinking_default
    if thinking is not None:
        kwargs["enable_thinking"] = bool(thinking)
    kwargs["tools"] = _pruned(_parsed(record.get(params.tools_key))) or None

    def render(messages: Sequence[Message], opens: bool) -> str:
        settings: dict[str, Any] = {**kwargs, "add_generation_prompt": opens}
        try:
            return render_prompt(source.tokenizer, messages, **settings)
        except ConfigError as error:
            raise ValueError(error.problems[0].message) from error

    return _Conversation(_readable(read, render), learned, render)


def _message(given: Mapping[str, Any], number: int) -> tuple[Message, bool | None]:
    """Return a message without empty fields, but with its content, and its mask."""
    message = {key: pruned for key in given if (pruned := _pruned(given[key])) is not None}
    masks = [message.pop(name, None) for name in _MASKS]
    mask = next((mask for mask in masks if mask is not None), None)
    is_assistant = message["role"] == ASSISTANT
    if mask not in (None, 0, 1) or (mask and not is_assistant):
        raise ValueError(f"loss_mask of message {number} is {mask!r}: 0, or 1 of the assistant's")
    content = text_of(message.get("content"))
    if not isinstance(content, str | None) or PLACEHOLDER in (content or ""):
        raise ValueError(f"content of message {number} is {shortened(content)}, expected a text")
    if not (message.get("tool_calls") or (content or "").strip()) and is_assistant:
        raise ValueError(f"message {number} of the assistant has neither content nor tool_calls")
    return {**message, "content": content}, None if mask is None else bool(mask)


def _readable(
    chat: Sequence[Message], render: Callable[[Sequence[Message], bool], str]
) -> Sequence[Message]:
    """Return the messages in the first form that the template reads.

    Arguments of calls are mappings, or JSON text if it would write Python; null contents stay null,
    or are "" if it would write "None".
    """
    form: Sequence[Message] = chat
    for as_text, blank in product((False, True), (False, True)):
        form = [_formed(message, as_text, "" if blank else None) for message in chat]
        marked = [_formed(message, as_text, _MARK) for message in chat]
        try:
            text = render(form, False)
            expected = render(marked, False)
        except ValueError:
            continue
        calls = [call for message in form for call in message.get("tool_calls", ())]
        arguments = [call.get("function", call).get("arguments") for call in calls]
        is_python = any(
            isinstance(each, dict) and each and repr(each) in text for each in arguments
        )
        before, mark, _ = expected.partition(_MARK)
        is_none = bool(mark) and text.startswith(f"{before}None")
        if not is_python and not is_none:
            break
    return form


def _formed(message: Message, as_text: bool, null: str | None) -> Message:
    """Return a message with `null` as its null content."""
    formed = {**message}
    if formed["content"] is None:
        formed["content"] = null
    if calls := [_call(call, as_text) for call in message.get("tool_calls", ())]:
        formed["tool_calls"] = calls
    return formed


def _call(call: Any, as_text: bool) -> Any:
    if not isinstance(call, dict):
        raise ValueError(f"a call is {shortened(call)}, expected {{name, arguments}}")
    if isinstance(call.get("function"), dict):
        return {**call, "function": _call(call["function"], as_text)}
    arguments = _parsed(call.get("arguments") or {})
    return {**call, "arguments": json.dumps(arguments) if as_text else arguments}


def _parsed(value: Any) -> Any:
    """Return the value of JSON text, and other values and texts as they are."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _pruned(value: Any) -> Any:
    """Return a value without nulls in mappings: Arrow adds the fields of other rows."""
    if isinstance(value, dict):
        return {key: _pruned(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_pruned(item) for item in value]
    return value
