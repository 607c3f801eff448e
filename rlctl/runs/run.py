"""Run in the registry: its record, state, labels and metrics, read from its folder."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from rlctl.errors import ConfigError
from rlctl.files import by_step
from rlctl.monitoring.run_summary import RunSummary
from rlctl.runs.digests import LABELS, METRICS, RECORD
from rlctl.runs.labels import Labels
from rlctl.runs.process import DriverProcess, uptime
from rlctl.runs.record import RunRecord
from rlctl.runs.run_dir import RECORD_FILE
from rlctl.tracking.jsonl import METRICS_FILE, read_generations, read_metrics
from rlctl.tracking.tracker import Sample

ACTIVE = ("running", "starting")


@dataclass(frozen=True)
class Run:
    """Run in the registry.

    If `run.json` cannot be read, `record` is None, `problem` the reason and the state `broken`.
    """

    path: Path
    record: RunRecord | None
    problem: str | None = None
    labels: Labels = field(default_factory=Labels)

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
        return (
            "lost"
            if self.record.state in ACTIVE and self.record.process.alive(self.path) is False
            else self.record.state
        )

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
        summary, _ = self.figures
        return summary.seconds if summary is not None else None

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """Digest of the metrics (`metrics_digest`); see `RunStore.preload`."""
        path = self.path / METRICS.file
        return METRICS.digest(path) if path.exists() else METRICS.absent

    def set_metrics(self, digest: dict[str, Any]) -> None:
        """Use a digest of the metrics that was read already."""
        vars(self)["metrics"] = digest

    def history(self) -> list[dict[str, float]]:
        """Return the rows of `metrics.jsonl`, one per step: `step` and the metrics of that step."""
        return read_metrics(self.path / METRICS_FILE)

    def samples(self, step: int | None = None) -> list[Sample]:
        """Return the validation samples of `step`, or of the last validation; [] without any."""
        files = by_step(self.path / "generations", ".jsonl")
        chosen = max(files, default=None) if step is None else step
        return read_generations(files[chosen]) if chosen in files else []

    @property
    def figures(self) -> tuple[RunSummary | None, str | None]:
        """Summary of the metrics, or None and the reason why they cannot be read."""
        summary = self.metrics["summary"]
        return (RunSummary(**summary) if summary else None), self.metrics["problem"]


def is_run(folder: Path) -> bool:
    """Return True for a run's folder, even without run.json: it is then listed as broken."""
    return any(
        os.path.exists(folder / name)  # False, too, for a name that is too long
        for name in (RECORD_FILE, METRICS_FILE, "config.yaml", "events.jsonl")
    )


def read_run(folder: Path) -> Run:
    """Read the run in `folder`."""
    run = _read(folder)
    # The process of a lost run may have finished it between the two checks.
    return _read(folder) if run.state == "lost" else run


def _read(folder: Path) -> Run:
    return build_run(
        folder, RECORD.digest(folder / RECORD.file), LABELS.digest(folder / LABELS.file)
    )


def build_run(folder: Path, record: dict[str, Any] | None, labels: dict[str, Any] | None) -> Run:
    """Build a `Run` from cached file digests."""
    run_labels = Labels(tuple(labels["tags"]), labels["note"]) if labels else Labels()
    if record is None or record["record"] is None:
        return Run(
            folder,
            None,
            record["problem"] if record else RECORD.digest(folder / RECORD.file)["problem"],
            run_labels,
        )
    fields = record["record"]
    return Run(
        folder,
        RunRecord(**{**fields, "process": DriverProcess(**fields["process"])}),
        labels=run_labels,
    )
