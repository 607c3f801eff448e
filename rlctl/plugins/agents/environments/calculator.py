"""Tool that evaluates arithmetic exactly: numbers and operators only, never as Python code."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

_MAX_LENGTH = 1000  # characters of an expression
_MAX_BITS = 10_000  # of the numerator and denominator of each result
_MAX_EXPONENT = 1000  # of a number as it is written
_MAX_DIGITS = 12  # of a decimal that is not exact

_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, such as "12 * (3 + 4)".
    """
    return calculate(expression)


def calculate(expression: str) -> str:
    """Return the value of `expression` as text, exact for integers and short decimals.

    Raises ValueError for anything but arithmetic, and for numbers that are too large.
    """
    text = expression.strip()
    if len(text) > _MAX_LENGTH:
        raise ValueError(f"the expression has more than {_MAX_LENGTH} characters")
    text = text.replace("×", "*").replace("÷", "/").replace("−", "-").replace("^", "**")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"no arithmetic expression: {expression!r}") from error
    try:
        return _text(_value(tree.body, text))
    except ZeroDivisionError:
        raise ValueError("division by zero") from None


def _value(node: ast.expr, source: str) -> Fraction:
    """Return the value of a node as a fraction."""
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int() | float() as value):
            written = (ast.get_source_segment(source, node) or str(value)).lower()
            exponent = written.partition("e")[2]
            if exponent and abs(int(exponent)) > _MAX_EXPONENT:
                raise ValueError(f"the number {written} is too large or too small")
            return _bounded(Fraction(written))  # 0.1 is a tenth
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, source)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, source)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left, source), _value(right, source))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            result = _BINARY[type(op)](_value(left, source), _value(right, source))
            return _bounded(Fraction(result))
    raise ValueError(f"only numbers and + - * / // % ** are allowed, not {ast.unparse(node)!r}")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        return Fraction(_finite_float(base, exponent))
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits * abs(exponent.numerator) > _MAX_BITS and abs(base) not in (0, 1):
        raise ValueError("the result is too large")
    return base**exponent.numerator


def _finite_float(base: Fraction, exponent: Fraction) -> float:
    try:
        result = float(base) ** float(exponent)
    except OverflowError:
        raise ValueError("the result is too large") from None
    if isinstance(result, complex):
        raise ValueError("the root of a negative number is not real")
    return result


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
        raise ValueError("the result is too large")
    return value


def _text(value: Fraction) -> str:
    """Return an integer, or a decimal without trailing zeros. Raises ValueError if too large."""
    if value.denominator == 1:
        return str(value.numerator)
    try:
        return f"{float(value):.{_MAX_DIGITS}g}"
    except OverflowError:
        raise ValueError("the result is too large") from None
