"""Data of the board's views: what `rlctl runs`, `show`, `compare`, `sweeps` and `logs` read."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from rlctl.errors import NotFoundError, RlctlError, UsageError
from rlctl.plugins.console import nvidia_smi
from rlctl.plugins.console.board.live_metrics import MetricsCache
from rlctl.plugins.console.board.sample_pages import SampleQuery, page_of_samples
from rlctl.plugins.console.report.content import (
    checkpoints,
    content,
    head,
    labels_of,
    notable_events,
    setting_texts,
)
from rlctl.plugins.console.report.curves import curves
from rlctl.plugins.console.report.seeds import seed_bands
from rlctl.redaction import redact
from rlctl.runs import details, logs
from rlctl.runs.links import refuse_links
from rlctl.runs.listing import RunQuery
from rlctl.runs.run import ACTIVE, Run, is_run, read_run, stamp
from rlctl.runs.stacks import run_processes
from rlctl.runs.store import RunStore
from rlctl.sweeps import results
from rlctl.sweeps.sweep_record import RECORD_FILE, SweepDir, matching_sweep, sweeps
from rlctl.terminal import visible
from rlctl.tracking.jsonl import METRICS_FILE
from rlctl.tracking.run_summary import LOSS, REWARD, validation_metric
from rlctl.tracking.summary import SERIES

MAX_RUNS = 24  # in one view
PAGE = 100  # runs of a page of the list
LOG_LINES = 400
_SMI_S = 5.0
_LAST = SERIES.index("last")


@dataclass
class Listing:
    """Runs under `root`, read again only where their files have changed.

    `version` changes with them: pages show the last list and are notified of a newer one.
    """

    root: Path
    version: int = 0
    _runs: Sequence[Run] = ()
    _seen: int = 0
    _reading: threading.Lock = field(default_factory=threading.Lock)
    _store: RunStore = field(init=False)

    def __post_init__(self) -> None:
        self._store = RunStore(self.root)

    def current(self) -> tuple[int, Sequence[Run]]:
        """Return version and runs as last read; wait for the first reading."""
        if not self.version:
            with self._reading:
                if not self.version:
                    self._read()
        return self.version, self._runs

    def read(self) -> int:
        """Read the runs again; return the version."""
        with self._reading:
            self._read()
            return self.version

    def _read(self) -> None:
        runs = self._store.runs()
        stamps = (stamp(f"{run.path}/{METRICS_FILE}") for run in runs if run.state in ACTIVE)
        seen = hash((tuple((run.key, run.state, run.labels) for run in runs), *stamps))
        if seen != self._seen or not self.version:
            self._runs = runs
            self._seen = seen
            self.version += 1


@dataclass(frozen=True)
class Views:
    """Views of the runs under `root`. All methods read files and may take seconds."""

    root: Path
    metrics: MetricsCache = field(default_factory=MetricsCache)
    listing: Listing = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "listing", Listing(self.root))

    def run(self, key: str) -> Run:
        """Return the run `project/name`; see `RunStore.find` for errors."""
        folder = self._folder(key)
        if folder is None or not is_run(folder):
            raise NotFoundError(f"no run is named {key!r}", where=str(self.root.resolve()))
        return refuse_links(read_run(folder))

    def _folder(self, key: str) -> Path | None:
        """Return the folder of `project/name`; None for names that lead elsewhere."""
        parts = key.split("/")
        valid = all(part and not part.startswith(".") and "\0" not in part for part in parts)
        return self.root.joinpath(*parts) if len(parts) == 2 and valid else None

    def runs(self, query: RunQuery, offset: int = 0) -> dict[str, Any]:
        """Return `PAGE` runs from `offset` on, as `rlctl runs --json`; numbers of all of them."""
        version, every = self.listing.current()
        page = query.page([replace(run) for run in every], offset)  # which forget their metrics
        rows = page.as_json()
        for row, run in zip(rows, page.runs, strict=True):
            curves = run.metrics.curves
            metrics = run.metrics.metrics
            name = next((name for name in (*REWARD, row["metric"], *LOSS) if name in curves), None)
            row |= {"key": run.key, "took": run.seconds, "curve_of": name, **setting_texts(run)}
            row["curve"] = []
            if name is not None:
                row["curve"] = curves[name]
                row["now"] = metrics[name][_LAST]
        return {
            "runs": rows,
            "matching": offset + len(page.runs) + page.hidden,
            "total": page.total,
            "version": version,
        }

    def view(self, keys: Sequence[str]) -> dict[str, Any]:
        """Return the content of a report on the runs, without samples; `live` for streams."""
        if not 0 < len(set(keys)) <= MAX_RUNS:
            raise UsageError(f"a view shows 1 to {MAX_RUNS} runs, not {len(set(keys))}")
        runs = [self.run(key) for key in dict.fromkeys(keys)]
        return self._content(runs, None)

    def curves(self, keys: Sequence[str]) -> dict[str, Any]:
        """Return the main curves of runs for the list: reward, loss and validation.

        Runs that cannot be read are left out, because the list may be older than their removal.
        """
        runs: list[Run] = []
        for key in list(dict.fromkeys(keys))[:MAX_RUNS]:
            with suppress(RlctlError, OSError):
                runs.append(self.run(key))
        labels = labels_of(runs)
        tables = [self.metrics.of(run.path).read() for run in runs]
        return {
            "runs": [
                {"label": label, "key": run.key, "alarms": [], "events": []}
                | curves(table, _is_main)
                for run, label, table in zip(runs, labels, tables, strict=True)
            ],
            "seeds": seed_bands(runs, labels, tables, _is_main),
            "settings": [],
        }

    def seeds(self, keys: Sequence[str]) -> list[dict[str, Any]]:
        """Return means and intervals over seeds of the runs of a view; see `seed_bands`."""
        runs = [self.run(key) for key in list(dict.fromkeys(keys))[:MAX_RUNS]]
        tables = [self.metrics.of(run.path).read() for run in runs]
        return seed_bands(runs, labels_of(runs), tables)

    def read_ahead(self, keys: Sequence[str]) -> None:
        """Read the metrics of runs that a page is about to ask for."""
        for key in list(dict.fromkeys(keys))[:MAX_RUNS]:
            with suppress(RlctlError, OSError):  # the page's own request reports it
                self.metrics.of(self.run(key).path).read()

    def sweep(self, key: str) -> dict[str, Any]:
        """Return the view of a sweep: its search space and its first `MAX_RUNS` runs."""
        sweep = self._sweep(key)
        runs = results.runs_of(sweep)[:MAX_RUNS]
        return self._content(runs, results.search(sweep)) | {"state": sweep.state}

    def trials(self, key: str) -> dict[str, Any]:
        """Return the search space of a sweep, its state and the number of its runs."""
        sweep = self._sweep(key)
        number = min(MAX_RUNS, len(results.runs_of(sweep)))
        return {"state": sweep.state, "search": results.search(sweep), "num_runs": number}

    def _sweep(self, key: str) -> SweepDir:
        """Return the sweep `project/name`, or the only one of that name or beginning."""
        if key and "/" not in key:
            return matching_sweep(sweeps(self.root), key, self.root)
        folder = self._folder(key)
        if folder is None or not os.path.isfile(folder / RECORD_FILE):
            raise NotFoundError(f"no sweep is named {key!r}", where=str(self.root.resolve()))
        return SweepDir(folder)

    def _content(self, runs: Sequence[Run], found: Mapping[str, Any] | None) -> dict[str, Any]:
        live = [self.metrics.of(run.path) for run in runs]
        tables = {run.path: metrics.read() for run, metrics in zip(runs, live, strict=True)}
        made = content(runs, None, found, lambda run: tables[run.path])
        for run, metrics in zip(made["runs"], live, strict=True):
            run["live"] = {"epoch": metrics.epoch, "rows": metrics.num_rows}
        return made

    def sweeps(self) -> list[dict[str, Any]]:
        """Return the lines of `rlctl sweeps`."""
        return [
            results.overview(sweep) | {"key": f"{sweep.record.project}/{sweep.record.name}"}
            for sweep in sweeps(self.root)
        ]

    def update(self, key: str, epoch: int, rows: int) -> dict[str, Any]:
        """Return what a page with `rows` of `epoch` lacks: new rows, state, alarms, summary."""
        run = self.run(key)
        live = self.metrics.of(run.path)
        live.read()
        new = live.since(epoch, rows)
        return {
            "key": key,
            "new": new,
            "active": run.state in ACTIVE,
            **head(run),
            "checkpoints": checkpoints(run.path) if new or run.state not in ACTIVE else None,
            "steps": details.generation_steps(run.path),
            **notable_events(run.path),
        }

    def samples(self, key: str, query: SampleQuery) -> dict[str, Any]:
        """Return validation samples of a run, beside those of another if the query names one."""
        other = None if query.beside is None else self.run(query.beside)
        return page_of_samples(self.run(key), query, other)

    def logs(self, key: str, process: str | None) -> dict[str, Any]:
        """Return the last lines of a process of the latest attempt, and all processes."""
        try:
            files = {path.stem: path for path in logs.log_files(self.run(key), None, None, None)}
        except NotFoundError as error:
            if not is_run(self._folder(key) or self.root):
                raise
            return {"processes": [], "lines": [], "problem": str(error.problems[0].message)}
        written = [name for name, path in files.items() if path.stat().st_size]
        chosen = process if process in files else [*written, *files][0]
        lines = [line for _, line in logs.lines_of([files[chosen]], LOG_LINES)]
        return {
            "processes": list(files),
            "process": chosen,
            "lines": [redact(visible(line)) for line in lines],
            "problem": None,
        }

    def system(self, key: str) -> dict[str, Any]:
        """Return the use of each process of a running run on this machine, by pool and rank."""
        run = self.run(key)
        if run.state not in ACTIVE:
            return {"processes": [], "problem": f"{run.name} is {run.state}"}
        try:
            found = run_processes(run)
        except RlctlError as error:
            return {"processes": [], "problem": error.problems[0].message}
        gpu = _gpu_bytes()
        used = [
            _use(process.pid, _rank(process.pid, run.path) or process.name, gpu.get(process.pid))
            for process in found
        ]
        return {"processes": [use for use in used if use is not None], "problem": None}


def _is_main(name: str) -> bool:
    return name in (*REWARD, *LOSS) or validation_metric({name: 0.0}) is not None


def _gpu_bytes() -> dict[int, int]:
    """Return the bytes of GPU memory of each process; empty without NVIDIA's tool."""
    used: dict[int, int] = {}
    for pid, *mib in nvidia_smi.query("compute-apps=pid,used_gpu_memory", _SMI_S):
        if pid.isdigit() and mib and mib[0].isdigit():  # else "[N/A]"
            used[int(pid)] = used.get(int(pid), 0) + int(mib[0]) * 2**20
    return used


def _rank(pid: int, folder: Path) -> str | None:
    """Return pool and rank of a worker process: the name of the log that is its stdout (Linux)."""
    try:
        log = Path(os.readlink(f"/proc/{pid}/fd/1"))
    except OSError:
        return None
    if log.suffix == ".log" and log.is_relative_to(folder.resolve() / "attempts"):
        return log.stem
    return None


def _use(pid: int, name: str, gpu_bytes: int | None) -> dict[str, Any] | None:
    """Return the use of one process, None if it has ended."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            memory = process.memory_info().rss
            return {
                "pid": pid,
                "name": name,
                "cpu_s": round(times.user + times.system, 2),
                "age_s": max(0.0, time.time() - process.create_time()),
                "bytes": memory,
                "gpu_bytes": gpu_bytes,
                "threads": process.num_threads(),
            }
    except psutil.Error:
        return None
