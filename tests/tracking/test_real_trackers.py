"""Tests of a run and its resumption with real SwanLab, W&B, TensorBoard, MLflow and Trackio."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from rlctl.tracking.json_lines import read_lines
from rlctl.tracking.jsonl import METRICS_FILE, read_metrics
from tests.tracking.real import (
    LOGGERS,
    STEP,
    call,
    curves,
    in_a_home,
    mode_of,
    read,
    row,
    samples,
    wandb_curves,
    wandb_history,
    write,
)
from tests.tracking.swanlab_server import swanlab_server
from tests.tracking.wandb_server import wandb_server

# `make abroad` runs them with the newest and the oldest releases.
pytestmark = [pytest.mark.soak, pytest.mark.plugin("bridges")]

LAST, CHECKPOINT = 7, 3


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run to step 5 with a checkpoint at step 3, then resume from there to step 7."""
    home = tmp_path_factory.mktemp("house")
    first = call(write, home, 0, 5, 0, home=home)
    metrics = home / "runs" / "house" / "first" / METRICS_FILE
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[: CHECKPOINT + 1]))
    second = call(write, home, CHECKPOINT + 1, LAST, CHECKPOINT, LOGGERS, first, home=home)
    rows = {int(each["step"]): each for each in read_metrics(metrics)}
    return {
        "ids": (first, second),
        "rows": rows,
        "run": metrics.parent,
        "events": list(read_lines(metrics.parent / "events.jsonl")),
        **call(read, metrics.parent, home=home),
    }


def expected(*form: Any) -> dict[str, dict[str, float]]:
    """Return all finite metrics by name and step, in the form of a tracker (see `curves`)."""
    return curves([{"step": step, **row(step)} for step in range(LAST + 1)], *form)


def test_record_has_every_step(kept):
    assert list(kept["rows"]) == list(range(LAST + 1))
    for step, given in kept["rows"].items():
        assert given.pop("step") == step
        assert math.isnan(given.pop("odd"))
        assert given == {name: value for name, value in row(step).items() if name != "odd"}


def test_ids_stay_the_same_if_the_run_can_be_continued(kept):
    first, second = kept["ids"]
    assert set(first) == set(second) == set(LOGGERS)
    assert {name for name in LOGGERS if first[name] != second[name]} == {"swanlab"}


def test_swanlab_offline_creates_a_run_with_the_complete_history(kept):
    before, after = kept["swanlab"]
    shown = after.pop("val/generations")
    assert after == expected()
    assert shown == {"0": 1, "2": 1, "4": 1, "6": 1}  # a table each
    newest = max(kept["run"].glob("swanlog/run-*"), key=os.path.getmtime)
    tables = [json.loads(path.read_text()) for path in newest.glob("media/echarts/*.json")]
    rows = sorted((row["step"], row["response"]) for table in tables for row in table["rowData"])
    assert rows == [(step, f"# answer {i} of step {step}") for step in (0, 2, 4, 6) for i in (1, 2)]
    assert list(before["critic/score/mean"]) == ["0", "1", "2", "3", "4", "5"]


def test_wandb_has_one_run_of_two_parts_by_training_step(kept):
    for part in kept["wandb"]:
        (opened,) = [
            each["run"] for each in part if each["type"] == "run" and "display_name" in each["run"]
        ]
        assert (opened["run_id"], opened["project"], opened["display_name"], opened["notes"]) == (
            "abc123",
            "house",
            "first",
            "a house\n\nRecord: `rlctl show house/first`",
        )
        axes = [each["metric"] for each in part if each["type"] == "metric"]
        assert any(axis.get("glob_name") == "*" and axis["step_metric"] == STEP for axis in axes)
    assert wandb_curves(wandb_history(kept["wandb"])) == expected()
    assert any(
        each["type"] == "artifact" and each["artifact"]["type"] == "config"
        for each in kept["wandb"][0]
    )
    tables = [
        path
        for part in kept["wandb"]
        for each in part
        if each["type"] == "files"
        for path in each["files"]["files"]
    ]
    assert (
        sum("val/generations" in json.dumps(table) for table in tables) == 5
    )  # steps 0, 2, 4 and again 4, 6, each with its own rows


def test_wandb_sync_joins_the_parts_to_one_run(kept):
    """Run `wandb sync` with a substitute server, which receives both parts in order.

    Older releases lose a part: the run then names `rlctl runs sync`, which sends all steps.
    """
    if Version(version("wandb")) < Version("0.31"):
        started = [each for each in kept["events"] if each.get("tracker") == "wandb"]
        assert [each["send"].partition(" /")[0] for each in started if "send" in each] == [
            "wandb sync",
            "rlctl runs sync",
        ]
        return
    with wandb_server() as (address, runs):
        command = [
            str(Path(sys.executable).parent / "wandb"),
            "sync",
            *sorted(map(str, kept["run"].glob("wandb/offline-run-*"))),  # as a shell does
        ]
        environment = in_a_home(kept["run"]) | {
            "WANDB_API_KEY": "k" * 40,
            "WANDB_BASE_URL": address,
        }
        done = subprocess.run(
            command,
            cwd=kept["run"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    assert list(runs) == ["abc123"], done.stderr
    lines = [line for _, line in sorted(runs["abc123"].items())]
    assert [line["_step"] for line in lines] == list(range(len(lines)))
    assert [line[STEP] for line in lines if "lr" in line] == [0, 1, 2, 3, 4, 5, 4, 5, 6, 7]


def two_attempts(folder: Path, logger: str, **environment: str) -> Path:
    """Run two attempts, the second one after the checkpoint; check their ids and return the run."""
    first = call(write, folder, 0, 5, 0, [logger], home=folder, **environment)
    run = folder / "runs" / "house" / "first"
    lines = (run / METRICS_FILE).read_text().splitlines(keepends=True)
    (run / METRICS_FILE).write_text("".join(lines[: CHECKPOINT + 1]))
    again = (folder, CHECKPOINT + 1, LAST, CHECKPOINT, [logger], first)
    second = call(write, *again, home=folder, **environment)
    assert (first == second == {logger: "abc123"}) == ("online" in environment.values())
    return run


def test_wandb_online_continues_its_run(tmp_path):
    with wandb_server() as (address, runs):
        account = {"WANDB_API_KEY": "k" * 40, "WANDB_BASE_URL": address}
        two_attempts(tmp_path, "wandb", WANDB_MODE="online", **account)
    lines = [line for _, line in sorted(runs["abc123"].items())]
    assert [line["_step"] for line in lines] == list(range(len(lines)))
    assert [line[STEP] for line in lines if "lr" in line] == [0, 1, 2, 3, 4, 5, 4, 5, 6, 7]
    assert wandb_curves(lines) == expected()


def test_swanlab_online_continues_its_experiment(tmp_path):
    """Check also that no step is sent twice."""
    with swanlab_server() as (address, experiments):
        hosts = {"SWANLAB_API_HOST": address, "SWANLAB_WEB_HOST": address}
        account = hosts | {"SWANLAB_API_KEY": "k" * 21}
        two_attempts(tmp_path, "swanlab", SWANLAB_MODE="online", **account)
    kept = experiments["abc123"]
    assert {
        name: {str(step): value for step, value in points} for name, points in kept.curves.items()
    } == expected()
    assert [step for step, _ in kept.curves["lr"]] == list(range(LAST + 1))
    assert (kept.media, kept.state) == ({"val/generations": [0, 2, 4, 6]}, "FINISHED")


def test_tensorboard_shows_one_curve_and_the_samples(kept):
    assert kept["tensorboard"]["scalars"] == expected(("@", "_"), True)
    texts = kept["tensorboard"]["texts"]
    shown = texts["val/generations/text_summary"]
    assert all(f"# answer {i} of step 6" in shown["6"] for i in (1, 2))
    assert list(shown) == ["0", "2", "4", "6"]


def test_mlflow_has_one_run(kept):
    mlflow = kept["mlflow"]
    assert mlflow["scalars"] == expected(("@", "_at_"))
    assert mlflow["artifacts"] == [f"generations/step_{step:06d}.json" for step in (0, 2, 4, 6)]
    assert (mlflow["status"], mlflow["params"]["trainer.seed"]) == ("FINISHED", "1")
    assert "blue" in mlflow["tags"]


def test_trackio_has_one_run(kept):
    assert kept["trackio"]["runs"] == 1
    assert kept["trackio"]["scalars"] == expected()
    last = kept["trackio"]["tables"][-1]["_value"]
    assert [answer["response"] for answer in last] == [samples(6)[i].response for i in (1, 2)]


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["wandb"], {}, "offline: no key"),
        (["wandb", "online"], {}, "ConfigError W&B's online mode needs a key"),
        (
            ["wandb"],
            {"WANDB_API_KEY": "k" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"},
            "offline: 127.0.0.1:9 cannot be reached",
        ),
        (
            ["wandb", "online"],
            {"WANDB_API_KEY": "k" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"},
            "ResourceError W&B: 127.0.0.1:9 cannot be reached",
        ),
        (
            ["swanlab"],
            {"SWANLAB_API_KEY": "k" * 21, "SWANLAB_API_HOST": "http://127.0.0.1:9"},
            "offline: 127.0.0.1:9 cannot be reached",
        ),
        (["swanlab"], {"SWANLAB_MODE": "cloud"}, "ConfigError SwanLab's online mode needs a key"),
        (["swanlab", "local"], {}, "local: as requested"),
        (["swanlab"], {"SWANLAB_MODE": "clowd"}, "ConfigError SWANLAB_MODE=clowd is not a mode"),
        (
            ["mlflow"],
            {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9"},
            "ResourceError the MLflow server http://127.0.0.1 does not respond",
        ),
        (["mlflow"], {}, "local"),
    ],
)
def test_preflight_reports_modes_and_problems_without_prompts(
    tmp_path, arguments, environment, message
):
    assert call(mode_of, *arguments, home=tmp_path, **environment).startswith(message)
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith(".")]


def test_disabled_swanlab_writes_nothing(tmp_path):
    call(write, tmp_path, 1, 2, 0, ["swanlab"], home=tmp_path, SWANLAB_MODE="disabled")
    assert not list(tmp_path.rglob("*.swanlab"))
