"""Settings of trackers (`trainer.tracking.params`), with the real SDKs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tracking.real import call, mlflow_curves, mode_of, trackio_curves, wandb_records, write
from tests.tracking.swanlab_server import swanlab_server

pytestmark = pytest.mark.soak  # `make abroad` runs them with the newest and the oldest releases


def log(home: Path, logger: str, settings: dict[str, Any], **environment: str) -> Path:
    """Log two steps with a tracker that has these settings; return the run's folder."""
    given = (home, 1, 2, 0, [logger], {}, {logger: settings})
    call(write, *given, home=home, **environment)
    return home / "runs" / "house" / "first"


def test_wandb(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("x = 1\n")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden/secret.py").write_text("x = 1\n")
    settings = {
        "entity": "team",
        "group": "seeds",
        "job_type": "eval",
        "tags": ["own"],
        "notes": "mine",
        "base_url": "http://127.0.0.1:9",
        "save_code": True,
    }
    run = log(tmp_path, "wandb", settings)
    [folder] = run.glob("wandb/offline-run-*")
    records = wandb_records(folder)
    opened = next(each["run"] for each in records if each["type"] == "run")
    assert (opened["entity"], opened["run_group"], opened["job_type"]) == ("team", "seeds", "eval")
    assert (opened["notes"], opened["tags"]) == ("mine", ["rlctl", "blue", "own"])
    code = [each["artifact"] for each in records if each["type"] == "artifact"]
    [saved] = [artifact for artifact in code if artifact["type"] == "code"]
    assert [each["path"] for each in saved["manifest"]["contents"]] == ["own.py"]


@pytest.mark.parametrize(
    ("logger", "key"), [("wandb", "WANDB_API_KEY"), ("swanlab", "SWANLAB_API_KEY")]
)
def test_the_address_of_the_server_decides_about_the_mode(
    logger: str, key: str, tmp_path: Path
) -> None:
    params = {logger: {"base_url": "http://127.0.0.1:9"}}
    mode = call(mode_of, logger, None, params, home=tmp_path, **{key: "k" * 40})
    assert mode.startswith("offline: 127.0.0.1:9 cannot be reached")


def test_swanlab(tmp_path: Path) -> None:
    settings = {"workspace": "team", "group": "seeds", "tags": ["own"], "notes": "mine"}
    with swanlab_server() as (address, experiments):
        settings |= {"base_url": address, "public": True, "job_type": "eval"}
        log(tmp_path, "swanlab", settings, SWANLAB_MODE="online", SWANLAB_API_KEY="k" * 21)
    [experiment] = experiments.values()
    text = json.dumps(experiment.created)
    assert experiment.created["project"].endswith("/project/team/house")
    assert all(word in text for word in ('"seeds"', '"own"', '"mine"', '"eval"')), text
    assert experiment.state == "FINISHED"


@pytest.mark.plugin("bridges")
def test_mlflow(tmp_path: Path) -> None:
    address = f"sqlite:///{tmp_path / 'own.db'}"
    settings = {"tracking_uri": address, "experiment": "other", "tags": {"team": "a"}}
    log(tmp_path, "mlflow", settings)
    found = call(mlflow_curves, tmp_path / "own.db", "other", home=tmp_path)
    assert found["tags"]["team"] == "a"
    assert call(mode_of, "mlflow", None, {"mlflow": settings}, home=tmp_path) == "local"


@pytest.mark.plugin("bridges")
def test_tensorboard(tmp_path: Path) -> None:
    log(tmp_path, "tensorboard", {"log_dir": str(tmp_path / "events")})
    assert list((tmp_path / "events/house/first").glob("events*"))


@pytest.mark.plugin("bridges")
def test_trackio(tmp_path: Path) -> None:
    log(tmp_path, "trackio", {"group": "seeds"})
    assert call(trackio_curves, "house", "first", home=tmp_path)["group"] == "seeds"
