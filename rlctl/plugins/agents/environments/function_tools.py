"""Functions as tools: the schema comes from the type hints and the docstring (Google style)."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from rlctl.errors import ConfigError
from rlctl.plugins.agents.environments.tool import StatelessTool, ToolResult, result_of_value
from rlctl.plugins.user_code import import_file, line_of
from rlctl.runtime.sandbox.calls import call
from rlctl.runtime.serving.chat import ToolSchema, to_schema

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "__rlctl_tool__"
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Note):\s*$")
_ARGUMENT = re.compile(r"^\*{0,2}(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")


def function_tool(
    name: str | Callable[..., Any] | None = None, *, schema: ToolSchema | None = None
) -> Any:
    """Mark a function as a tool: `@function_tool`, `@function_tool("name")` or with `schema=`."""

    def mark(function: F) -> F:
        setattr(function, _MARK, {"name": given, "schema": schema})
        return function

    given = name if isinstance(name, str) else None
    return mark(name) if callable(name) else mark


def is_marked(value: Any) -> bool:
    """Return True for a function that `function_tool` has marked."""
    return callable(value) and getattr(value, _MARK, None) is not None


class FunctionTool(StatelessTool):
    """A function, synchronous or asynchronous, as a tool."""

    def __init__(self, function: Callable[..., Any], *, skip_self: bool = False) -> None:
        """Build the schema. Raises ConfigError if the function is not documented or typed.

        `skip_self` leaves out the first parameter of a method that is not bound.
        """
        marked = getattr(function, _MARK, None) or {}
        self._function = function
        self.schema = marked.get("schema") or schema_of(
            function, marked.get("name"), skip_self=skip_self
        )

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Call the function and return its value as text and images."""
        return result_of_value(await call(self._function, **arguments))


def tools_of_file(path: str) -> list[FunctionTool]:
    """Return the marked functions of a file. Raises ConfigError if it has none."""
    module = import_file(Path(path).expanduser(), "tool")
    found = {id(value): value for value in vars(module).values() if is_marked(value)}
    if not found:
        raise ConfigError(
            "the file has no function marked with @function_tool",
            where=path,
            hint=f"from {__name__} import function_tool",
        )
    return [FunctionTool(function) for function in found.values()]


def schema_of(
    function: Callable[..., Any], name: str | None = None, *, skip_self: bool = False
) -> ToolSchema:
    """Return the schema of a function. Raises ConfigError for what the schema needs and lacks."""
    name = name or getattr(function, "__name__", type(function).__name__)
    description, documented = parse_docstring(inspect.getdoc(function) or "")
    if not description:
        raise ConfigError(
            f"the tool {name!r} has no docstring",
            where=line_of(function),
            hint='"""Say what it does.\n\nArgs:\n    city: Name of the city.\n"""',
        )
    hints = typing.get_type_hints(function)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in list(inspect.signature(function).parameters.values())[skip_self:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigError(
                f"the tool {name!r} has the parameter {str(parameter)!r}",
                where=line_of(function),
                hint="name each parameter",
            )
        if parameter.name not in hints:
            raise ConfigError(
                f"the parameter {parameter.name!r} of the tool {name!r} has no type hint",
                where=line_of(function),
                hint=f"{parameter.name}: str",
            )
        hint = TypeAdapter(hints[parameter.name])
        properties[parameter.name] = _without_titles(hint.json_schema())
        if parameter.name in documented:
            properties[parameter.name]["description"] = documented[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    return to_schema(name, description, parameters)


def parse_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the descriptions of a function and of its arguments in a Google-style docstring."""
    description: list[str] = []
    arguments: dict[str, list[str]] = {}
    section = ""
    current = ""
    for line in text.splitlines():
        if started := _SECTION.match(line):
            section = started[1]
            current = ""
        elif not section:
            description.append(line)
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            is_outer = len(line) - len(line.lstrip()) <= 4
            if is_outer and (found := _ARGUMENT.match(line.strip())):
                current = found[1]
                arguments[current] = [found[2]]
            elif current:
                arguments[current].append(line.strip())
    joined = {name: " ".join(lines).strip() for name, lines in arguments.items()}
    return "\n".join(description).strip(), joined


def _without_titles(schema: Any) -> Any:
    """Return the JSON schema of a type, without the titles that pydantic adds."""
    if isinstance(schema, dict):
        return {
            key: _without_titles(value)
            for key, value in schema.items()
            if not (key == "title" and isinstance(value, str))
        }
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    return schema
