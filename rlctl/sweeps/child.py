"""One run of a trial as a process of its own: `rlctl train`, or `rlctl resume` where its folder is there already."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rlctl.errors import ConfigError
from rlctl.runs.process import die_with_parent
from rlctl.runs.record import RunRecord
from rlctl.runs.run_dir import RECORD_FILE, SWEEP_VARIABLE
from rlctl.runs.store import ACTIVE
from rlctl.sweeps.record import SweepDir
from rlctl.sweeps.study import Trial
from rlctl.tracking.jsonl import METRICS_FILE, read_metrics

State = Literal["waiting", "running", "finished", "failed", "stopped"]


@dataclass
class Child:
    """A run of `trial` with one seed. `state` is that of the process; `rows` are the metrics read so far."""

    trial: Trial
    seed: int
    name: str
    folder: Path
    need: Mapping[str, float]
    state: State = "waiting"
    process: subprocess.Popen[bytes] | None = None
    told_to_stop: float | None = None  # when, by time.monotonic
    rows: list[dict[str, float]] = field(default_factory=list)
    _read: tuple[float, int] = (0.0, -1)

    @property
    def record(self) -> RunRecord | None:
        """The run's own record, if it has come so far."""
        try:
            return RunRecord.read(self.folder / RECORD_FILE)
        except ConfigError:
            return None

    def still_runs(self) -> str | None:
        """A line that says so while a process of an earlier, killed sweep has not ended yet."""
        record = self.record
        alive = record is not None and record.state in ACTIVE and record.process.alive()
        return (
            f"still runs as process {record.process.pid}" if record is not None and alive else None
        )

    def start(self, sweep: SweepDir, cluster: Sequence[str]) -> None:
        """Start the process; `cluster` are the overrides that place it. It is told to end when this process dies, however that happens."""
        if (self.folder / RECORD_FILE).exists():
            words = ["resume", str(self.folder), *cluster]
        else:
            record = sweep.record
            own = [*record.fixed, *self.trial.overrides, f"trainer.seed={self.seed}", *cluster]
            words = ["train", record.verb, "--recipe", record.recipe, "--name", self.name, *own]
        with sweep.log(self.name).open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rlctl", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=sweep.record.cwd,
                env=os.environ | {SWEEP_VARIABLE: sweep.record.name, "PYTHONDONTWRITEBYTECODE": ""},
                start_new_session=True,  # Ctrl-C reaches the sweep alone, which then stops its runs in order
                preexec_fn=die_with_parent,
            )
        self.state, self.told_to_stop = "running", None

    def poll(self) -> int | None:
        """The exit code of a process that has ended, once; None while it runs."""
        code = None if self.process is None else self.process.poll()
        if code is not None:
            self.process = None
        return code

    def stop(self, deadline_s: float) -> None:
        """Ask the process to save and end; kill it when it was asked longer ago than `deadline_s`."""
        if self.process is None:
            return
        if self.told_to_stop is None:
            self.told_to_stop = time.monotonic()
            self.process.terminate()
        elif time.monotonic() - self.told_to_stop > deadline_s:
            os.killpg(self.process.pid, signal.SIGKILL)

    def read(self) -> bool:
        """Read the run's metrics anew if they have changed; whether they have."""
        path = self.folder / METRICS_FILE
        if not path.exists():
            return False
        status = path.stat()
        if (status.st_mtime, status.st_size) == self._read:
            return False
        self._read = (status.st_mtime, status.st_size)
        self.rows = read_metrics(path)
        return True

    def values(self, metric: str) -> dict[int, float]:
        """The metric after each validation, by step."""
        return {int(row["step"]): row[metric] for row in self.rows if metric in row}
