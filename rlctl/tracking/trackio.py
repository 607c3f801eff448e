"""The run in Trackio: in its local database (`TRACKIO_DIR`), which `trackio show` shows, or wherever its own variables lead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import trackio
from trackio.run import Run

from rlctl.tracking.tracker import RunInfo, Sample


class TrackioTracker:
    """Implements `Tracker`. A later attempt goes on with the same run, which Trackio knows by its name."""

    run: Run | None = None

    def start(self, run: RunInfo) -> str:
        """Open the run, or go on with the latest of its name if it was tracked before; returns its id."""
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
        assert self.run is not None
        self.run.log(dict(metrics), step=step)

    def generations(self, step: int, samples: Sequence[Sample]) -> None:
        assert self.run is not None
        columns = ["prompt", "response", "ground_truth", "score", "length", "finish", "data_source"]
        rows = [
            [
                each.prompt,
                each.response,
                str(each.ground_truth),
                each.score,
                each.length,
                each.finish,
                each.data_source,
            ]
            for each in samples
        ]
        self.run.log({"val/generations": trackio.Table(columns=columns, data=rows)}, step=step)

    def finish(self, state: str) -> None:  # noqa: ARG002
        assert self.run is not None
        self.run.finish()
