"""Statistics of groups of runs: mean, 95 % interval, and a paired test between two groups."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlctl.errors import NotFoundError, UsageError
from rlctl.plugins.console.report.seeds import NAMES
from rlctl.runs.listing import check_names, value_of
from rlctl.runs.query import Query, Term
from rlctl.runs.run import Run
from rlctl.runs.settings import read_settings
from rlctl.runs.student_t import t_quantile
from rlctl.tracking.run_summary import percent_or_number

_NODES = 200  # of the integral: exact to 12 digits for a few seeds


@dataclass(frozen=True)
class Sample:
    """Values of a metric of n runs: mean and 95 % interval of the mean (Student's t)."""

    values: Sequence[float]

    @property
    def mean(self) -> float:
        """Mean of the values."""
        return math.fsum(self.values) / len(self.values)

    @property
    def half(self) -> float | None:
        """Half of the 95 % interval; None for one value."""
        if len(self.values) < 2:
            return None
        error = float(np.std(self.values, ddof=1)) / math.sqrt(len(self.values))
        return t_quantile(len(self.values) - 1) * error

    @property
    def ends(self) -> tuple[float | None, float | None]:
        """Ends of the 95 % interval; None for one value."""
        if self.half is None:
            return None, None
        return self.mean - self.half, self.mean + self.half

    def as_json(self) -> dict[str, Any]:
        """Return the sample as plain data."""
        low, high = self.ends
        ends = {"low": low, "high": high}
        return {"n": len(self.values), "mean": self.mean, **ends, "values": list(self.values)}

    def p_value(self) -> float | None:
        """Return p of the two-sided t-test for a mean of 0; None for less than two values."""
        if len(self.values) < 2:
            return None
        deviation = float(np.std(self.values, ddof=1))
        if deviation == 0:
            return float(self.mean == 0)
        t = self.mean / (deviation / math.sqrt(len(self.values)))
        return two_sided_p(t, len(self.values) - 1)


@dataclass(frozen=True)
class Group:
    """Runs with the same `value` of the key."""

    value: Any
    runs: Sequence[Run]

    def sample(self, term: Term) -> Sample | None:
        """Return the values of a metric, None if no run has it."""
        values = [value for run in self.runs if (value := value_of(run, term)) is not None]
        return Sample(values) if values else None


@dataclass(frozen=True)
class Pairs:
    """Paired test of two groups: `differences` of the second to the first, one per pair."""

    metric: str
    groups: tuple[Any, Any]
    differences: Sample

    def as_json(self) -> dict[str, Any]:
        """Return the test as plain data."""
        test = {"groups": list(self.groups), "p": self.differences.p_value()}
        return {"metric": self.metric, **test, "difference": self.differences.as_json()}


@dataclass(frozen=True)
class GroupedRuns:
    """Runs grouped by the value of a setting or field, and the metrics that are compared."""

    key: str
    groups: Sequence[Group]
    terms: Sequence[Term]

    @classmethod
    def of(cls, runs: Sequence[Run], key: str, metrics: Sequence[str]) -> GroupedRuns:
        """Group the runs. Raises UsageError for an unknown key or metric."""
        is_expression = "`" in key or "(" in key
        query = Query(key if is_expression else f"`{key}`")
        check_names(query, runs)
        by_value: dict[str, tuple[Any, list[Run]]] = {}
        for run in runs:
            value = value_of(run, query.term())
            by_value.setdefault(repr(value), (value, []))[1].append(run)
        groups = sorted(by_value.values(), key=_order)
        names = metrics or list(dict.fromkeys(filter(None, map(_main_metric, runs))))
        if not names:
            raise NotFoundError("no run has a metric", hint="--metric NAME selects one")
        terms: list[Term] = []
        for name in names:
            metric = Query(name)
            check_names(metric, runs)
            if not (term := metric.term()).is_metric:
                raise UsageError(f"{name!r} is no metric", hint="such as best(critic/score/mean)")
            terms.append(term)
        return cls(key, [Group(value, members) for value, members in groups], terms)

    def rows(self) -> Iterator[list[str]]:
        """Yield metric, value of the key, n, mean, 95 % interval, minimum and maximum."""
        for term in self.terms:
            for group in self.groups:
                sample = group.sample(term)
                if sample is None:
                    yield [_label(term), str(group.value), "0", "-", "-", "-", "-"]
                    continue
                figures = (sample.mean, *sample.ends, min(sample.values), max(sample.values))
                mean, low, high, least, most = (
                    percent_or_number(term.name, each) for each in figures
                )
                between = "-" if sample.half is None else f"{low} to {high}"
                number = str(len(sample.values))
                yield [_label(term), str(group.value), number, mean, between, least, most]

    def pairs(self) -> list[Pairs]:
        """Return the paired tests of the two groups; empty if there are not two, or no pairs.

        Two runs are a pair if they are equal in all that varies inside of the groups: their seeds.
        """
        if len(self.groups) != 2:
            return []
        settings = [[read_settings(run.path) for run in group.runs] for group in self.groups]
        varying = sorted(
            {
                key
                for members in settings
                for key in {key for each in members for key in each} - NAMES
                if len({repr(each.get(key)) for each in members}) > 1
            }
        )
        ids = [[repr([each.get(key) for key in varying]) for each in group] for group in settings]
        if any(len(set(group)) < len(group) for group in ids):
            return []
        first, second = (
            dict(zip(names, group.runs, strict=True))
            for names, group in zip(ids, self.groups, strict=True)
        )
        tests: list[Pairs] = []
        for term in self.terms:
            values = [
                (value_of(first[name], term), value_of(second[name], term))
                for name in first
                if name in second
            ]
            known = [b - a for a, b in values if a is not None and b is not None]
            if len(known) > 1:
                names = self.groups[0].value, self.groups[1].value
                tests.append(Pairs(_label(term), names, Sample(known)))
        return tests

    def as_json(self) -> dict[str, Any]:
        """Return groups and tests as plain data."""
        groups: list[dict[str, Any]] = []
        for group in self.groups:
            samples = {_label(term): group.sample(term) for term in self.terms}
            metrics = {name: found.as_json() for name, found in samples.items() if found}
            runs = [run.key for run in group.runs]
            groups.append({"value": group.value, "runs": runs, "metrics": metrics})
        tests = [pairs.as_json() for pairs in self.pairs()]
        return {"key": self.key, "groups": groups, "paired": tests}


def two_sided_p(t: float, freedom: int) -> float:
    """Return the probability of a value of Student's t that is as far from 0 as `t`.

    With t = √ν tan θ the density is proportional to cos^(ν − 1) θ, which is integrated by the
    quadrature of Gauss and Legendre.
    """
    angle = math.atan(abs(t) / math.sqrt(freedom))
    return _integral(angle, math.pi / 2, freedom) / _integral(0.0, math.pi / 2, freedom)


def _integral(begin: float, end: float, freedom: int) -> float:
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    angles = (end - begin) / 2 * nodes + (begin + end) / 2
    return float((end - begin) / 2 * (weights * np.cos(angles) ** (freedom - 1)).sum())


def _label(term: Term) -> str:
    return term.name if term.aspect == "last" else f"{term.aspect}({term.name})"


def _main_metric(run: Run) -> str | None:
    figures = run.metrics.figures
    if figures is not None and figures.metric is not None:
        return figures.metric
    names = (name for name in run.metrics.metrics if name in ("critic/score/mean", "train/loss"))
    return next(names, None)


def _order(group: tuple[Any, Sequence[Run]]) -> tuple[bool, float, str]:
    """Return the key of an order of groups: numbers first, by size."""
    value = group[0]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return False, float(value), str(value)
    return True, 0.0, str(value)
