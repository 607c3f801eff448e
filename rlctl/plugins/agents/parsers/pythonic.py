"""Calls as a Python list: `[search(query="tides"), add(a=1, b=2)]`. The text is never evaluated."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Container
from typing import Any

from rlctl.plugins.agents.parsers.base import (
    InvalidCall,
    PatternParser,
    TurnBuilder,
    check_json,
)

_MARK = r"<\|python_(?:tag|start)\|>"
_START = re.compile(rf"(?:{_MARK}\s*)?\[\s*[A-Za-z_][\w.]*\s*\(|{_MARK}")
_CLOSING = re.compile(r"\s*<\|python_end\|>")
# Brackets, and texts with their escapes. A text that is not closed ends with its line.
_PARTS = re.compile(
    r"""[()\[\]{}]|\'\'\'.*?\'\'\'|\"\"\".*?\"\"\"|'(?:\\.|[^'\\\n])*'?|"(?:\\.|[^"\\\n])*"?""",
    re.DOTALL,
)
_CONSTANTS = {"true": True, "false": False, "null": None}


class PythonicParser(PatternParser):
    """Parser of a list of calls with keyword arguments, which are literals."""

    start = _START

    def read(self, builder: TurnBuilder, text: str, start: re.Match[str]) -> int:
        end = _end(text, start)
        try:
            _add_calls(builder, text[text.find("[", start.start(), start.end()) : end])
        except InvalidCall as error:
            builder.add_malformed(text[start.start() : end], str(error))
        closing = _CLOSING.match(text, end)
        return closing.end() if closing else end


def _end(text: str, start: re.Match[str]) -> int:
    """Return the end of the list that begins with `start`, or of the text if it is not closed."""
    if not start[0].endswith("("):  # a mark without a list
        closing = _CLOSING.search(text, start.end())
        return closing.start() if closing else len(text)
    depth = 0
    for part in _PARTS.finditer(text, text.index("[", start.start())):
        depth += (part[0] in "([{") - (part[0] in ")]}")
        if depth == 0:
            return part.end()
    return len(text)


def _add_calls(builder: TurnBuilder, code: str) -> None:
    """Add the calls of a list; raise InvalidCall if it is no list of calls."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            tree = ast.parse(code, mode="eval").body
    except SyntaxError as error:
        raise InvalidCall(f"the calls are not valid Python: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise InvalidCall(f"the calls are not valid Python: {error}") from error
    if not isinstance(tree, ast.List):
        raise InvalidCall("the calls must be a list: [name(argument=value)]")
    for node in tree.elts:
        try:
            builder.add_call(*_call(node))
        except InvalidCall as error:
            builder.add_malformed(ast.get_source_segment(code, node) or code, str(error))


def _call(node: ast.expr) -> tuple[str, dict[str, Any]]:
    """Return name and arguments of a call."""
    if not isinstance(node, ast.Call):
        raise InvalidCall("it is not a call: name(argument=value)")
    name = ast.unparse(node.func)
    if not all(part.isidentifier() for part in name.split(".")):
        raise InvalidCall(f"{name[:60]!r} is not the name of a tool")
    if node.args:
        raise InvalidCall(f"the arguments of {name} need their names: {name}(argument=value)")
    try:
        arguments: dict[str, Any] = {}
        for keyword in node.keywords:
            key = _new_key(keyword, name, arguments)
            arguments[key] = _literal(keyword.value, key)
        check_json(arguments, f"arguments of {name}")
    except RecursionError as error:
        raise InvalidCall(f"the arguments of {name} are nested too deeply") from error
    return name, arguments


def _new_key(keyword: ast.keyword, name: str, known: Container[str]) -> str:
    if keyword.arg is None:
        raise InvalidCall(f"the arguments of {name} must be written out, not given by **")
    if keyword.arg in known:
        raise InvalidCall(f"the argument {keyword.arg} of {name} is given twice")
    return keyword.arg


def _literal(node: ast.expr, key: str) -> Any:
    """Return the value of a literal that JSON can express."""
    if isinstance(node, ast.Constant) and isinstance(
        node.value, str | bool | int | float | type(None)
    ):
        return node.value
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item, key) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {
            _key(name, key): _literal(value, key)
            for name, value in zip(node.keys, node.values, strict=True)
        }
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _literal(node.operand, key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return -value if isinstance(node.op, ast.USub) else value
    raise InvalidCall(f"the argument {key} must be a literal: a text, number, list or dict")


def _key(node: ast.expr | None, key: str) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise InvalidCall(f"the keys of the argument {key} must be texts")
