"""List of all runs, kept between requests."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlctl.runs.index import stamp
from rlctl.runs.run import ACTIVE, Run
from rlctl.runs.store import RunStore
from rlctl.tracking.jsonl import METRICS_FILE


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
            self._runs, self._seen = runs, seen
            self.version += 1
