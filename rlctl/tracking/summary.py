"""Summary of a run's metrics in `summary.json`, so that a listing need not read all rows.

The run writes it after each row. A reader adds the rows that it lacks, and reads all of them if
`metrics.jsonl` is not the file of which it was made. It writes one for a run that has none.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

from rlctl.files import read_record, replacing
from rlctl.tracking.json_lines import (
    METRICS_FILE,
    Position,
    broken_message,
    is_metrics,
    json_object,
    read_lines,
)
from rlctl.tracking.run_summary import LOSS, REWARD, RunSummary

SUMMARY_FILE = "summary.json"
SERIES = ("first", "last", "min", "max", "count")
_COUNT = SERIES.index("count")
_ROWS = 4096  # in memory at a time
_MAX_CURVE = 64  # points that a listing draws


@dataclass
class MetricsSummary:
    """Figures of a run, the values of each metric in the order `SERIES`, and curves of a few.

    A curve has every value of reward, loss or validation, or every 2nd, 4th, …, at most 64.
    `position` is the end of the rows read, `broken` the first of the broken lines before it and
    their number. `problem` is the reason why lines or all metrics cannot be read.
    """

    figures: RunSummary | None = field(default_factory=RunSummary)
    metrics: dict[str, list[float]] = field(default_factory=dict)
    curves: dict[str, list[float]] = field(default_factory=dict)
    position: Position = field(default_factory=Position)
    broken: tuple[int, int] | None = None
    problem: str | None = None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> MetricsSummary:
        """Build the summary from its JSON. Raises an error if it is not one."""
        figures = RunSummary(**raw["figures"])
        metrics = raw["metrics"]
        curves = raw["curves"]
        counts = [metrics[name][_COUNT] for name in curves]
        numbers = [value for name, value in vars(figures).items() if name != "metric"]
        numbers = [value for value in numbers if value is not None]
        values = array("d", chain(numbers, counts, *metrics.values(), *curves.values()))
        # A sum is fast, and may overflow.
        is_finite = math.isfinite(sum(values)) or all(map(math.isfinite, values))
        lengths = {len(SERIES), *map(len, metrics.values())}
        is_ours = raw["series"] == [*SERIES] and len(lengths) == 1 and is_finite
        if not is_ours or not isinstance(figures.metric, str | None):
            raise ValueError("not a summary")
        position = Position(*(int(raw["position"][name]) for name in ("offset", "line", "mark")))
        broken = raw["broken"]
        if broken is not None:
            broken = int(broken[0]), int(broken[1])
        return cls(figures, metrics, curves, position, broken)

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add the following rows of the metrics."""
        rows = iter(rows)
        while some := list(islice(rows, _ROWS)):
            assert self.figures is not None
            self.figures = self.figures.extended(some)
            for name in dict.fromkeys(chain.from_iterable(some)):
                values = [value for row in some if (value := row.get(name)) is not None]
                values = [float(value) for value in values if math.isfinite(value)]
                if values and name != "step":
                    self._add_values(name, values)

    def _add_values(self, name: str, values: Sequence[float]) -> None:
        low = min(values)
        high = max(values)
        first, _, lowest, highest, number = self.metrics.get(name) or (values[0], 0, low, high, 0)
        lowest = min(lowest, low)
        highest = max(highest, high)
        self.metrics[name] = [first, values[-1], lowest, highest, number + len(values)]
        if name in (*REWARD, *LOSS) or (self.figures and name == self.figures.metric):
            points = self.curves.setdefault(name, [])
            for earlier, value in enumerate(values, int(number)):
                _add_point(points, earlier, value)


def _add_point(points: list[float], number: int, value: float) -> None:
    """Add the value after `number` earlier ones to a curve."""
    stride = 1 << (max(0, number - 1) // _MAX_CURVE).bit_length()
    if number % stride == 0:
        points.append(value)
    if len(points) > _MAX_CURVE:
        del points[1::2]


def read_summary(folder: Path, *, writes: bool = True) -> MetricsSummary:
    """Return the summary of all metrics of the run in `folder`; `writes` one if it has none."""
    file = folder / SUMMARY_FILE
    try:
        summary = _read(folder)
        if writes and summary.position.offset and not file.exists():
            with suppress(OSError):  # another user's run: its metrics are read again
                _write(file, summary)
    except OSError as error:
        return MetricsSummary(figures=None, problem=str(error))
    return summary


def write_summary(folder: Path) -> None:
    """Write the summary of all metrics of the run in `folder`. Raises OSError."""
    _write(folder / SUMMARY_FILE, _read(folder))


def _read(folder: Path) -> MetricsSummary:
    """Return the stored summary with the rows that it lacks. Raises OSError."""
    path = folder / METRICS_FILE
    summary = _stored(folder / SUMMARY_FILE)
    after = summary.position.num_bytes_after(path)
    if after is None:
        summary = MetricsSummary()

    def note_broken(_: str, lines: Sequence[int]) -> None:
        first, number = summary.broken or (lines[0], 0)
        summary.broken = first, number + len(lines)

    if after != 0:
        summary.add(read_lines(path, note_broken, is_metrics, summary.position))
    if summary.broken is not None:
        summary.problem = broken_message(path, *summary.broken)
    return summary


def _stored(file: Path) -> MetricsSummary:
    """Return the summary in a file; an empty one if it is missing or damaged."""
    try:
        return MetricsSummary.from_dict(json_object(read_record(file)) or {})
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError):
        return MetricsSummary()


def _write(file: Path, summary: MetricsSummary) -> None:
    """Write a summary; the names of the values make the file readable without rlctl."""
    raw = {"series": SERIES} | vars(summary)
    del raw["problem"]
    with replacing(file, sync=False) as aside:
        aside.write_text(json.dumps(raw, default=vars), encoding="utf-8")
