"""MLflow tracker: logs to `MLFLOW_TRACKING_URI`, by default to the database `runs/mlflow.db`.

`mlflow ui --backend-store-uri sqlite:///runs/mlflow.db` shows the database. The command needs the
full `mlflow` package; writing needs only `mlflow-skinny`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

# mlflow reads these at import; its defaults wait minutes per call for a server that is down.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")

from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from rlctl.errors import ConfigError, MissingExtraError, ResourceError
from rlctl.plugins.bridges.reachable import reachable
from rlctl.tracking.alarms import Alarm
from rlctl.tracking.destination import Destination
from rlctl.tracking.logger_settings import MlflowParams
from rlctl.tracking.server_api import mlflow_problem
from rlctl.tracking.shown import SampleTable, leaves, link, notes
from rlctl.tracking.tracker import SAMPLES, RunInfo, Sample

_STATES = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
_MAX_METRICS = 1000  # per request
_MAX_PARAMS = 100  # per request
_MAX_PARAM_LENGTH = 6000  # characters of a parameter's value
_MAX_TAG_LENGTH = 5000
_MAX_ROWS = 1000
_TABLE = "val_generations.json"
_TABLES = json.dumps([{"path": _TABLE, "type": "table"}])  # the tag that MLflow's tables need


class MlflowTracker:
    """MLflow tracker (`Tracker`, `Preflight`, `ShowsAlarms`); later attempts continue the same run.

    MLflow allows no `@` in names: `mean@1` becomes `mean_at_1`.
    """

    shows_samples = True
    confirms = False  # its calls return after the data is stored
    Params = MlflowParams
    address: str  # from `start` on, like `client`
    client: MlflowClient  # from `start` on, like `id` and `rows`
    id: str
    rows: list[dict[str, Any]]  # of the table of samples

    def __init__(self, params: MlflowParams = MlflowParams()) -> None:
        self.params = params
        self.uri = params.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")

    def preflight(self, mode: str | None) -> str:
        """Return `local` or the server's host.

        Raises ConfigError if a mode is given, MissingExtraError if the local database needs a
        package, ResourceError if the server does not respond.
        """
        if mode is not None:
            raise ConfigError(
                "logger mlflow has no modes",
                where=f"trainer.tracking.modes.mlflow={mode}",
                hint="set trainer.tracking.params.mlflow.tracking_uri or MLFLOW_TRACKING_URI",
            )
        server = urlsplit(self.uri or "sqlite:")
        if server.scheme in ("http", "https") and not reachable(self.uri or ""):
            hint = "start it, or unset MLFLOW_TRACKING_URI for a local database"
            raise ResourceError(
                f"the MLflow server {server.scheme}://{server.hostname} does not respond",
                hint=hint,
            )
        if server.scheme in ("http", "https") and (problem := mlflow_problem(self.uri or "")):
            hint = (
                "correct MLFLOW_TRACKING_TOKEN, or unset MLFLOW_TRACKING_URI for a local database"
            )
            raise ResourceError(f"MLflow: {problem}", hint=hint)
        if server.scheme.startswith("sqlite") and not (
            find_spec("sqlalchemy") and find_spec("alembic")
        ):
            raise MissingExtraError(
                "MLflow's local database needs sqlalchemy and alembic",
                hint="pip install 'rlctl[mlflow]'",
            )
        return f"server {server.hostname}" if server.scheme in ("http", "https") else "local"

    def start(self, run: RunInfo) -> str:
        """Create the run, or continue that of an earlier attempt, and return its id.

        Raises MlflowException.
        """
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        root = run.folder.absolute().parent.parent
        if not self.uri:
            _make_private(root)
        self.address = self.uri or f"sqlite:///{root / 'mlflow.db'}"
        self.client = MlflowClient(self.address)
        known = run.trackers.get("mlflow")
        if known is not None and _exists(self.client, known):
            self.client.update_run(known, status="RUNNING")
            with suppress(MlflowException):  # it has none
                self.client.delete_tag(known, "failure")
            self.id = known
            self.rows = _load_rows(self.client, known)
            return known
        name = self.params.experiment or run.project
        local = None if self.uri else (root / "mlflow" / name).as_uri()
        experiment = _experiment(self.client, name, local)
        _close_lost(self.client, experiment, run.lost("mlflow"))
        tags = _tags(run) | self.params.tags
        if run.sweep:
            tags["mlflow.parentRunId"] = _sweep_run(self.client, experiment, run.sweep)
        self.id = self.client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
        self.rows = []
        params = [
            Param(_legal(key), str(value)[:_MAX_PARAM_LENGTH])
            for key, value in leaves(run.config).items()
        ]
        for first in range(0, len(params), _MAX_PARAMS):
            self.client.log_batch(self.id, params=params[first : first + _MAX_PARAMS])
        self.client.log_dict(self.id, dict(run.config), "config.yaml")
        return self.id

    def destination(self) -> Destination:
        """Return the server's page of the run, or the database."""
        if not self.address.startswith("http"):
            from rlctl.installer import runnable

            look = runnable(f"mlflow ui --backend-store-uri {shlex.quote(self.address)}", "flask")
            return Destination("local", place=self.address, look=look)
        experiment = self.client.get_run(self.id).info.experiment_id
        page = f"{self.address.rstrip('/')}/#/experiments/{experiment}/runs/{self.id}"
        return Destination("server", place=page)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step, in as many requests as MLflow's limit needs."""
        now = int(time.time() * 1000)
        row = [Metric(_legal(name), float(value), now, step) for name, value in metrics.items()]
        for first in range(0, len(row), _MAX_METRICS):
            self.client.log_batch(self.id, metrics=row[first : first + _MAX_METRICS])

    def generations(self, step: int, samples: Sequence[Sample]) -> None:
        """Log samples as the artifact `generations/step_N.json`, and add them to a table.

        The table `val_generations.json` has the newest `_MAX_ROWS` samples.
        """
        self.client.log_dict(
            self.id,
            {"samples": [asdict(sample) for sample in samples]},
            f"generations/step_{step:06d}.json",
        )
        table = SampleTable.of(samples)
        new = [dict(zip(table.columns, row, strict=True)) for row in table.rows(step, samples)]
        self.rows = [row for row in self.rows if row["step"] < step][-_MAX_ROWS:] + new
        columns = list(dict.fromkeys(name for row in self.rows for name in row))
        data = [[row.get(name) for name in columns] for row in self.rows]
        content = json.dumps({"columns": columns, "data": data}, default=str, ensure_ascii=False)
        self.client.log_text(self.id, content, _TABLE)
        self.client.set_tag(self.id, "mlflow.loggedArtifacts", _TABLES)

    def alarm(self, alarm: Alarm) -> None:
        """Set the tag `alarm.NAME` to the text of the alarm, or of its end."""
        self.client.set_tag(self.id, f"alarm.{alarm.name}", str(alarm))

    def failure(self, message: str) -> None:
        """Set the tag `failure` to the error that ended the run."""
        self.client.set_tag(self.id, "failure", message[:_MAX_TAG_LENGTH])

    def received(self, names: Collection[str]) -> Mapping[str, Collection[int]]:
        """Return what the server or database has."""
        found: dict[str, Collection[int]] = {}
        for name in names:
            history = self.client.get_metric_history(self.id, _legal(name))
            found[name] = {metric.step for metric in history}
        files = self.client.list_artifacts(self.id, "generations")
        found[SAMPLES] = {int(re.sub(r"\D", "", Path(file.path).stem)) for file in files}
        return found

    def finish(self, state: str) -> None:
        """End the run with MLflow's name of the state."""
        self.client.set_terminated(self.id, _STATES[state])


def _make_private(root: Path) -> None:
    """Create the local database and the folder of artifacts for the owner alone."""
    (root / "mlflow").mkdir(mode=0o700, exist_ok=True)
    with suppress(FileExistsError):
        os.close(os.open(root / "mlflow.db", os.O_CREAT | os.O_EXCL, 0o600))


def _exists(client: MlflowClient, run: str) -> bool:
    try:
        client.get_run(run)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return False
        raise
    return True


def _experiment(client: MlflowClient, name: str, folder: str | None) -> str:
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return client.create_experiment(name, artifact_location=folder)
        except MlflowException:  # another run may have created it in the meantime
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    return found.experiment_id


def _tags(run: RunInfo) -> dict[str, str]:
    """Return the tags of a run: its origin, the link to its record, and the user's tags."""
    tags = {
        "rlctl": "",
        "rlctl.id": run.id,
        "rlctl.show": link(run),
        "rlctl.recipe": run.recipe,
        "mlflow.source.name": f"rlctl train {run.recipe}",
        "mlflow.source.type": "LOCAL",
        "mlflow.note.content": notes(run),
        **dict.fromkeys(run.tags, ""),
    }
    if run.commit is not None:
        tags["mlflow.source.git.commit"] = run.commit
    if run.sweep is not None:
        tags["rlctl.sweep"] = run.sweep
    return tags


def _sweep_run(client: MlflowClient, experiment: str, sweep: str) -> str:
    """Return the id of the parent of a sweep's runs; create it if it is missing.

    If two runs create it at the same time, the older one counts, and the other one is deleted.
    """

    def oldest() -> str | None:
        found = client.search_runs([experiment], query, max_results=1, order_by=order)
        return found[0].info.run_id if found else None

    query = f"tags.`rlctl.parent` = '{sweep}'"
    order = ["attributes.start_time ASC", "attributes.run_id ASC"]
    if (known := oldest()) is not None:
        return known
    tags = {"rlctl": "", "rlctl.parent": sweep}
    new = client.create_run(experiment, run_name=sweep, tags=tags).info.run_id
    client.set_terminated(new)
    first = oldest() or new
    if first != new:
        client.delete_run(new)
    return first


def _close_lost(client: MlflowClient, experiment: str, lost: Sequence[str]) -> None:
    """End the runs of killed processes, which MLflow shows as running."""
    if not lost:
        return
    for run in client.search_runs([experiment], "attributes.status = 'RUNNING'"):
        if run.info.run_id in lost:
            client.set_terminated(run.info.run_id, "FAILED")


def _load_rows(client: MlflowClient, run: str) -> list[dict[str, Any]]:
    """Return the rows of the table of an earlier attempt; none if it cannot be read."""
    with TemporaryDirectory() as folder, suppress(MlflowException, OSError, ValueError, KeyError):
        path = client.download_artifacts(run, _TABLE, folder)
        table = json.loads(Path(path).read_text(encoding="utf-8"))
        return [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    return []


def _legal(name: str) -> str:
    return re.sub(r"[^\w\-./ ]", "_", name.replace("@", "_at_"))
