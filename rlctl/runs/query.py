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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlctl.errors import Problem, UsageError
from rlctl.monitoring.run_summary import lower_is_better
from rlctl.runs.digests import SERIES

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

    def value_in(self, series: Sequence[float] | None) -> float | None:
        """Return the value of this aspect in a metric's `series` of `metrics_digest`."""
        if series is None:
            return None
        best = "min" if lower_is_better(self.name) else "max"
        return series[SERIES.index(best if self.aspect == "best" else self.aspect)]


Values = Mapping[Term, Any]


@dataclass(frozen=True)
class Query:
    """Parsed expression and the `terms` that it needs."""

    text: str
    tree: ast.expr
    places: tuple[int, ...]  # position in `text` of every character that Python parsed
    names: Mapping[str, str]
    terms: tuple[Term, ...]

    @classmethod
    def parse(cls, text: str) -> Query:
        """Parse an expression. Raises UsageError that points at the position of the error."""
        source, places, names = _python(text)
        try:
            tree = ast.parse(source, mode="eval").body
        except SyntaxError as error:
            raise _unreadable(text, source, places, error) from error
        except (ValueError, RecursionError, MemoryError) as error:
            raise _wrong(text, 0, "too deeply nested, or contains invalid characters") from error
        if _depth(tree) > _DEEPEST:
            raise _wrong(text, 0, "too deeply nested")
        query = cls(text, tree, tuple(places), names, ())
        return replace(query, terms=tuple(dict.fromkeys(query._terms(tree))))

    def value(self, values: Values) -> Any:
        """Evaluate the expression for `values`. Raises UsageError for an invalid comparison."""
        return self._value(self.tree, values)

    def term(self) -> Term:
        """Return the single term of a column or order. Raises UsageError for anything else."""
        if len(self.terms) != 1 or not isinstance(self.tree, ast.Name | ast.Call):
            raise _wrong(self.text, 0, "expected one name, or an aspect such as best(METRIC)")
        return self.terms[0]

    def unknown(self, term: Term, near: str) -> UsageError:
        """Return the error for an unknown name."""
        return _wrong(
            self.text,
            term.at,
            f"no run has a {'metric' if term.is_metric else 'field or key'} {term.name!r}",
            near,
        )

    def _at(self, node: ast.expr) -> int:
        return self.places[min(node.col_offset, len(self.places) - 1)]

    def _terms(self, node: ast.expr) -> list[Term]:
        """Return the terms of a tree. Raises UsageError for nodes outside the language."""
        match node:
            case ast.BoolOp(values=values):
                return [term for value in values for term in self._terms(value)]
            case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
                return self._terms(operand)
            case ast.Compare(left=left, ops=ops, comparators=others) if all(
                type(op) in _COMPARE for op in ops
            ):
                return [term for side in (left, *others) for term in self._terms(side)]
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [term for item in items for term in self._terms(item)]
            case ast.Constant(value=str() | int() | float()):
                return []
            case ast.Name():
                term = self._term(node, "last")
                return [term] if term else []
            case ast.Call(func=ast.Name(id=function), args=[ast.Name() as name], keywords=[]) if (
                self.names.get(function) in ASPECTS
            ):
                term = self._term(name, self.names[function])
                if term and term.is_metric:
                    return [term]
                raise _wrong(
                    self.text,
                    self._at(name),
                    f"{self.names[function]}(…) expects a metric, such as critic/score/mean",
                )
            case ast.Call(
                func=ast.Name(id=function), args=[text, ast.Constant(value=str())], keywords=[]
            ) if self.names.get(function) == "like":
                return self._terms(text)
        raise _wrong(self.text, self._at(node), "this is not part of the language")

    def _term(self, node: ast.Name, aspect: str) -> Term | None:
        name = self.names[node.id]
        return None if name in _WORDS else Term(name, aspect, self._at(node))

    def _value(self, node: ast.expr, values: Values) -> Any:
        match node:
            case ast.BoolOp(op=op, values=parts):
                return (all if isinstance(op, ast.And) else any)(
                    self._value(part, values) for part in parts
                )
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not self._value(operand, values)
            case ast.UnaryOp(operand=operand):
                value = self._value(operand, values)
                if not isinstance(value, int | float | None):
                    raise _wrong(self.text, self._at(node), f"{value!r} has no negative")
                return None if value is None else -value
            case ast.Compare(left=left, ops=ops, comparators=others):
                sides = [self._value(side, values) for side in (left, *others)]
                return all(
                    self._compare(node, op, a, b)
                    for op, a, b in zip(ops, sides, sides[1:], strict=False)
                )
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return [self._value(item, values) for item in items]
            case ast.Call(args=[text, ast.Constant(value=str() as pattern)]):
                return fnmatch.fnmatchcase(str(self._value(text, values)), pattern)
            case ast.Call() | ast.Name():
                (term,) = self._terms(node) or [None]
                return values[term] if term else _WORDS[self.names[node.id]]  # type: ignore[union-attr]
            case ast.Constant(value=value):
                return value
        raise AssertionError(ast.dump(node))  # `parse` lets nothing else through

    def _compare(self, node: ast.expr, op: ast.cmpop, a: Any, b: Any) -> bool:
        sign, apply = _COMPARE[type(op)]
        if sign not in ("==", "!=") and (b is None or (a is None and "in" not in sign)):
            return False
        try:
            return apply(a, b)
        except TypeError:
            raise _wrong(
                self.text, self._at(node), f"{a!r} {sign} {b!r} cannot be compared"
            ) from None


def _depth(tree: ast.AST) -> int:
    """Return the number of levels of a tree."""
    level, depth = [tree], 0
    while level:
        level, depth = [child for node in level for child in ast.iter_child_nodes(node)], depth + 1
    return depth


def _python(text: str) -> tuple[str, list[int], dict[str, str]]:
    """Replace each name by a Python identifier.

    Returns the source, the position in `text` of each of its characters, and the name of each
    identifier. Non-ASCII characters of strings are escaped so that Python's columns count
    characters.
    """
    source, places, names, end = "", [], {}, 0
    for match in _TOKEN.finditer(text):
        piece = match.group()
        name = match["name"] if match["name"] not in _KEYWORDS else None
        if match["quoted"] is not None or name is not None:
            piece = f"_{len(names)}"
            names[piece] = match["quoted"] if match["quoted"] is not None else match["name"]
        elif match["text"] is not None:
            piece = repr(match["text"][1:-1]).encode("ascii", "backslashreplace").decode()
        source += text[end : match.start()] + piece
        places += [*range(end, match.start()), *[match.start()] * len(piece)]
        end = match.end()
    return source + text[end:], [*places, *range(end, len(text)), len(text)], names


def _unreadable(text: str, source: str, places: Sequence[int], error: SyntaxError) -> UsageError:
    """Return a UsageError for a syntax error, at its position or the end of the text."""
    if not text.strip():
        return _wrong(text, 0, "the expression is empty")
    if lone := re.search(r"(?<![=!<>])=(?!=)", source):
        return _wrong(text, places[lone.start()], "`=` sets a value, `==` compares")
    return _wrong(
        text, places[min(error.offset - 1, len(source)) if error.offset else len(source)], error.msg
    )


def _wrong(text: str, at: int, message: str, hint: str = _HINT) -> UsageError:
    return UsageError(Problem(message, where=f"{text}\n      {' ' * at}^", hint=hint))
