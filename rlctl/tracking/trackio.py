"""Trackio tracker: logs to Trackio's local database (`TRACKIO_DIR`), or to a Space or server.

`trackio show` shows the database; Trackio's environment variables select another destination.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import trackio
from trackio.run import Run

from rlctl.tracking.tracker import TABLE_COLUMNS, RunInfo, Sample


class TrackioTracker:
    """Trackio tracker (`Tracker`); a later attempt continues the run of the same name."""

    shows_samples = True
    run: Run  # from `start` on

    def start(self, run: RunInfo) -> str:
        """Create the run, or continue the latest run of this name after an earlier attempt.

        Returns its id.
        """
        self.run = trackio.init(
            project=run.project,
            name=run.name,
            config=dict(run.config) | {"tags": list(run.tags), "description": run.description},
            resume="allow" if "trackio" in run.trackers else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return str(self.run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step."""
        self.run.log(dict(metrics), step=step)

    def generations(self, step: int, samples: Sequence[Sample]) -> None:
        """Log samples as a table `val/generations`."""
        columns = [name for name in TABLE_COLUMNS if name != "right"]
        rows = [sample.cells(columns) for sample in samples]
        self.run.log({"val/generations": trackio.Table(columns=columns, data=rows)}, step=step)

    def finish(self, state: str) -> None:  # noqa: ARG002
        """Close the run."""
        self.run.finish()
