"""Metrics of a run as arrays, for files that are too long to be kept as one mapping per row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rlctl.errors import MissingExtraError
from rlctl.tracking.json_lines import OnBroken, Position, is_metrics, read_lines

_ROWS = 4096  # kept as mappings at a time

Column = NDArray[np.float64]


@dataclass(frozen=True)
class MetricTable:
    """Consecutive rows of a `metrics.jsonl`.

    `values` has a row per step and a column per metric; NaN where a row lacks the metric or has no
    finite value.
    """

    steps: NDArray[np.int64]
    names: Sequence[str]
    values: NDArray[np.float64]

    @classmethod
    def read(
        cls, path: Path, on_broken: OnBroken | None = None, position: Position | None = None
    ) -> Self:
        """Read the rows of a file, which may be missing, from `position` on; see `read_lines`."""
        rows = read_lines(path, on_broken, is_metrics, position)
        tables: list[MetricTable] = []
        while some := list(islice(rows, _ROWS)):
            tables.append(cls._from_rows(some))
        return cls.join(tables)

    @classmethod
    def _from_rows(cls, rows: Sequence[Mapping[str, Any]]) -> Self:
        names = list(dict.fromkeys(name for row in rows for name in row if name != "step"))
        values = np.array([[row.get(name) for name in names] for row in rows], np.float64)
        values[np.isinf(values)] = math.nan
        return cls(np.array([row["step"] for row in rows], np.int64), names, values)

    @classmethod
    def join(cls, tables: Sequence[MetricTable]) -> Self:
        """Return the rows of consecutive tables as one table."""
        names = list(dict.fromkeys(name for table in tables for name in table.names))
        places = {name: place for place, name in enumerate(names)}
        steps = np.concatenate([np.empty(0, np.int64), *(table.steps for table in tables)])
        values = np.full((len(steps), len(names)), np.nan)
        end = 0
        for table in tables:
            start = end
            end += len(table.steps)
            values[start:end, [places[name] for name in table.names]] = table.values
        return cls(steps, names, values)

    def to_arrow(self) -> Any:
        """Return a pyarrow.Table: `step`, and a column per metric, null where it is missing."""
        import pyarrow as pa

        columns = [pa.array(self.column(name), from_pandas=True) for name in self.names]
        return pa.table([pa.array(self.steps), *columns], ["step", *self.names])

    def to_pandas(self) -> Any:
        """Return a pandas.DataFrame: `step`, and a column per metric with NaN where it is missing.

        Raises MissingExtraError without pandas.
        """
        try:
            import pandas as pd  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            missing = "a data frame needs pandas, which is not installed"
            raise MissingExtraError(missing, hint="pip install pandas") from error

        return pd.DataFrame({"step": self.steps} | {name: self.column(name) for name in self.names})

    def column(self, name: str) -> Column:
        """Return the values of a metric, all NaN if no row has it."""
        if name not in self.names:
            return np.full(len(self.steps), np.nan)
        return self.values[:, self.names.index(name)]

    def finite_values(self, name: str) -> list[float]:
        """Return the finite values of a metric, oldest first."""
        values = self.column(name)
        return values[~np.isnan(values)].tolist()

    def figure(self, names: Sequence[str]) -> Column:
        """Return the value of the first of `names` that each row has, else NaN."""
        found = np.full(len(self.steps), np.nan)
        for name in names:
            found = np.where(np.isnan(found), self.column(name), found)
        return found
