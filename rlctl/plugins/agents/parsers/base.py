"""Protocol of tool-call parsers, and the parts that several formats share.

A parser reads the text of one turn, decoded with its special tokens except the stop token. Text
that looks like a call becomes a `ToolCall` or a `MalformedCall` with a reason; none is lost. The
policy may write anything, so a parser raises no error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Protocol

from rlctl.runtime.serving.chat import MalformedCall, ToolCall, ToolSchema, Turn

# Templates of Mistral demand ids of nine letters and digits.
_CALL_ID = re.compile(r"[A-Za-z0-9]{9}")


class ToolParser(Protocol):
    """Reader of the calls in a turn. A plug-in of the group `rlctl.tool_parsers`."""

    def parse(self, text: str, tools: Sequence[ToolSchema], offset: int = 0) -> Turn:
        """Return the calls of a turn and the text around them.

        The ids are `call00000` and so on, counted from `offset`, the number of earlier calls of the
        episode.
        """
        ...


class InvalidCall(ValueError):
    """Malformed call; the message is the reason."""


class PatternParser:
    """Base of parsers of formats in which calls begin with a match of the pattern `start`.

    `closing` is the match, if there is one, that ends a call.
    """

    start: re.Pattern[str]
    closing: str | None = None

    def parse(self, text: str, tools: Sequence[ToolSchema], offset: int = 0) -> Turn:
        """Return the calls of a turn: see `ToolParser`."""
        builder = TurnBuilder(offset, tools)
        thought, code = split_thought(text)
        builder.add_text(thought)
        position = 0
        while start := self.start.search(code, position):
            builder.add_text(code[position : start.start()])
            try:
                position = self.read(builder, code, start)
            except InvalidCall as error:
                position = self.skip(code, start.end())
                builder.add_malformed(code[start.start() : position], str(error))
        builder.add_text(code[position:])
        return builder.build()

    def read(self, builder: TurnBuilder, text: str, start: re.Match[str]) -> int:
        """Add what begins with `start` and return its end; raise InvalidCall if it is malformed."""
        raise NotImplementedError

    def skip(self, text: str, position: int) -> int:
        """Return the end of a malformed call: its closing, the next call, or the text's end."""
        following = self.start.search(text, position)
        if following is None:
            return len(text)
        return following.end() if following[0] == self.closing else following.start()


class TurnBuilder:
    """Calls and remaining text of a turn, collected in the order in which they were written."""

    def __init__(self, offset: int, tools: Sequence[ToolSchema] = ()) -> None:
        self._offset = offset
        self.tools = tools
        self._texts: list[str] = []
        self._calls: list[ToolCall] = []
        self._malformed: list[MalformedCall] = []

    def add_text(self, text: str) -> None:
        """Add text that is no call."""
        self._texts.append(text)

    def add_call(self, name: Any, arguments: Any, call_id: Any = None) -> None:
        """Add a call; raise InvalidCall if its name or arguments have a wrong type.

        `arguments` is a mapping, its JSON text, or None if the call has none. A `call_id` of nine
        letters and digits is kept.
        """
        if not isinstance(name, str) or not name.strip():
            raise InvalidCall(f"the name of the tool must be a text, not {_short(name)}")
        if isinstance(arguments, str):
            arguments = load_json(arguments, "arguments")
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, dict):
            raise InvalidCall(f"the arguments must be a JSON object, not {_short(arguments)}")
        if not isinstance(call_id, str) or not _CALL_ID.fullmatch(call_id):
            call_id = f"call{self._offset + len(self._calls):05d}"
        self._calls.append(ToolCall(call_id, name.strip(), arguments))

    def add_payload(self, payload: Any) -> None:
        """Add the call that a JSON object describes; raise InvalidCall if it describes none."""
        if isinstance(payload, dict) and isinstance(payload.get("function"), dict):
            payload = {**payload, **payload["function"]}
        if not isinstance(payload, dict):
            raise InvalidCall(f"a call must be a JSON object, not {_short(payload)}")
        if "name" not in payload:
            raise InvalidCall(f'the call has no "name", its keys are {sorted(payload)}')
        arguments = payload.get("arguments", payload.get("parameters"))
        self.add_call(payload["name"], arguments, payload.get("id"))

    def add_malformed(self, text: str, reason: str) -> None:
        """Add a malformed call."""
        self._malformed.append(MalformedCall(text, reason))

    def build(self) -> Turn:
        """Return the turn. Its text is stripped if there were calls around it."""
        text = "".join(self._texts)
        if self._calls or self._malformed:
            text = text.strip()
        return Turn(text, tuple(self._calls), tuple(self._malformed))


def split_thought(text: str) -> tuple[str, str]:
    """Return the thought at the start of a turn, up to `</think>`, and the rest of the text.

    Calls in a thought are not calls. The generation prompt may have written `<think>` already, so
    the turn need not start with it. A thought that does not end is not split off.
    """
    thought, mark, rest = text.partition("</think>")
    if not mark:
        return "", text
    return thought + mark, rest


def load_json(text: str, what: str) -> Any:
    """Return the value of a JSON text; raise InvalidCall if it is not valid."""
    value, end = read_json(text, 0, what)
    if text[end:].strip():
        raise InvalidCall(f"the {what} have text after the JSON: {_short(text[end:].strip())}")
    return value


def read_json(text: str, start: int, what: str) -> tuple[Any, int]:
    """Return the JSON value at `start` of `text`, and its end; raise InvalidCall without one."""
    while start < len(text) and text[start].isspace():
        start += 1
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise InvalidCall(
            f"the {what} are not valid JSON: {error.msg} at character {error.pos - start}"
        ) from error
    except RecursionError as error:
        raise InvalidCall(f"the {what} are nested too deeply") from error
    except ValueError as error:  # NaN, or more digits than Python reads
        raise InvalidCall(f"the {what} are not valid JSON: {error}") from error
    check_json(value, what)
    return value, end


def check_json(value: Any, what: str) -> None:
    """Raise InvalidCall if `value` has a number or text that cannot be sent as JSON."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise InvalidCall(f"the {what} have an invalid unicode escape") from error
    except RecursionError as error:
        raise InvalidCall(f"the {what} are nested too deeply") from error
    except ValueError as error:  # an infinite number, or more digits than Python writes
        raise InvalidCall(f"the {what} cannot be sent as JSON: {error}") from error


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


_DECODER = json.JSONDecoder(parse_constant=_reject_constant)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
