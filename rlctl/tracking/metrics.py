"""Metrics as values that know how to be joined.

A mean of means is wrong as soon as the parts differ in size, so nothing here ever averages averages: a `Mean` carries its total and its
count until the very end. Parts come from micro-batches and ranks; `merge` joins them in any order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, Self


class Metric(Protocol):
    """A partial result. `join` is associative and commutative (up to rounding); `value` is what is reported."""

    @property
    def value(self) -> float: ...

    def join(self, other: Self, /) -> Self: ...


Metrics = dict[str, Metric]


@dataclass(frozen=True, slots=True)
class Mean:
    """`total` over `count` items; NaN when there were none."""

    total: float
    count: float = 1.0

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else float("nan")

    def join(self, other: Mean, /) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)


@dataclass(frozen=True, slots=True)
class Sum:
    """A total."""

    value: float

    def join(self, other: Sum, /) -> Sum:
        return Sum(self.value + other.value)


@dataclass(frozen=True, slots=True)
class Max:
    """The largest value seen."""

    value: float

    def join(self, other: Max, /) -> Max:
        return Max(max(self.value, other.value))


@dataclass(frozen=True, slots=True)
class Min:
    """The smallest value seen."""

    value: float

    def join(self, other: Min, /) -> Min:
        return Min(min(self.value, other.value))


@dataclass(frozen=True, slots=True)
class Std:
    """The unbiased standard deviation of `count` items, from their sum and their sum of squares; NaN for fewer than two."""

    count: float
    total: float
    squares: float

    @property
    def value(self) -> float:
        return (
            max(_variance(self.count, self.total, self.squares), 0.0) ** 0.5
            if self.count > 1
            else float("nan")
        )

    def join(self, other: Std, /) -> Std:
        return Std(self.count + other.count, self.total + other.total, self.squares + other.squares)


@dataclass(frozen=True, slots=True)
class ExplainedVariance:
    """1 − Var(error)/(Var(target) + 1e-5), from the sums and sums of squares of `count` targets and errors; NaN for fewer than two.

    1e-5 is verl's: it makes a constant target give about 0 or a large negative number, not an error.
    """

    count: float
    targets: float
    target_squares: float
    errors: float
    error_squares: float

    @property
    def value(self) -> float:
        if self.count <= 1:
            return float("nan")
        target_variance = _variance(self.count, self.targets, self.target_squares)
        return 1 - _variance(self.count, self.errors, self.error_squares) / (target_variance + 1e-5)

    def join(self, other: ExplainedVariance, /) -> ExplainedVariance:
        return ExplainedVariance(
            self.count + other.count,
            self.targets + other.targets,
            self.target_squares + other.target_squares,
            self.errors + other.errors,
            self.error_squares + other.error_squares,
        )


def _variance(count: float, total: float, squares: float) -> float:
    return (squares - total * total / count) / (count - 1)


def merge(parts: Iterable[Mapping[str, Metric]]) -> Metrics:
    """Join the metrics of several micro-batches, ranks or roles, name by name, in the order given."""
    joined: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            joined[name] = joined[name].join(metric) if name in joined else metric
    return joined


def to_floats(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """What is reported: one float a name."""
    return {name: metric.value for name, metric in metrics.items()}
