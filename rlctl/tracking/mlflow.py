"""MLflow tracker: logs to `MLFLOW_TRACKING_URI`, by default to the database `runs/mlflow.db`.

`mlflow ui --backend-store-uri sqlite:///runs/mlflow.db` shows the database. The command needs the
full `mlflow` package; writing needs only `mlflow-skinny`.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

# mlflow reads these at import; its defaults wait minutes per call for a server that is down.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")

from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from rlctl.errors import ConfigError, MissingExtraError, ResourceError
from rlctl.tracking.loggers import reachable
from rlctl.tracking.tracker import RunInfo, Sample

_STATES = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
_MAX_METRICS, _MAX_PARAMS = 1000, 100  # per request
_MAX_PARAM_LENGTH = 6000  # characters of a parameter's value


class MlflowTracker:
    """MLflow tracker (`Tracker`, `Preflight`); a later attempt continues the same run.

    MLflow allows no `@` in names: `mean@1` becomes `mean_at_1`.
    """

    shows_samples = True
    client: MlflowClient  # from `start` on, like `id`
    id: str

    @classmethod
    def preflight(cls, mode: str | None) -> str:
        """Return `local` or the server's host.

        Raises ConfigError if a mode is given, MissingExtraError if the local database needs a
        package, ResourceError if the server does not respond.
        """
        if mode is not None:
            raise ConfigError(
                "logger mlflow has no modes",
                where=f"trainer.tracking.modes.mlflow={mode}",
                hint="set MLFLOW_TRACKING_URI instead",
            )
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        server = urlsplit(uri or "sqlite:")
        if server.scheme in ("http", "https") and not reachable(uri or ""):
            hint = "start it, or unset MLFLOW_TRACKING_URI for a local database"
            raise ResourceError(
                f"the MLflow server {server.scheme}://{server.hostname} does not respond",
                hint=hint,
            )
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
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            _make_private(root)
        self.client = MlflowClient(
            os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{root / 'mlflow.db'}"
        )
        known = run.trackers.get("mlflow")
        if known is not None and _exists(self.client, known):
            self.client.update_run(known, status="RUNNING")
            self.id = known
            return known
        local = (
            None
            if os.environ.get("MLFLOW_TRACKING_URI")
            else (root / "mlflow" / run.project).as_uri()
        )
        tags = {
            "rlctl.id": run.id,
            **({"mlflow.note.content": run.description} if run.description else {}),
            **dict.fromkeys(run.tags, ""),
        }
        self.id = self.client.create_run(
            _experiment(self.client, run.project, local), run_name=run.name, tags=tags
        ).info.run_id
        params = [
            Param(_legal(key), str(value)[:_MAX_PARAM_LENGTH]) for key, value in _leaves(run.config)
        ]
        for first in range(0, len(params), _MAX_PARAMS):
            self.client.log_batch(self.id, params=params[first : first + _MAX_PARAMS])
        self.client.log_dict(self.id, dict(run.config), "config.yaml")
        return self.id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step, in as many requests as MLflow's limit needs."""
        now = int(time.time() * 1000)
        row = [Metric(_legal(name), float(value), now, step) for name, value in metrics.items()]
        for first in range(0, len(row), _MAX_METRICS):
            self.client.log_batch(self.id, metrics=row[first : first + _MAX_METRICS])

    def generations(self, step: int, samples: Sequence[Sample]) -> None:
        """Log samples as the artifact `generations/step_N.json`."""
        self.client.log_dict(
            self.id,
            {"samples": [asdict(sample) for sample in samples]},
            f"generations/step_{step:06d}.json",
        )

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


def _legal(name: str) -> str:
    return re.sub(r"[^\w\-./ ]", "_", name.replace("@", "_at_"))


def _leaves(section: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value
