"""Mergeable metric values.

Parts come from micro-batches and ranks of different sizes, and a mean of means would be wrong. So a
`Mean` keeps its total and count until it is reported; `merge` joins parts in any order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, Self


class Metric(Protocol):
    """Partial result whose `join` is associative and commutative, up to rounding."""

    @property
    def value(self) -> float:
        """Value to report."""
        ...

    def join(self, other: Self, /) -> Self:
        """Combine two parts."""
        ...


Metrics = dict[str, Metric]


@dataclass(frozen=True, slots=True)
class Mean:
    """Mean of `count` items with sum `total`; NaN without items."""

    total: float
    count: float = 1.0

    @property
    def value(self) -> float:
        """Return `total / count`."""
        return self.total / self.count if self.count else float("nan")

    def join(self, other: Mean, /) -> Mean:
        """Add totals and counts."""
        return Mean(self.total + other.total, self.count + other.count)


@dataclass(frozen=True, slots=True)
class Sum:
    """Sum of all items."""

    value: float

    def join(self, other: Sum, /) -> Sum:
        """Add both sums."""
        return Sum(self.value + other.value)


@dataclass(frozen=True, slots=True)
class Max:
    """Largest value."""

    value: float

    def join(self, other: Max, /) -> Max:
        """Return the larger value."""
        return Max(max(self.value, other.value))


@dataclass(frozen=True, slots=True)
class Min:
    """Smallest value."""

    value: float

    def join(self, other: Min, /) -> Min:
        """Return the smaller value."""
        return Min(min(self.value, other.value))


@dataclass(frozen=True, slots=True)
class Std:
    """Standard deviation of `count` items from their sum and their sum of squares.

    It is that of the population unless `unbiased`. NaN for fewer than two items.
    """

    count: float
    total: float
    squares: float
    unbiased: bool = True

    @property
    def value(self) -> float:
        """Return the square root of the variance."""
        if self.count <= 1:
            return float("nan")
        variance = max(_variance(self.count, self.total, self.squares), 0.0)
        if not self.unbiased:
            variance = variance * (self.count - 1) / self.count
        return variance**0.5

    def join(self, other: Std, /) -> Std:
        """Add counts, sums and sums of squares."""
        total = self.total + other.total
        squares = self.squares + other.squares
        return Std(self.count + other.count, total, squares, self.unbiased)


@dataclass(frozen=True, slots=True)
class EffectiveSampleSize:
    """(Σw)²/(n·Σw²) of `count` weights, a share of them, from their sum and sum of squares."""

    count: float
    total: float
    squares: float

    @property
    def value(self) -> float:
        """Return the share; 0 if all weights are 0."""
        return self.total**2 / (self.count * self.squares) if self.squares else 0.0

    def join(self, other: EffectiveSampleSize, /) -> EffectiveSampleSize:
        """Add counts, sums and sums of squares."""
        total = self.total + other.total
        squares = self.squares + other.squares
        return EffectiveSampleSize(self.count + other.count, total, squares)


@dataclass(frozen=True, slots=True)
class ExplainedVariance:
    """1 − Var(error)/(Var(target) + 1e-5) of `count` pairs, from sums and sums of squares.

    NaN for fewer than two pairs. The 1e-5, as in verl, avoids a division by zero if the target is
    constant.
    """

    count: float
    targets: float
    target_squares: float
    errors: float
    error_squares: float

    @property
    def value(self) -> float:
        """Return the explained variance; at most 1."""
        if self.count <= 1:
            return float("nan")
        target_variance = _variance(self.count, self.targets, self.target_squares)
        return 1 - _variance(self.count, self.errors, self.error_squares) / (target_variance + 1e-5)

    def join(self, other: ExplainedVariance, /) -> ExplainedVariance:
        """Add all counts and sums."""
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
    """Join the metrics of micro-batches, ranks or roles by name, in the given order."""
    joined: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            if name in joined:
                metric = joined[name].join(metric)
            joined[name] = metric
    return joined


def to_floats(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return the value to report for each metric; those without enough items are left out."""
    return {name: metric.value for name, metric in metrics.items() if _has_value(metric)}


def _has_value(metric: Metric) -> bool:
    """Return False for a mean of nothing and a variance of fewer than two items."""
    match metric:
        case Mean():
            return metric.count != 0
        case Std() | ExplainedVariance():
            return metric.count > 1
        case _:
            return True
