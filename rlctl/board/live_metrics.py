"""Metrics of runs that the board shows, extended as their files grow."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlctl.runs.metrics_digest import has_grown, metrics_digest
from rlctl.runs.report.curves import rows_from
from rlctl.runs.run import Run
from rlctl.tracking.jsonl import METRICS_FILE
from rlctl.tracking.metric_table import MetricTable

_MAX_RUNS = 16  # a run of 100,000 steps with 60 metrics has 50 MB
_MAX_ROWS = 4096  # of a table that new rows are joined with
_EPOCHS = itertools.count(1)


@dataclass
class LiveMetrics:
    """Rows of one `metrics.jsonl` and their digest, from one reading of the file.

    `epoch` changes when earlier rows did: the file was replaced (a resume discards steps).
    """

    path: Path
    tables: list[MetricTable] = field(default_factory=list)
    epoch: int = 0
    num_rows: int = 0
    digest: dict[str, Any] | None = None
    _reading: threading.Lock = field(default_factory=threading.Lock)

    def read(self) -> list[MetricTable]:
        """Read new rows; return all tables."""
        with self._reading:
            if self.digest is None or not has_grown(self.path, self.digest["read"]):
                self.digest, self.epoch = None, next(_EPOCHS)
                self.tables, self.num_rows = [], 0
            # Broken lines are named by the digest.
            self.digest = metrics_digest(self.path, self.digest, self._add)
            return list(self.tables)

    def read_of(self, run: Run) -> list[MetricTable]:
        """Read new rows and set the digest of `run`, whose folder this is; return all tables."""
        tables = self.read()
        if self.digest is not None:
            run.metrics_cache.append(self.digest)
        return tables

    def _add(self, table: MetricTable) -> None:
        self.num_rows += len(table.steps)
        if self.tables and len(self.tables[-1].steps) + len(table.steps) <= _MAX_ROWS:
            table = _joined(self.tables.pop(), table)
        self.tables.append(table)

    def since(self, epoch: int, number: int) -> dict[str, Any] | None:
        """Return the rows read after the first `number` of this epoch, None if there are none.

        Return `reset` if those rows have changed since.
        """
        tables = self.tables
        if number and epoch != self.epoch:
            return {"reset": True}
        if number >= self.num_rows:
            return None
        fields = {"first": number, "rows": self.num_rows, "epoch": self.epoch}
        return fields | rows_from(tables, number)


class MetricsCache:
    """Metrics of the runs that were shown last."""

    def __init__(self) -> None:
        self._runs: OrderedDict[Path, LiveMetrics] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, folder: Path) -> LiveMetrics:
        """Return the metrics of the run in `folder`, not yet read."""
        with self._lock:
            found = self._runs.pop(folder, None) or LiveMetrics(folder / METRICS_FILE)
            self._runs[folder] = found
            while len(self._runs) > _MAX_RUNS:
                self._runs.popitem(last=False)
            return found


def _joined(first: MetricTable, second: MetricTable) -> MetricTable:
    """Return the rows of both tables as one."""
    names = list(dict.fromkeys([*first.names, *second.names]))
    places = {name: place for place, name in enumerate(names)}
    values = np.full((len(first.steps) + len(second.steps), len(names)), np.nan)
    values[: len(first.steps), [places[name] for name in first.names]] = first.values
    values[len(first.steps) :, [places[name] for name in second.names]] = second.values
    return MetricTable(np.concatenate([first.steps, second.steps]), names, values)
