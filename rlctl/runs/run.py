"""Run in the registry: its record, state, labels and metrics, read from its folder."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.errors import ConfigError, RlctlError
from rlctl.files import by_step
from rlctl.plugins import load
from rlctl.process import uptime
from rlctl.runs.labels import Labels, read_labels
from rlctl.runs.record import RunRecord
from rlctl.runs.run_dir import RECORD_FILE
from rlctl.tracking.jsonl import METRICS_FILE, read_generations, read_metrics
from rlctl.tracking.summary import MetricsSummary, read_summary
from rlctl.tracking.tracker import Sample

if TYPE_CHECKING:
    from rlctl.tracking.metric_table import MetricTable

ACTIVE = ("running", "starting")
Stamp = tuple[int, int, int]  # inode, size, time of modification in ns


@dataclass(frozen=True, repr=False)
class Run:
    """Run in the registry.

    If `run.json` cannot be read, `record` is None, `problem` the reason and the state `broken`.
    """

    path: Path
    record: RunRecord | None
    problem: str | None = None
    labels: Labels = field(default_factory=Labels)

    def __repr__(self) -> str:
        return f"<Run {self.key}: {self.state}>"

    def _repr_html_(self) -> str:
        """Return a table and curves for notebooks."""
        return load("python_api", "html")(self)

    def readable_record(self) -> RunRecord:
        """Return the record. Raises ConfigError if it cannot be read."""
        if self.record is None:
            raise ConfigError(self.problem or "no readable record", where=str(self.path))
        return self.record

    @property
    def name(self) -> str:
        """Name of the run: its folder's."""
        return self.path.name

    @property
    def project(self) -> str:
        """Project of the run: the parent folder's name."""
        return self.path.parent.name

    @property
    def key(self) -> str:
        """`project/name`, unique under one root."""
        return f"{self.project}/{self.name}"

    @cached_property
    def state(self) -> str:
        """Recorded state, or `lost` for an active run whose local process has exited."""
        if self.record is None:
            return "broken"
        if self.record.state in ACTIVE and self.record.process.alive(self.path) is False:
            return "lost"
        return self.record.state

    @cached_property
    def created(self) -> datetime:
        """Time of creation; for a broken run, the last change of its folder."""
        if self.record is None:
            return datetime.fromtimestamp(self.path.stat().st_mtime, UTC)
        return datetime.fromisoformat(self.record.created)

    @property
    def seconds(self) -> float | None:
        """Duration of all attempts by the monotonic clock; None for a broken run.

        For a run that was killed, or is driven from another host, it is that of the recorded steps.
        """
        record = self.record
        if record is None:
            return None
        if record.ended is not None:
            return record.seconds
        if record.began is not None and record.process.alive(self.path):
            return (record.seconds or 0.0) + uptime() - record.began
        figures = self.metrics.figures
        return figures.seconds if figures is not None else None

    @cached_property
    def metrics(self) -> MetricsSummary:
        """Summary of the metrics when it was first asked for."""
        # A broken run's time is the last change of its folder.
        return read_summary(self.path, writes=self.record is not None)

    @property
    def num_bytes(self) -> int:
        """Size of all files of the run, also of those on other disks."""
        from rlctl.runs.trash import Removed

        return Removed(self.path, self.created).num_bytes

    def table(self) -> MetricTable:
        """Return all metrics as arrays, none if they cannot be read; see `metrics.problem`."""
        from rlctl.tracking.metric_table import MetricTable  # imports numpy

        try:
            return MetricTable.read(self.path / METRICS_FILE, lambda *_: None)
        except OSError:
            return MetricTable.join([])

    def setting(self, key: str) -> Any:
        """Return the value of a key in the configuration, None if it is missing."""
        from rlctl.runs.settings import read_setting

        return read_setting(self.path, key, self.record and self.record.config_sha256)

    def history(self) -> list[dict[str, float]]:
        """Return the rows of `metrics.jsonl`, one per step: `step` and the metrics of that step."""
        return read_metrics(self.path / METRICS_FILE)

    def samples(self, step: int | None = None) -> list[Sample]:
        """Return the validation samples of `step`, or of the last validation; [] without any."""
        files = by_step(self.path / "generations", ".jsonl")
        chosen = max(files, default=None) if step is None else step
        return read_generations(files[chosen]) if chosen in files else []


def is_run(folder: Path) -> bool:
    """Return True for a run's folder, even without run.json: it is then listed as broken."""
    return any(
        os.path.exists(folder / name)  # False, too, for a name that is too long
        for name in (RECORD_FILE, METRICS_FILE, "config.yaml", "events.jsonl")
    )


def read_run(folder: Path) -> Run:
    """Read the run in `folder`."""
    run = build_run(folder)
    # The process of a lost run may have finished it between the two checks.
    return build_run(folder) if run.state == "lost" else run


def build_run(folder: Path, labels: Labels | None = None) -> Run:
    """Read the run in `folder` once: its process may end before its state is asked for.

    `labels` are known labels.
    """
    labels = read_labels(folder) if labels is None else labels
    try:
        return Run(folder, RunRecord.read(f"{folder}/{RECORD_FILE}"), labels=labels)
    except RlctlError as error:
        return Run(folder, None, str(error), labels)


def stamp(path: str) -> Stamp | None:
    """Return what changes whenever a file does; None for a missing one."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
