"""Metrics of runs that the board shows, extended as their files grow."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlctl.plugins.console.report.curves import rows_from
from rlctl.tracking.json_lines import METRICS_FILE, Position
from rlctl.tracking.metric_table import MetricTable

_MAX_RUNS = 16  # a run of 100,000 steps with 60 metrics has 50 MB
_EPOCHS = itertools.count(1)


@dataclass
class LiveMetrics:
    """Rows of one `metrics.jsonl`.

    `epoch` changes when earlier rows did: the file was replaced (a resume discards steps).
    """

    path: Path
    table: MetricTable = field(default_factory=lambda: MetricTable.join([]))
    epoch: int = 0
    _position: Position = field(default_factory=Position)
    _reading: threading.Lock = field(default_factory=threading.Lock)

    @property
    def num_rows(self) -> int:
        """Number of rows that were read."""
        return len(self.table.steps)

    def read(self) -> MetricTable:
        """Read new rows; return all rows, none if the file cannot be read."""
        with self._reading, suppress(OSError):
            after = self._position.num_bytes_after(self.path)
            if after is None or not self.epoch:
                self.epoch = next(_EPOCHS)
                self.table = MetricTable.join([])
                self._position = Position()
            if after != 0:
                # Broken lines are named by the summary.
                new = MetricTable.read(self.path, lambda *_: None, self._position)
                self.table = MetricTable.join([self.table, new])
        return self.table

    def since(self, epoch: int, number: int) -> dict[str, Any] | None:
        """Return the rows read after the first `number` of this epoch, None if there are none.

        Return `reset` if those rows have changed since.
        """
        table = self.table
        if number and epoch != self.epoch:
            return {"reset": True}
        if number >= len(table.steps):
            return None
        fields = {"first": number, "rows": len(table.steps), "epoch": self.epoch}
        return fields | rows_from(table, number)


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
