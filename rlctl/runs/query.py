"""Expression language of `rlctl runs --where`, `--sort`, `--cols` and `@best:METRIC`.

    state == "finished" and val-core/gsm8k/acc/mean@1 > 0.9 and data.train_batch_size in [128, 256]

A name is a field of the listing (`state`, `created`), a metric (with a slash: its last value) or a
config key (with dots). It may contain `.`, `/`, `-` and `@`; a name with other characters is quoted
with backticks. `best(METRIC)`, `first`, `min` and `max` select other values of a metric;
`like(NAME, "ppo-*")` matches a pattern. Python's parser reads the text, and only the nodes listed
here are evaluated. A missing value is null; ordering comparisons with null are false.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rlctl.errors import Problem, UsageError

_DEEPEST = 100  # levels of an expression: evaluation is recursive
ASPECTS = ("last", "first", "best", "min", "max")
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_KEYWORDS = {"and", "or", "not", "in"}
_TOKEN = re.compile(
    r"""(?P<text>'[^']*'|"[^"]*")|`(?P<quoted>[^`"]*)`"""
    r"""|(?P<number>\d[\w.]*(?:(?<=[eE])[+-]\d+)?)|(?P<name>[^\W\d]\w*(?:[./@-]+\w+)*)"""
)
_COMPARE: dict[type[ast.cmpop], tuple[str, Callable[[Any, Any], bool]]] = {
    ast.Eq: ("==", operator.eq),
    ast.NotEq: ("!=", operator.ne),
    ast.Lt: ("<", operator.lt),
    ast.LtE: ("<=", operator.le),
    ast.Gt: (">", operator.gt),
    ast.GtE: (">=", operator.ge),
    ast.In: ("in", lambda a, b: a in b),
    ast.NotIn: ("not in", lambda a, b: a not in b),
}
_HINT = (
    """example: state == "finished" and best(critic/score/mean) > 0.9; see `rlctl runs --help`"""
)


@dataclass(frozen=True)
class Term:
    """Field, config key or metric `name`, with its `aspect`; `at` is the text position."""

    name: str
    aspect: str = "last"
    at: int = field(default=0, compare=False)

    @property
    def is_metric(self) -> bool:
        """True for a metric."""
        return "/" in self.name


Values = Callable[[Term], Any]


class Query:
    """Parsed expression; `terms` are the names in it, `evaluate` returns its value for `Values`.

    Raises UsageError that points at the position of the error; `evaluate` does so for an invalid
    comparison.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.terms: list[Term] = []
        source, self._words = _masked(text)
        try:
            self._tree = ast.parse(source, mode="eval").body
        except SyntaxError as error:
            raise self._unreadable(source, error) from error
        except (ValueError, RecursionError, MemoryError) as error:
            raise self._wrong(0, "too deeply nested, or contains invalid characters") from error
        self.evaluate = self._compile(self._tree, 1)

    def term(self) -> Term:
        """Return the single term of a column or order. Raises UsageError for anything else."""
        tree = self._tree
        is_one = isinstance(tree, ast.Name) or (isinstance(tree, ast.Call) and len(tree.args) == 1)
        if len(self.terms) != 1 or not is_one:
            raise self._wrong(0, "expected one name, or an aspect such as best(METRIC)")
        return self.terms[0]

    def unknown(self, term: Term, near: str, of: str = "run") -> UsageError:
        """Return the error for a name that no `of` has."""
        kind = "field or key"
        if term.is_metric:
            kind = "metric"
        return self._wrong(term.at, f"no {of} has a {kind} {term.name!r}", near)

    def _compile(self, node: ast.expr, level: int) -> Callable[[Values], Any]:
        """Return the function that evaluates a tree, and note its terms.

        Raises UsageError for nodes outside the language.
        """
        if level > _DEEPEST:
            raise self._wrong(0, "too deeply nested")

        def compiled(*nodes: ast.expr) -> list[Callable[[Values], Any]]:
            return [self._compile(node, level + 1) for node in nodes]

        match node:
            case ast.BoolOp(op=ast.And(), values=nodes):
                parts = compiled(*nodes)
                return lambda values: all(part(values) for part in parts)
            case ast.BoolOp(values=nodes):
                parts = compiled(*nodes)
                return lambda values: any(part(values) for part in parts)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                (part,) = compiled(operand)
                return lambda values: not part(values)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                (part,) = compiled(operand)
                return lambda values: self._negative(node, part(values))
            case ast.Compare(ops=ops) if all(type(op) in _COMPARE for op in ops):
                parts = compiled(node.left, *node.comparators)
                return lambda values: self._compare(node, [part(values) for part in parts])
            case ast.List(elts=items) | ast.Tuple(elts=items):
                parts = compiled(*items)
                return lambda values: [part(values) for part in parts]
            case ast.Constant(value=int() | float() as number):
                return lambda _: number
            case ast.Constant() if (text := self._text(node)) is not None:
                return lambda _: text
            case ast.Name():
                return self._name(node)
            case ast.Call(func=ast.Name() as function, args=[ast.Name() as name], keywords=[]) if (
                self._words[function.col_offset] in ASPECTS
            ):
                return self._aspect(name, self._words[function.col_offset])
            case ast.Call(func=ast.Name() as function, args=[value, pattern], keywords=[]) if (
                self._words[function.col_offset] == "like"
                and (text := self._text(pattern)) is not None
            ):
                (part,) = compiled(value)
                return lambda values: fnmatch.fnmatchcase(str(part(values)), text)
        raise self._wrong(node.col_offset, "this is not part of the language")

    def _text(self, node: ast.expr) -> str | None:
        """Return the string at a node; None for another node, or several strings in a row."""
        word = self._words.get(node.col_offset)
        if word is None or not isinstance(node, ast.Constant):
            return None
        if node.end_col_offset != node.col_offset + len(word) + 2:
            return None
        return word

    def _name(self, node: ast.Name, aspect: str = "last") -> Callable[[Values], Any]:
        name = self._words[node.col_offset]
        if name in _WORDS:
            return lambda _: _WORDS[name]
        term = Term(name, aspect, node.col_offset)
        if term not in self.terms:
            self.terms.append(term)
        return lambda values: values(term)

    def _aspect(self, node: ast.Name, aspect: str) -> Callable[[Values], Any]:
        if "/" not in self._words[node.col_offset]:
            message = f"{aspect}(…) expects a metric, such as critic/score/mean"
            raise self._wrong(node.col_offset, message)
        return self._name(node, aspect)

    def _negative(self, node: ast.expr, value: Any) -> Any:
        if not isinstance(value, int | float | None):
            raise self._wrong(node.col_offset, f"{value!r} has no negative")
        if value is None:
            return None
        return -value

    def _compare(self, node: ast.Compare, sides: list[Any]) -> bool:
        for op, a, b in zip(node.ops, sides, sides[1:], strict=False):
            sign, holds = _COMPARE[type(op)]
            if sign not in ("==", "!=") and (b is None or (a is None and "in" not in sign)):
                return False
            try:
                if not holds(a, b):
                    return False
            except TypeError:
                message = f"{a!r} {sign} {b!r} cannot be compared"
                raise self._wrong(node.col_offset, message) from None
        return True

    def _unreadable(self, source: str, error: SyntaxError) -> UsageError:
        """Return the error for a syntax error, at its position or the end of the text."""
        if not source.strip():
            return self._wrong(0, "the expression is empty")
        if lone := re.search(r"(?<![=!<>])=(?!=)", source):
            return self._wrong(lone.start(), "`=` sets a value, `==` compares")
        at = len(source)
        if error.offset:
            at = min(error.offset - 1, at)
        return self._wrong(at, error.msg)

    def _wrong(self, at: int, message: str, hint: str = _HINT) -> UsageError:
        return UsageError(Problem(message, where=f"{self.text}\n      {' ' * at}^", hint=hint))


def _masked(text: str) -> tuple[str, dict[int, str]]:
    """Return an ASCII text of the same length whose names and strings are underscores.

    Python's columns are then positions in `text`. The words are returned by position.
    """
    words: dict[int, str] = {}

    def mask(match: re.Match[str]) -> str:
        piece = match.group()
        if match["number"] or piece in _KEYWORDS:
            return piece
        words[match.start()] = match["name"] or piece[1:-1]
        if match["text"]:
            return f"'{'_' * (len(piece) - 2)}'"
        return "_" * len(piece)

    source = re.sub(r"\s", " ", _TOKEN.sub(mask, text))
    return re.sub(r"[^\x00-\x7f]", "?", source), words
