"""Values of expressions: exact for rationals, to 60 and 120 digits for everything else.

Two constants are equal if they are equal rationals, or if their difference vanishes with the number
of digits. Expressions with variables are equal if they are at all points of a fixed sample where
both have real values. No tolerance is given: 0.333 is not 1/3, and 3.14159265 is not π.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

from rlctl.runtime.rewards.mathematics import names
from rlctl.runtime.rewards.mathematics.expressions import Node, UnreadableError

_MAX_BITS = 20_000  # of an exact number
_MAX_MAGNITUDE = 1_000_000  # of the logarithm of any number
_MAX_FACTORIAL = 1000
_MAX_ANGLE = 10**12
_MAX_NODES = 400
_DIGITS = (60, 120)
_MIN_POINTS = 3
_I = "i"
_E = "e"
_PI = "\\pi"
_INFINITY = "\\infty"
CONSTANTS = frozenset([_I, _E, _PI, _INFINITY])


class UndefinedError(Exception):
    """An expression has no value: division by zero, or no real value at this point."""


def variables(node: Node) -> frozenset[str]:
    """Return the names of symbols that are no constants."""
    return node.symbols - CONSTANTS


def equal(left: Node, right: Node) -> bool:
    """Return True if both expressions have the same value wherever both are defined."""
    return _agree([left, right], lambda values: _same(values[0], values[1]))


def proportional(left: Node, right: Node, *, positive: bool = False) -> bool:
    """Return True if one expression is a constant multiple of the other, and not 0."""
    if not variables(left) or variables(left) != variables(right):
        return False
    ratios: list[tuple[Any, Any]] = []

    def agree(values: Sequence[Any]) -> bool:
        first = values[0]
        second = values[1]
        if _same(first, 0) or _same(second, 0):
            return _same(first, 0) and _same(second, 0)
        if positive and (_sign(first) != _sign(second)):
            return False
        ratios.append((first, second))
        return _same(first * ratios[0][1], second * ratios[0][0])

    return _agree([left, right], agree) and bool(ratios)


def constant(node: Node) -> Fraction | float | None:
    """Return the value of a real constant, exact if it is rational, or None."""
    if variables(node):
        return None
    try:
        value = _evaluate(node, {}, 30)
        if isinstance(value, Fraction):
            return value
        return float(value.real) if abs(value.imag) < 1e-25 else None
    except (UndefinedError, UnreadableError, OverflowError, ValueError):
        return None


def _agree(nodes: Sequence[Node], agree: Callable[[Sequence[Any]], bool]) -> bool:
    if sum(map(_size, nodes)) > _MAX_NODES:
        raise UnreadableError("too large")
    names = frozenset().union(*map(variables, nodes))
    if not names:
        try:
            return agree([_at_digits(node, {}) for node in nodes])
        except UndefinedError:
            return False
    found = 0
    for point in _points(tuple(sorted(names))):
        try:
            values = [_at_digits(node, point) for node in nodes]
        except UndefinedError:
            continue
        found += 1
        if not agree(values):
            return False
    return found >= _MIN_POINTS


class _Pair:
    """A number computed twice: to few and to many digits."""

    def __init__(self, few: Any, many: Any) -> None:
        self.few = few
        self.many = many

    def __mul__(self, other: Any) -> _Pair:
        factor = _pair(other)
        return _Pair(
            _work(_DIGITS[0], lambda: self.few * factor.few),
            _work(_DIGITS[1], lambda: self.many * factor.many),
        )

    __rmul__ = __mul__


def _work(digits: int, compute: Callable[[], Any]) -> Any:
    import mpmath

    with mpmath.workdps(digits + 10):
        return compute()


def _pair(value: Any) -> _Pair:
    if isinstance(value, _Pair):
        return value
    return _Pair(*(_work(digits, lambda: _inexact(value)) for digits in _DIGITS))


def _at_digits(node: Node, point: Mapping[str, Fraction]) -> Any:
    few = _evaluate(node, point, _DIGITS[0])
    if isinstance(few, Fraction | float):
        return few
    return _Pair(few, _evaluate(node, point, _DIGITS[1]))


def _same(left: Any, right: Any) -> bool:
    if not isinstance(left, _Pair) and not isinstance(right, _Pair):
        return left == right
    if isinstance(left, float) or isinstance(right, float):  # infinite
        return False
    first, second = _pair(left), _pair(right)
    few = _work(_DIGITS[0], lambda: abs(first.few - second.few))
    many = _work(_DIGITS[1], lambda: abs(first.many - second.many))
    size = max(abs(first.many), abs(second.many))
    return bool(many <= size * 10 ** -(_DIGITS[1] - 20) or many <= few * 10 ** -(_DIGITS[0] - 20))


def _sign(value: Any) -> int:
    number = value.many.real if isinstance(value, _Pair) else value
    return (number > 0) - (number < 0)


@lru_cache(maxsize=64)
def _points(names: tuple[str, ...]) -> list[dict[str, Fraction]]:
    """Return sample points: below and above 1, of both signs, large, and whole numbers."""
    rng = random.Random(0)
    ranges = [(1, 99), (1, 99), (101, 400), (101, 400), (-400, 400), (-400, 400), (-99, 99)]
    ranges += [(1000, 5000), (1000, 5000)]
    points = [{name: Fraction(rng.randint(*ends), 101) for name in names} for ends in ranges]
    whole = [rng.sample(range(2, 12 + len(names)), len(names)) for _ in range(5)]
    return points + [
        {name: Fraction(number) for name, number in zip(names, row, strict=True)} for row in whole
    ]


def _size(node: Node) -> int:
    return 1 + sum(map(_size, node.args))


def _evaluate(node: Node, point: Mapping[str, Fraction], digits: int) -> Any:
    """Return a Fraction, an infinite float, or a complex number of mpmath."""
    import mpmath

    is_real = bool(point) and _I not in node.symbols
    with mpmath.workdps(digits + 10):
        try:
            return _Evaluator(point, is_real).value(node)
        except (ZeroDivisionError, ValueError, OverflowError, TypeError) as error:
            raise UndefinedError(str(error)) from error


def _inexact(value: Any) -> Any:
    import mpmath

    if isinstance(value, Fraction):
        return mpmath.mpc(mpmath.mpf(value.numerator) / value.denominator)
    if isinstance(value, int):
        return mpmath.mpc(value)
    if isinstance(value, float):
        raise UndefinedError("infinite")
    return value


class _Evaluator:
    """Evaluation at one point. `is_real`: a value that is not real is undefined."""

    def __init__(self, point: Mapping[str, Fraction], is_real: bool) -> None:
        self.point = point
        self.is_real = is_real
        self.in_angle = False

    def value(self, node: Node) -> Any:
        if node.op == "num":
            return node.value
        if node.op == "sym":
            return self.symbol(node.name)
        if node.op == "degrees":
            angle = self.value(node.args[0])
            if not self.in_angle:
                return angle
            return _inexact(angle) * _inexact(_pi()) / 180
        if node.op in _FUNCTIONS:
            return self.function(node)
        args = [self.value(arg) for arg in node.args]
        if node.op == "neg":
            return -args[0]
        if any(isinstance(arg, float) for arg in args):
            raise UndefinedError("infinite")
        compute = getattr(self, f"_{node.op}", None)
        if compute is None:
            raise UnreadableError(f"{node.op} has no value")
        return self.checked(compute(*args))

    def checked(self, value: Any) -> Any:
        """Return the value. Raises an error if it is too large, or not real where it must be."""
        if isinstance(value, Fraction):
            if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
                return self.checked(_inexact(value))
            return value
        import mpmath

        if not mpmath.isfinite(value):
            raise UndefinedError("infinite")
        if value and abs(mpmath.mag(value)) > _MAX_MAGNITUDE:
            raise UnreadableError("too large")
        if self.is_real and abs(value.imag) > abs(value) * mpmath.mpf(10) ** -40:
            raise UndefinedError("not real")
        return value

    def symbol(self, name: str) -> Any:
        import mpmath

        if name in self.point:
            return self.point[name]
        if name == _I:
            return mpmath.mpc(0, 1)
        if name == _E:
            return mpmath.mpc(mpmath.e)
        if name == _INFINITY:
            return float("inf")
        return mpmath.mpc(_pi())

    def function(self, node: Node) -> Any:
        was_in_angle = self.in_angle
        self.in_angle = node.op in _ANGLES
        args = [self.value(arg) for arg in node.args]
        self.in_angle = was_in_angle
        numbers = [_inexact(arg) for arg in args]
        if node.op in _ANGLES | {"exp"} and abs(numbers[0]) > _MAX_ANGLE:
            raise UnreadableError("too large")
        return self.checked(_inexact(_FUNCTIONS[node.op](*numbers)))

    def _add(self, left: Any, right: Any) -> Any:
        left, right = _alike(left, right)
        return left + right

    def _mul(self, left: Any, right: Any) -> Any:
        left, right = _alike(left, right)
        return left * right

    def _div(self, left: Any, right: Any) -> Any:
        left, right = _alike(left, right)
        return left / right

    def _power(self, base: Any, exponent: Any) -> Any:
        import mpmath

        if isinstance(base, Fraction) and isinstance(exponent, Fraction):
            if exponent.denominator == 1 and _bits(base) * abs(exponent) <= _MAX_BITS:
                return base ** int(exponent)
            if base < 0 and exponent.denominator % 2 and exponent.denominator > 1:
                root = self._root(base, Fraction(exponent.denominator))
                return self._power(root, Fraction(exponent.numerator))
        base, exponent = _inexact(base), _inexact(exponent)
        if not base:
            return Fraction(0) if exponent.real > 0 else Fraction(0) ** -1
        if abs(exponent) * (abs(mpmath.log(base)) + 1) > _MAX_MAGNITUDE:
            raise UnreadableError("too large")
        return base**exponent

    def _sqrt(self, number: Any) -> Any:
        return self._root(number, Fraction(2))

    def _root(self, number: Any, degree: Any) -> Any:
        import mpmath

        if not isinstance(degree, Fraction) or degree.denominator != 1 or not 1 < degree < 1000:
            raise UndefinedError("a root without a degree")
        if isinstance(number, Fraction):
            exact = _exact_root(number, int(degree))
            if exact is not None:
                return exact
        number = _inexact(number)
        if degree % 2 and number.real < 0 and not number.imag:
            return -(mpmath.mpc(-number.real) ** (mpmath.mpf(1) / int(degree)))
        return number ** (mpmath.mpf(1) / int(degree))

    def _factorial(self, number: Any) -> Any:
        import math

        if not isinstance(number, Fraction) or number.denominator != 1 or number < 0:
            raise UndefinedError("a factorial of no whole number")
        if number > _MAX_FACTORIAL:
            raise UnreadableError("too large")
        return Fraction(math.factorial(int(number)))

    def _binom(self, top: Any, below: Any) -> Any:
        import math

        whole = all(isinstance(each, Fraction) and each.denominator == 1 for each in (top, below))
        if not whole or top < 0 or below < 0:
            raise UndefinedError("a binomial of no whole numbers")
        if top > _MAX_FACTORIAL * 10:
            raise UnreadableError("too large")
        return Fraction(math.comb(int(top), int(below)))

    def _magnitude(self, number: Any) -> Any:
        return abs(number) if isinstance(number, Fraction) else _inexact(abs(number) + 0j)

    def _floor(self, number: Any) -> Any:
        import mpmath

        if isinstance(number, Fraction):
            return Fraction(number // 1)
        return Fraction(int(mpmath.floor(_inexact(number).real)))

    def _ceil(self, number: Any) -> Any:
        return -self._floor(-number)


def _pi() -> Any:
    import mpmath

    return mpmath.mpf(mpmath.pi)


def _alike(left: Any, right: Any) -> tuple[Any, Any]:
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left, right
    return _inexact(left), _inexact(right)


def _bits(number: Fraction) -> int:
    return max(number.numerator.bit_length(), number.denominator.bit_length())


def _exact_root(number: Fraction, degree: int) -> Fraction | None:
    if number < 0 and degree % 2 == 0:
        return None
    parts = [_whole_root(abs(part), degree) for part in (number.numerator, number.denominator)]
    if parts[0] is None or parts[1] is None:
        return None
    root = Fraction(parts[0], parts[1])
    return -root if number < 0 else root


def _whole_root(number: int, degree: int) -> int | None:
    low = 0
    high = 1 << (number.bit_length() // degree + 1)
    while low < high:
        middle = (low + high) // 2
        if middle**degree < number:
            low = middle + 1
        else:
            high = middle
    return low if low**degree == number else None


def _log(number: Any, base: Any = 10) -> Any:
    import mpmath

    return mpmath.log(number) / mpmath.log(base)


def _of_mpmath(name: str) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        import mpmath

        return getattr(mpmath, name)(*args)

    return call


_ANGLES = names("sin cos tan cot sec csc sinh cosh tanh")
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: _of_mpmath(name) for name in _ANGLES | {"exp"}},
    **{f"arc{name}": _of_mpmath(f"a{name}") for name in ["sin", "cos", "tan", "cot"]},
    **{"ln": _of_mpmath("log"), "log": _log, "lg": _log},
}
