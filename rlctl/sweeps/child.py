"""Process of one run of a trial: `rlctl train`, or `rlctl resume` if the run's folder exists."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rlctl.errors import ConfigError, NotFoundError
from rlctl.process import start_rlctl
from rlctl.runs.record import RunRecord
from rlctl.runs.run import ACTIVE, Stamp, stamp
from rlctl.runs.run_dir import RECORD_FILE, SWEEP_VARIABLE
from rlctl.sweeps.cluster import RayCluster
from rlctl.sweeps.sweep_record import SweepDir, SweepRecord, Trial
from rlctl.tracking.jsonl import METRICS_FILE, read_metrics

State = Literal["waiting", "running", "finished", "failed", "stopped"]


@dataclass
class Child:
    """Run of `trial` with one seed.

    `need` are its Ray resources, `state` is that of the process, `rows` are the metrics read so
    far, and `total_steps` is the number of steps to train, 0 until the run has recorded it.
    """

    trial: Trial
    seed: int
    name: str
    folder: Path
    need: Mapping[str, float]
    state: State = "waiting"
    process: subprocess.Popen[bytes] | None = None
    stop_requested_at: float | None = None  # time.monotonic
    rows: list[dict[str, float]] = field(default_factory=list)
    total_steps: int = 0
    _stamp: Stamp | None = None  # of the file that was read

    @property
    def record(self) -> RunRecord | None:
        """Record `run.json` of the run, None before it exists."""
        try:
            return RunRecord.read(self.folder / RECORD_FILE)
        except (ConfigError, NotFoundError):
            return None

    def old_process(self) -> str | None:
        """Return a phrase about the run's process of an earlier, killed sweep if it is alive."""
        record = self.record
        if record is None or record.state not in ACTIVE or not record.process.alive(self.folder):
            return None
        return f"still runs as process {record.process.pid}"

    def start(self, sweep: SweepDir, cluster: RayCluster) -> None:
        """Start the process on `cluster`.

        The process receives SIGTERM when this process ends for any reason.
        """
        overrides = cluster.overrides()
        variables = {SWEEP_VARIABLE: sweep.record.name, "PYTHONDONTWRITEBYTECODE": ""}
        if (self.folder / RECORD_FILE).exists():
            words = ["resume", str(self.folder), *overrides]
        else:
            words = [*self.first_words(sweep.record), *overrides]
        with sweep.log(self.name).open("ab") as log:
            # Ctrl-C reaches only the sweep, which then stops its runs.
            self.process = start_rlctl(
                words,
                log,
                cwd=sweep.record.cwd,
                env=os.environ | variables | cluster.environment(),
            )
        self.state = "running"
        self.stop_requested_at = None

    def first_words(self, record: SweepRecord) -> list[str]:
        """Return the command that starts the run."""
        settings = [*record.fixed, *self._seeds(record), *self.trial.overrides]
        return ["train", record.verb, "--recipe", record.recipe, "--name", self.name, *settings]

    def _seeds(self, record: SweepRecord) -> list[str]:
        """Return the seeds of sampling and of the order of the data."""
        seeds = [f"trainer.seed={self.seed}"]
        if record.first_data_seed is not None:
            seeds.append(f"data.seed={record.first_data_seed + self.seed - record.first_seed}")
        return seeds

    def poll(self) -> int | None:
        """Return the exit code once after the process ends; otherwise None."""
        if self.process is None:
            return None
        code = self.process.poll()
        if code is not None:
            self.process = None
        return code

    def stop(self, deadline_s: float) -> None:
        """Send SIGTERM, so that the run saves and exits; SIGKILL after `deadline_s` seconds."""
        if self.process is None:
            return
        if self.stop_requested_at is None:
            self.stop_requested_at = time.monotonic()
            self.process.terminate()
        elif time.monotonic() - self.stop_requested_at > deadline_s:
            os.killpg(self.process.pid, signal.SIGKILL)

    def read(self) -> bool:
        """Read the run's metrics if the file has changed, and return True if it has."""
        path = self.folder / METRICS_FILE
        now = stamp(str(path))
        if now is None or now == self._stamp:
            return False
        self._stamp = now
        self.rows = read_metrics(path)
        record = self.record
        if record is not None and record.total_steps:
            self.total_steps = record.total_steps
        return True

    def values(self, metric: str) -> dict[int, float]:
        """Return the values of a metric by step, for the steps that have it."""
        return {int(row["step"]): row[metric] for row in self.rows if metric in row}
