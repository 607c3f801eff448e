"""Metrics of a run as arrays, for files that are too long to be kept as one mapping per row."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlctl.tracking.jsonl import OnBroken, Position, read_lines

_ROWS = 4096  # of a table; bounds the memory of a reader that keeps only figures
_BLOCK = 2**24  # bytes that Arrow parses at a time

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
    def join(cls, tables: Sequence[MetricTable]) -> MetricTable:
        """Return the rows of consecutive tables as one table."""
        if len(tables) == 1:
            return tables[0]
        names = list(dict.fromkeys(name for table in tables for name in table.names))
        places = {name: place for place, name in enumerate(names)}
        steps = np.concatenate([np.empty(0, np.int64), *(table.steps for table in tables)])
        values = np.full((len(steps), len(names)), np.nan)
        end = 0
        for table in tables:
            start, end = end, end + len(table.steps)
            values[start:end, [places[name] for name in table.names]] = table.values
        return cls(steps, names, values)

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

    def rows(self, names: Sequence[str]) -> Iterator[dict[str, float]]:
        """Yield `step` and the values of `names` for each row that has any of them."""
        columns = {name: self.column(name) for name in names}
        known = {name: ~np.isnan(values) for name, values in columns.items()}
        for row in np.flatnonzero(np.any([*known.values()], axis=0)):
            values = {name: float(columns[name][row]) for name in names if known[name][row]}
            yield {"step": int(self.steps[row]), **values}


def metric_tables(
    path: Path, on_broken: OnBroken | None = None, position: Position | None = None
) -> Iterator[MetricTable]:
    """Yield the rows of a `metrics.jsonl` from `position`, oldest first; nothing without a file.

    Broken lines are skipped as by `metric_rows`. Long files are parsed by Arrow on all cores, up to
    the first line that only the reader of single lines understands.
    """
    at = position or Position()
    yield from _parsed_by_arrow(path, at)
    rows = _Rows()
    for _ in read_lines(path, on_broken, rows.add, at):
        if rows.number == _ROWS:
            yield rows.table()
            rows.clear()
    if rows.number:
        yield rows.table()


def _parsed_by_arrow(path: Path, at: Position) -> Iterator[MetricTable]:
    """Yield the tables of whole blocks from `at` on, which moves with them."""
    if not path.exists() or path.stat().st_size - at.offset < _BLOCK:
        return
    with path.open("rb") as file:
        file.seek(at.offset)
        while len(block := file.read(_BLOCK)) == _BLOCK:
            block = block[: block.rfind(b"\n") + 1]
            number = block.count(b"\n")
            table = _arrow_table(block, number)
            if table is None:
                return
            at.offset += len(block)
            at.line += number
            file.seek(at.offset)
            yield table


def _arrow_table(block: bytes, number: int) -> MetricTable | None:
    """Return the table of `number` lines; None if some are not rows of plain numbers."""
    import pyarrow as pa
    from pyarrow import json

    try:
        found = json.read_json(pa.BufferReader(block))
    except pa.ArrowInvalid:
        return None
    columns = dict(zip(found.column_names, found.columns, strict=True))
    numeric = all(
        pa.types.is_int64(column.type)
        or pa.types.is_float64(column.type)
        or pa.types.is_null(column.type)
        for column in columns.values()
    )
    steps = columns.pop("step", None)
    if not numeric or steps is None or not pa.types.is_int64(steps.type) or steps.null_count:
        return None
    if len(steps) != number:  # blank lines, or several objects in one
        return None
    values = np.empty((number, len(columns)))
    for place, column in enumerate(columns.values()):
        values[:, place] = column.to_numpy()  # null becomes NaN
    values[np.isinf(values)] = np.nan
    return MetricTable(steps.to_numpy(), list(columns), values)


@dataclass
class _Block:
    """Values of the rows that have the same metrics in the same order, row after row."""

    rows: list[int] = field(default_factory=list)
    values: array[float] = field(default_factory=lambda: array("d"))


@dataclass
class _Rows:
    """Rows on their way into a table."""

    number: int = 0
    blocks: dict[tuple[str, ...], _Block] = field(default_factory=dict)

    def add(self, row: Mapping[str, Any]) -> bool:
        """Add a row; return False for one that is no row of metrics."""
        if not isinstance(row.get("step"), int):
            return False
        names = tuple(row)
        block = self.blocks.get(names) or self.blocks.setdefault(names, _Block())
        before = len(block.values)
        try:
            block.values.extend(row.values())
        except (TypeError, OverflowError):
            del block.values[before:]
            try:
                numbers = [math.nan if value is None else value for value in row.values()]
                block.values.extend(numbers)
            except (TypeError, OverflowError):
                del block.values[before:]
                return False
        block.rows.append(self.number)
        self.number += 1
        return True

    def clear(self) -> None:
        """Remove all rows."""
        self.number = 0
        self.blocks.clear()

    def table(self) -> MetricTable:
        """Return the rows as a table."""
        names = list(dict.fromkeys(name for block in self.blocks for name in block))
        places = {name: place for place, name in enumerate(names)}
        values = np.full((self.number, len(names)), np.nan)
        for block_names, block in self.blocks.items():
            if block.rows:
                columns = [places[name] for name in block_names]
                flat = np.frombuffer(block.values).reshape(-1, len(columns))
                values[np.ix_(block.rows, columns)] = flat
        values[np.isinf(values)] = np.nan
        steps = values[:, places["step"]].astype(np.int64)
        kept = [place for name, place in places.items() if name != "step"]
        return MetricTable(steps, [names[place] for place in kept], values[:, kept])
