"""Registry of runs: their folders, read through an index that is validated on each access."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from rlctl.errors import NotFoundError, Problem, UsageError
from rlctl.monitoring.run_summary import RunSummary, lower_is_better
from rlctl.runs.digests import CONFIG, LABELS, METRICS, RECORD, metrics_digest
from rlctl.runs.index import Index
from rlctl.runs.labels import Labels
from rlctl.runs.process import DriverProcess
from rlctl.runs.query import Query
from rlctl.runs.query_values import read_values
from rlctl.runs.record import RunRecord
from rlctl.runs.run_dir import RECORD_FILE
from rlctl.tracking.jsonl import METRICS_FILE, generations_file, read_generations, read_metrics
from rlctl.tracking.tracker import Sample

DEFAULT_ROOT = Path("runs")
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
    metrics_cache: list[dict[str, Any]] = field(default_factory=list, compare=False, repr=False)

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
            if self.record.state in ACTIVE and self.record.process.alive() is False
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
        """Wall-clock time from the creation to the end, or to the latest metrics before that."""
        if self.record is not None and self.record.ended is not None:
            return (datetime.fromisoformat(self.record.ended) - self.created).total_seconds()
        metrics = self.path / METRICS_FILE
        return (
            metrics.stat().st_mtime - self.created.timestamp()
            if self.record is not None and metrics.exists()
            else None
        )

    @property
    def metrics(self) -> dict[str, Any]:
        """Digest of the metrics (`metrics_digest`), read once; see `RunStore.preload`."""
        if not self.metrics_cache:
            self.metrics_cache.append(metrics_digest(self.path / METRICS_FILE))
        return self.metrics_cache[-1]

    def history(self) -> list[dict[str, float]]:
        """Return the rows of `metrics.jsonl`, one per step: `step` and the metrics of that step."""
        return read_metrics(self.path / METRICS_FILE)

    def samples(self, step: int | None = None) -> list[Sample]:
        """Return the validation samples of `step`, or of the last validation; [] without any."""
        if step is not None:
            return read_generations(generations_file(self.path, step))
        files = sorted(self.path.glob("generations/step_*.jsonl"))
        return read_generations(files[-1]) if files else []

    @property
    def figures(self) -> tuple[RunSummary | None, str | None]:
        """Summary of the metrics, or None and the reason why they cannot be read."""
        summary = self.metrics["summary"]
        return (RunSummary(**summary) if summary else None), self.metrics["problem"]


class RunStore:
    """All runs under `root`, in folders `<project>/<run>/`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.index = Index(root)

    @classmethod
    def at(cls, root: Path | None) -> RunStore:
        """Return the store of `root`, by default `runs`."""
        return cls(root or DEFAULT_ROOT)

    def runs(self) -> list[Run]:
        """Return active runs, then the others; both newest first."""
        folders = {
            f"{project.name}/{run.name}": run.path
            for project in _subfolders(self.root)
            for run in _subfolders(project.path)
        }
        records, labels = self.index.read(RECORD, folders), self.index.read(LABELS, folders)
        self.index.forget_others(folders)
        kept = [
            key
            for key, folder in folders.items()
            if records[key] is not None or _is_run(Path(folder))
        ]
        found = [_settled(_run(Path(folders[key]), records[key], labels[key])) for key in kept]
        return sorted(found, key=lambda run: (run.state in ACTIVE, run.created), reverse=True)

    def preload(self, runs: Sequence[Run]) -> None:
        """Read the metrics of `runs` through the index, so that their `figures` cost nothing afterwards."""
        digests = self.index.read(METRICS, {run.key: str(run.path) for run in runs})
        for run in runs:
            run.metrics_cache.append(digests[run.key])

    def reindex(self) -> int:
        """Rebuild the index; return the number of runs."""
        self.index.clear()
        runs = self.runs()
        folders = {run.key: str(run.path) for run in runs}
        for part in (METRICS, CONFIG):
            self.index.read(part, folders)
        return len(runs)

    def find(self, selector: str) -> Run:
        """Return the run that `selector` names.

        A selector is `@last`, `@failed` (the newest failed or lost run), `@best:METRIC`,
        `@tag:TAG` (the newest), the path of a folder, or a name, `project/name` or id, of which an
        unambiguous prefix is enough. Raises UsageError when several runs match, NotFoundError when
        none does.
        """
        if _is_run(Path(selector)):
            return _open(Path(selector))
        runs = sorted(self.runs(), key=lambda run: run.created, reverse=True)
        if selector.startswith("@"):
            return self._newest(selector, runs)
        matches = [run for run in runs if selector in _names(run)] or [
            run for run in runs if any(each.startswith(selector) for each in _names(run))
        ]
        if len(matches) > 1:
            candidates = ", ".join(run.key for run in matches[:8]) + (
                ", …" if len(matches) > 8 else ""
            )
            raise UsageError(
                f"{selector!r} names {len(matches)} runs", hint=f"one of: {candidates}"
            )
        if not matches:
            raise NotFoundError(self._none(selector, runs))
        return matches[0]

    def _newest(self, selector: str, runs: Sequence[Run]) -> Run:
        kind, _, given = selector.partition(":")
        if kind == "@best" and given:
            found = self._best(given, runs)
        elif kind == "@tag" and given:
            found = next((run for run in runs if given in run.labels.tags), None)
        elif selector in ("@last", "@failed"):
            found = next(
                (run for run in runs if selector == "@last" or run.state in ("failed", "lost")),
                None,
            )
        else:
            raise UsageError(
                f"unknown selector {selector!r}",
                hint="use @last, @failed, @best:METRIC, @tag:TAG, or the beginning of a name",
            )
        if found is None:
            raise NotFoundError(self._none(selector, runs))
        return found

    def _best(self, metric: str, runs: Sequence[Run]) -> Run | None:
        """Return the run with the best value of a metric or aspect; ties go to the newest."""
        term = Query.parse(metric if "(" in metric else f"best({metric})").term()
        found = [
            (row[term], run)
            for run, row in zip(runs, read_values(self, runs, [term]), strict=True)
            if row[term] is not None
        ]
        choose = min if lower_is_better(term.name) else max
        return choose(found, key=lambda pair: pair[0])[1] if found else None

    def _none(self, selector: str, runs: Sequence[Run]) -> Problem:
        where = str(self.root.resolve())
        if not runs:
            return Problem(
                "there are no runs",
                where,
                "`rlctl train ppo` makes one; --root DIR or RLCTL_RUNS looks elsewhere",
            )
        near = difflib.get_close_matches(selector, [run.name for run in runs], n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "`rlctl runs` lists them"
        kind, _, given = selector.partition(":")
        special = {
            "@failed": "no run has failed",
            "@best": f"no run has a metric {given!r}",
            "@tag": f"no run has the tag {given!r}",
        }
        return Problem(special.get(kind, f"no run is named {selector!r}"), where, hint)


def _names(run: Run) -> tuple[str, ...]:
    names = (run.name, run.key)
    return (*names, run.record.id) if run.record else names


def _is_run(folder: Path) -> bool:
    """Return True for a run's folder, even without run.json: it is then listed as broken."""
    return any(
        (folder / name).exists()
        for name in (RECORD_FILE, METRICS_FILE, "config.yaml", "events.jsonl")
    )


def _open(folder: Path) -> Run:
    return _settled(_read(folder))


def _settled(run: Run) -> Run:
    """Read a lost run again: its process may have finished it between the two checks."""
    return _read(run.path) if run.state == "lost" else run


def _read(folder: Path) -> Run:
    return _run(folder, RECORD.digest(folder / RECORD.file), LABELS.digest(folder / LABELS.file))


def _run(folder: Path, record: dict[str, Any] | None, labels: dict[str, Any] | None) -> Run:
    """Build a `Run` from cached file digests."""
    made_of = Labels(tuple(labels["tags"]), labels["note"]) if labels else Labels()
    if record is None or record["record"] is None:
        return Run(
            folder,
            None,
            record["problem"] if record else RECORD.digest(folder / RECORD.file)["problem"],
            made_of,
        )
    fields = record["record"]
    return Run(
        folder,
        RunRecord(**{**fields, "process": DriverProcess(**fields["process"])}),
        labels=made_of,
    )


def _subfolders(folder: Path | str) -> Iterator[os.DirEntry[str]]:
    """Yield the subfolders that are not hidden (the trash is)."""
    try:
        entries = os.scandir(folder)
    except OSError:
        return
    with entries:
        yield from (entry for entry in entries if entry.is_dir() and not entry.name.startswith("."))
