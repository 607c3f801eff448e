"""The little language of `rlctl runs --where`, `--sort`, `--cols` and `@best:METRIC`.

    state == "finished" and val-core/arithmetic/acc/mean@1 > 0.9 and data.train_batch_size in [128, 256]

A name is a field of the listing (`state`, `created`), a metric (with a slash: its last value) or a key of the configuration (with dots).
It goes on over `.`, `/`, `-` and `@`; one with other characters stands in back-quotes. `best(METRIC)`, `first`, `min` and `max` are other
values of a metric, `like(NAME, "ppo-*")` compares with a pattern. Python's own parser reads it; nothing is executed but the few nodes named
here. What a run does not have is null, and a comparison with null by size is false.
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

ASPECTS = ("last", "first", "best", "min", "max")
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_KEYWORDS = {"and", "or", "not", "in"}
_TOKEN = re.compile(
    r"""(?P<text>'[^']*'|"[^"]*")|`(?P<quoted>[^`"]*)`|(?P<number>\d[\w.]*(?:(?<=[eE])[+-]\d+)?)|(?P<name>[^\W\d]\w*(?:[./@-]+\w+)*)"""
)
_COMPARE: dict[type[ast.cmpop], tuple[str, Callable[[Any, Any], bool]]] = {
    ast.Eq: ("==", operator.eq), ast.NotEq: ("!=", operator.ne),
    ast.Lt: ("<", operator.lt), ast.LtE: ("<=", operator.le), ast.Gt: (">", operator.gt), ast.GtE: (">=", operator.ge),
    ast.In: ("in", lambda a, b: a in b), ast.NotIn: ("not in", lambda a, b: a not in b),
}  # fmt: skip
_HINT = """for example: state == "finished" and best(critic/score/mean) > 0.9; `rlctl runs --help` says more"""


@dataclass(frozen=True)
class Term:
    """One value of a run: the field, the configuration's key or the metric `name`; of a metric, its `aspect`; `at`, its place."""

    name: str
    aspect: str = "last"
    at: int = field(default=0, compare=False)

    @property
    def is_metric(self) -> bool:
        return "/" in self.name

    def of_course(self, course: Mapping[str, Any] | None) -> float | None:
        """The value in a metric's course, as `metrics_digest` gives it."""
        if course is None:
            return None
        return course[
            ("min" if lower_is_better(self.name) else "max")
            if self.aspect == "best"
            else self.aspect
        ]


Values = Mapping[Term, Any]


@dataclass(frozen=True)
class Query:
    """A parsed expression: the `terms` it needs, and what it says of a run's values for them."""

    text: str
    tree: ast.expr
    places: tuple[int, ...]  # of every character of what Python parsed, its place in `text`
    names: Mapping[str, str]
    terms: tuple[Term, ...]

    @classmethod
    def parse(cls, text: str) -> Query:
        """Errors: UsageError that points at the place."""
        source, places, names = _python(text)
        try:
            tree = ast.parse(source, mode="eval").body
        except SyntaxError as error:
            raise _unreadable(text, source, places, error) from error
        except (ValueError, RecursionError, MemoryError) as error:
            raise _wrong(text, 0, "this is too deep, or holds what no text may hold") from error
        query = cls(text, tree, tuple(places), names, ())
        return replace(query, terms=tuple(dict.fromkeys(query._terms(tree))))

    def value(self, values: Values) -> Any:
        """What the expression comes to for a run with `values`. Errors: UsageError for what cannot be compared."""
        return self._value(self.tree, values)

    def term(self) -> Term:
        """The one term that the text is, for a column or an order. Errors: UsageError when it is more than that."""
        if len(self.terms) != 1 or not isinstance(self.tree, ast.Name | ast.Call):
            raise _wrong(self.text, 0, "one name is wanted, or best(METRIC) and the like")
        return self.terms[0]

    def unknown(self, term: Term, near: str) -> UsageError:
        """The error for a name that nothing is called by."""
        return _wrong(
            self.text,
            term.at,
            f"no run has a {'metric' if term.is_metric else 'field or key'} {term.name!r}",
            near,
        )

    def _at(self, node: ast.expr) -> int:
        return self.places[min(node.col_offset, len(self.places) - 1)]

    def _terms(self, node: ast.expr) -> list[Term]:
        """The terms of a tree, which must hold nothing but what the language has."""
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
                    f"{self.names[function]}(…) wants a metric, such as critic/score/mean",
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
                return -self._value(operand, values)
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


def _python(text: str) -> tuple[str, list[int], dict[str, str]]:
    """The text with each name replaced by an identifier of Python, the places its characters come from, and the names of the identifiers.

    Characters beyond ASCII, which only names and texts hold, are written so that Python's columns count characters.
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
    """What Python says of the text, at the place it means; at its end where Python names none."""
    if not text.strip():
        return _wrong(text, 0, "an expression is wanted")
    if lone := re.search(r"(?<![=!<>])=(?!=)", source):
        return _wrong(text, places[lone.start()], "`=` sets a value, `==` compares")
    return _wrong(
        text, places[min(error.offset - 1, len(source)) if error.offset else len(source)], error.msg
    )


def _wrong(text: str, at: int, message: str, hint: str = _HINT) -> UsageError:
    return UsageError(Problem(message, where=f"{text}\n      {' ' * at}^", hint=hint))
