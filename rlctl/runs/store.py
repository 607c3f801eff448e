"""The registry of runs: their folders, read through an index that is checked against the disk each time."""

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
from rlctl.tracking.jsonl import METRICS_FILE

DEFAULT_ROOT = Path("runs")
ACTIVE = ("running", "starting")


@dataclass(frozen=True)
class Run:
    """One run as the registry sees it. Where `run.json` cannot be read, `record` is None, `problem` says why and the state is `broken`."""

    path: Path
    record: RunRecord | None
    problem: str | None = None
    labels: Labels = field(default_factory=Labels)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def project(self) -> str:
        return self.path.parent.name

    @property
    def key(self) -> str:
        """What no other run under the same root is called."""
        return f"{self.project}/{self.name}"

    @cached_property
    def state(self) -> str:
        """As recorded, but `lost` when it should be active and its process is gone. On another host there is no telling: as recorded."""
        if self.record is None:
            return "broken"
        return (
            "lost"
            if self.record.state in ACTIVE and self.record.process.alive() is False
            else self.record.state
        )

    @cached_property
    def created(self) -> datetime:
        """When the run was made; of a broken one, when its folder last changed."""
        if self.record is None:
            return datetime.fromtimestamp(self.path.stat().st_mtime, UTC)
        return datetime.fromisoformat(self.record.created)

    @property
    def seconds(self) -> float | None:
        """Wall-clock time from its beginning to its end, or to its latest metrics while it has not ended."""
        if self.record is not None and self.record.ended is not None:
            return (datetime.fromisoformat(self.record.ended) - self.created).total_seconds()
        metrics = self.path / METRICS_FILE
        return (
            metrics.stat().st_mtime - self.created.timestamp()
            if self.record is not None and metrics.exists()
            else None
        )

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """See `metrics_digest`; `RunStore.preload` reads those of many runs."""
        return metrics_digest(self.path / METRICS_FILE)

    @property
    def figures(self) -> tuple[RunSummary | None, str | None]:
        """The figures of its metrics, or why they cannot be read: a listing must go on to the next run."""
        headline = self.metrics["headline"]
        return (RunSummary(**headline) if headline else None), self.metrics["problem"]


class RunStore:
    """All runs under `root`, in folders `<project>/<run>/`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.index = Index(root)

    @classmethod
    def at(cls, root: Path | None) -> RunStore:
        """The store in `root`, or where runs lie unless somebody says otherwise."""
        return cls(root or DEFAULT_ROOT)

    def runs(self) -> list[Run]:
        """Active runs first, then the others, newest first in both."""
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
            vars(run)["metrics"] = digests[run.key]  # where the cached property keeps it

    def reindex(self) -> int:
        """Make the whole index anew. The number of runs."""
        self.index.clear()
        runs = self.runs()
        folders = {run.key: str(run.path) for run in runs}
        for part in (METRICS, CONFIG):
            self.index.read(part, folders)
        return len(runs)

    def find(self, selector: str) -> Run:
        """The run that `selector` names: `@last`, `@failed` (the newest failed or lost one), `@best:METRIC`, `@tag:TAG` (the newest),
        the path of its folder, its name, `project/name` or id, or a beginning of one of these that no other run shares.

        Errors: UsageError when several runs match, NotFoundError when none does.
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
                hint="@last, @failed, @best:METRIC, @tag:TAG, or the beginning of a name",
            )
        if found is None:
            raise NotFoundError(self._none(selector, runs))
        return found

    def _best(self, metric: str, runs: Sequence[Run]) -> Run | None:
        """The run that came farthest in a metric (`best(METRIC)`, unless another value is asked for); of equals the newest."""
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
    """Also a folder that lost its run.json, so that it is shown as broken and not passed over."""
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
    """Of the digests of its files."""
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
    """Those that are not hidden: the trash and the index are."""
    try:
        entries = os.scandir(folder)
    except OSError:
        return
    with entries:
        yield from (entry for entry in entries if entry.is_dir() and not entry.name.startswith("."))
