"""Trackio tracker: logs to Trackio's local database (`TRACKIO_DIR`), or to a Space or server.

`trackio show` shows the database; Trackio's environment variables select another destination.
"""

from __future__ import annotations

import os
import shlex
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import trackio
import trackio.run
from trackio.run import Run
from trackio.sqlite_storage import SQLiteStorage

from rlctl.tracking.alarms import Alarm
from rlctl.tracking.destination import Destination, folder
from rlctl.tracking.logger_settings import TrackioParams
from rlctl.tracking.shown import SampleTable, flat_config, link
from rlctl.tracking.tracker import RunInfo, Sample

_SYSTEM = "system/"  # names of metrics for the tab System Metrics
_TIMEOUT_S = 30.0


class TrackioTracker:
    """Trackio tracker (`Tracker`, `ShowsAlarms`); a later attempt continues the run of its name."""

    shows_samples = True
    Params = TrackioParams
    run: Run  # from `start` on, like `replaces` and `project`
    project: str
    replaces: bool  # True until the first step that a resumed run sends

    def __init__(self, params: TrackioParams = TrackioParams()) -> None:
        self.params = params

    def start(self, run: RunInfo) -> str:
        """Create the run, or continue the latest run of this name after an earlier attempt.

        Returns its id.
        """
        # It prints each alert, and stdout is for data.
        setattr(trackio.run, "print", lambda *_args, **_options: None)  # noqa: B010
        facts = {"tags": list(run.tags), "description": run.description, "show": link(run)}
        self.run = trackio.init(
            project=run.project,
            name=run.name,
            group=self.params.group or run.sweep,
            space_id=self.params.space_id,
            server_url=self.params.server_url,
            private=self.params.private,
            config=flat_config(run) | facts,
            resume="allow" if "trackio" in run.trackers else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self.replaces = "trackio" in run.trackers
        self.project = run.project
        return str(self.run.id)

    def destination(self) -> Destination:
        """Return the Space, the server, or the folder of the local database."""
        space = self.params.space_id or os.environ.get("TRACKIO_SPACE_ID")
        server = self.params.server_url or os.environ.get("TRACKIO_SERVER_URL")
        if space:
            return Destination("online", place=f"https://huggingface.co/spaces/{space}")
        if server:
            return Destination("server", place=server.partition("?")[0])  # a token may follow
        file = SQLiteStorage.get_project_db_path(self.project)
        look = f"trackio show --project {shlex.quote(self.project)}"
        if chosen := os.environ.get("TRACKIO_DIR"):
            look = f"TRACKIO_DIR={shlex.quote(chosen)} {look}"
        return Destination("local", place=folder(file), look=look)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step; those of the system have a separate tab, over time."""
        self._replace_from(step)
        system = {name: value for name, value in metrics.items() if name.startswith(_SYSTEM)}
        if system:
            self.run.log_system({name[len(_SYSTEM) :]: value for name, value in system.items()})
        self.run.log({name: metrics[name] for name in metrics if name not in system}, step=step)

    def generations(self, step: int, samples: Sequence[Sample]) -> None:
        """Log samples as a table `val/generations`."""
        self._replace_from(step)
        table = SampleTable.of(samples)
        shown = trackio.Table(columns=table.columns, data=table.rows(step, samples))
        self.run.log({"val/generations": shown}, step=step)

    def alarm(self, alarm: Alarm) -> None:
        """Add an alert for the start of an alarm, or a note of its end."""
        levels = trackio.AlertLevel
        level = levels.INFO if alarm.over else levels.WARN
        self.run.alert(alarm.name, str(alarm), level, alarm.step)

    def failure(self, message: str) -> None:
        """Add an alert with the error that ended the run."""
        self.run.alert("run failed", message, trackio.AlertLevel.ERROR)

    def finish(self, state: str) -> None:  # noqa: ARG002
        """Close the run."""
        self.run.finish()

    def _replace_from(self, step: int) -> None:
        """Delete what an earlier attempt logged of this step and later ones: it is sent again.

        Trackio would show both. A remote database keeps both, because it has no such call.
        """
        if not self.replaces:
            return
        self.replaces = False
        file = SQLiteStorage.get_project_db_path(self.run.project)
        given = (self.params.space_id, self.params.server_url)
        if any(given) or any(map(os.environ.get, ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"))):
            return
        parameters: Any = (str(self.run.id), step)
        with closing(sqlite3.connect(file, timeout=_TIMEOUT_S)) as database, database:
            for table in ("metrics", "alerts"):
                database.execute(f"DELETE FROM {table} WHERE run_id = ? AND step >= ?", parameters)
