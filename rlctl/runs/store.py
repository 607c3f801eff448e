"""The registry of runs: an index of their folders, read anew each time, so that it is never wrong about the disk."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

from rlctl.errors import ConfigError, NotFoundError, Problem, RlctlError, UsageError
from rlctl.runs.record import RunRecord
from rlctl.runs.run_dir import RECORD_FILE
from rlctl.tracking.headline import Headline
from rlctl.tracking.jsonl import METRICS_FILE, read_metrics

DEFAULT_ROOT = Path("runs")
ACTIVE = ("running", "starting")


@dataclass(frozen=True)
class Run:
    """One run as the registry sees it. Where `run.json` cannot be read, `record` is None, `problem` says why and the state is `broken`."""

    path: Path
    record: RunRecord | None
    problem: str | None = None

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def project(self) -> str:
        return self.path.parent.name

    @cached_property
    def state(self) -> str:
        """As recorded, but `lost` when it should be active and its process is gone. On another host there is no telling: as recorded."""
        if self.record is None:
            return "broken"
        return "lost" if self.record.state in ACTIVE and self.record.process.alive() is False else self.record.state

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
        return metrics.stat().st_mtime - self.created.timestamp() if self.record is not None and metrics.exists() else None

    @cached_property
    def figures(self) -> tuple[Headline | None, str | None]:
        """The figures of its metrics, or why they cannot be read: a listing must go on to the next run."""
        try:
            return Headline.of(read_metrics(self.path / METRICS_FILE)), None
        except (RlctlError, OSError) as error:
            return None, str(error)


class RunStore:
    """All runs under `root`, in folders `<project>/<run>/`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def at(cls, root: Path | None) -> RunStore:
        """The store in `root`, or where runs lie unless somebody says otherwise."""
        return cls(root or DEFAULT_ROOT)

    def runs(self) -> list[Run]:
        """Active runs first, then the others, newest first in both."""
        found = [_open(folder) for folder in self.root.glob("[!.]*/[!.]*/") if _is_run(folder)]
        return sorted(found, key=lambda run: (run.state in ACTIVE, run.created), reverse=True)

    def find(self, selector: str) -> Run:
        """The run that `selector` names: `@last`, `@failed` (the newest failed or lost one), the path of its folder, its name,
        `project/name` or id, or a beginning of one of these that no other run shares.

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
            candidates = ", ".join(f"{run.project}/{run.name}" for run in matches[:8]) + (", …" if len(matches) > 8 else "")
            raise UsageError(f"{selector!r} names {len(matches)} runs", hint=f"one of: {candidates}")
        if not matches:
            raise NotFoundError(self._none(selector, runs))
        return matches[0]

    def _newest(self, selector: str, runs: Sequence[Run]) -> Run:
        wanted = {"@last": lambda _: True, "@failed": lambda run: run.state in ("failed", "lost")}.get(selector)
        if wanted is None:
            raise UsageError(f"unknown selector {selector!r}", hint="@last, @failed, or a run's name or the beginning of it")
        found = next(filter(wanted, runs), None)
        if found is None:
            raise NotFoundError(self._none(selector, runs))
        return found

    def _none(self, selector: str, runs: Sequence[Run]) -> Problem:
        where = str(self.root.resolve())
        if not runs:
            return Problem("there are no runs", where, "`rlctl train ppo` makes one; --root DIR or RLCTL_RUNS looks elsewhere")
        near = difflib.get_close_matches(selector, [run.name for run in runs], n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "`rlctl runs` lists them"
        return Problem("no run has failed" if selector == "@failed" else f"no run is named {selector!r}", where, hint)


def _names(run: Run) -> tuple[str, ...]:
    names = (run.name, f"{run.project}/{run.name}")
    return (*names, run.record.id) if run.record else names


def _is_run(folder: Path) -> bool:
    """Also a folder that lost its run.json, so that it is shown as broken and not passed over."""
    return any((folder / name).exists() for name in (RECORD_FILE, METRICS_FILE, "config.yaml", "events.jsonl"))


def _open(folder: Path) -> Run:
    try:
        return Run(folder, RunRecord.read(folder / RECORD_FILE))
    except ConfigError as error:
        return Run(folder, None, problem=str(error))
