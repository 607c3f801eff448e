"""Tools of an episode: the protocol of their adapters, and the text that the policy gets."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self

from rlctl.data_prep.images import is_picture
from rlctl.errors import ConfigError
from rlctl.runtime.serving.chat import ToolSchema

Side = Literal["left", "middle", "right"]


@dataclass(frozen=True)
class ToolResult:
    """Result of one call. `reward` and `metrics` are what the tool also reports."""

    text: str
    reward: float | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    images: Sequence[Any] = ()  # before the text: files, paths, or images of Pillow


class ToolSession(Protocol):
    """A tool in one episode."""

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Call the tool. What it raises becomes the text of the tool message."""
        ...

    async def score(self) -> float | None:
        """Return the tool's score of the episode, None if it has none."""
        ...

    async def close(self) -> None:
        """Release what the session holds."""
        ...


class Tool(Protocol):
    """A tool of a worker process, shared by its episodes."""

    @property
    def schema(self) -> ToolSchema:
        """Name, description and parameters that the policy sees."""
        ...

    @property
    def is_lenient(self) -> bool:
        """True if the tool accepts numbers for texts, which it converts itself."""
        ...

    async def session(self, episode: EpisodeInfo) -> ToolSession:
        """Start the tool's part of an episode."""
        ...


class StatelessTool:
    """Base of tools without a state of episodes: the tool is the session of each of them."""

    is_lenient = False

    async def session(self, episode: EpisodeInfo) -> Self:
        """Return the tool itself."""
        del episode
        return self

    async def score(self) -> None:
        """Return None: the tool scores no episode."""

    async def close(self) -> None:
        """Do nothing: an episode leaves nothing behind."""


@dataclass(frozen=True)
class EpisodeInfo:
    """Facts of an episode that tools get: its ID, its prompt, and their settings of the row."""

    id: str
    messages: list[dict[str, Any]]
    tools_kwargs: dict[str, dict[str, dict[str, Any]]]


def name_of(schema: ToolSchema) -> str:
    """Return the name of a tool."""
    return schema["function"]["name"]


def argument_checker(tool: Tool) -> Callable[[Mapping[str, Any]], str | None]:
    """Return a function that returns what is wrong with the arguments of a call, or None.

    Raises ConfigError if the schema of the tool's parameters is no JSON schema.
    """
    import jsonschema
    from jsonschema import validators

    parameters = tool.schema["function"].get("parameters") or {}
    base = jsonschema.Draft202012Validator
    try:
        base.check_schema(parameters)
    except jsonschema.SchemaError as error:
        raise ConfigError(
            f"the parameters of the tool {name_of(tool.schema)!r} are no JSON schema: "
            f"{error.message}",
            where=error.json_path,
        ) from error
    types = base.TYPE_CHECKER
    if tool.is_lenient:
        types = types.redefine("string", lambda _, value: isinstance(value, str | int | float))
    validator = validators.extend(base, type_checker=types)(parameters)

    def check(arguments: Mapping[str, Any]) -> str | None:
        problems: list[str] = []
        for error in validator.iter_errors(arguments):
            place = ".".join(map(str, error.absolute_path))
            problems.append(": ".join(filter(None, [place, error.message])))
        return "; ".join(problems) or None

    return check


def accepted(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Return the `arguments` that `function` has a parameter for; all if it takes any."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def as_text(value: Any) -> str:
    """Return a text as it is, nothing for None, and JSON for other values."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    return json.dumps(value, default=str, ensure_ascii=False)


def result_of_value(value: Any) -> ToolResult:
    """Return the result of a tool that returns a text, an image of Pillow, or content parts."""
    if isinstance(value, ToolResult):
        return value
    if is_picture(value):
        return ToolResult("", images=[value])
    parts = value if isinstance(value, list) and all(isinstance(p, Mapping) for p in value) else []
    images = [part["image"] for part in parts if part.get("type") == "image"]
    if not images:
        return ToolResult(as_text(value))
    texts = [part["text"] for part in parts if part.get("type") == "text"]
    return ToolResult("".join(texts), images=images)


def truncated(text: str, limit: int, side: Side) -> str:
    """Return at most `limit` characters of `text` and a mark where the rest was.

    As in verl, `left` keeps the beginning, `right` the end, `middle` half of each.
    """
    if len(text) <= limit:
        return text
    if side == "left":
        return text[:limit] + "...(truncated)"
    if side == "right":
        return "(truncated)..." + text[len(text) - limit :]
    half = limit // 2
    return text[:half] + "...(truncated)..." + text[len(text) - half :]
