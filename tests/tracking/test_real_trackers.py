"""Tests of a run and its resumption with real SwanLab, W&B, TensorBoard, MLflow and Trackio."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from rlctl.tracking.jsonl import METRICS_FILE, read_metrics
from tests.processes import run_python
from tests.tracking.real import LOGGERS, row, samples
from tests.tracking.swanlab_server import swanlab_server
from tests.tracking.wandb_server import wandb_server

LAST, CHECKPOINT = 7, 3
STEP = "training/global_step"


def in_a_home(folder: Path) -> dict[str, str]:
    """Return an environment with its own home and without API keys."""
    kept = ("PATH", "TMPDIR", "PYTHONPATH")
    return {name: os.environ[name] for name in kept if name in os.environ} | {"HOME": str(folder)}


def attempt(
    folder: Path, *arguments: object, ids: dict[str, str] | None = None, **environment: str
) -> Any:
    """Run `tests.tracking.real` and parse its stdout, which must be only JSON."""
    environment |= in_a_home(folder) | {
        "TRACKIO_DIR": str(folder / "trackio"),
        "IDS": json.dumps(ids or {}),
    }
    root = Path(__file__).parents[2]
    done = run_python("-m", "tests.tracking.real", *arguments, cwd=root, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run to step 5 with a checkpoint at step 3, then resume from there to step 7."""
    folder = tmp_path_factory.mktemp("house")
    first = attempt(folder, "write", folder, 0, 5, 0)
    metrics = folder / "runs" / "house" / "first" / METRICS_FILE
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[: CHECKPOINT + 1]))
    second = attempt(folder, "write", folder, CHECKPOINT + 1, LAST, CHECKPOINT, ids=first)
    rows = {int(each["step"]): each for each in read_metrics(metrics)}
    return {
        "ids": (first, second),
        "rows": rows,
        "run": metrics.parent,
        **attempt(folder, "read", metrics.parent),
    }


def expected(
    rename: tuple[str, str] = ("", ""), single: bool = False
) -> dict[str, dict[str, float]]:
    """Return all finite metrics by name and step (text, as in JSON); `single` rounds to 32 bits."""
    curves: dict[str, dict[str, float]] = {}
    for step in range(LAST + 1):
        for name, value in row(step).items():
            if math.isfinite(value):
                number = struct.unpack("f", struct.pack("f", value))[0] if single else value
                curves.setdefault(name.replace(*rename) if rename[0] else name, {})[str(step)] = (
                    number
                )
    return curves


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
    assert shown == {"0": 2, "2": 2, "4": 2, "6": 2}
    assert list(before["critic/score/mean"]) == ["0", "1", "2", "3", "4", "5"]


def over_the_training_step(lines: Iterable[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return W&B's history by name and training step; later values replace earlier ones."""
    curves: dict[str, dict[str, float]] = {}
    for line in lines:
        for name, value in line.items():
            if not name.startswith(("_", "val/generations", STEP)):
                curves.setdefault(name, {})[str(line[STEP])] = value
    return curves


def test_wandb_has_one_run_of_two_parts_by_training_step(kept):
    for part in kept["wandb"]:
        (opened,) = [
            each["run"] for each in part if each["type"] == "run" and "display_name" in each["run"]
        ]
        assert (opened["run_id"], opened["project"], opened["display_name"], opened["notes"]) == (
            "abc123",
            "house",
            "first",
            "a house",
        )
        axes = [each["metric"] for each in part if each["type"] == "metric"]
        assert any(axis.get("glob_name") == "*" and axis["step_metric"] == STEP for axis in axes)
    lines = [
        each["history"]["item"]
        for part in kept["wandb"]
        for each in part
        if each["type"] == "history"
    ]
    assert over_the_training_step(lines) == expected()
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
    """Run `wandb sync` with a substitute server, which receives both parts in order."""
    with wandb_server() as (address, runs):
        command = [
            str(Path(sys.executable).parent / "wandb"),
            "sync",
            *map(str, kept["run"].glob("wandb/offline-run-*")),
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


def two_attempts(folder: Path, logger: str, **environment: str) -> None:
    """Run two attempts online, the second one after the checkpoint and with the same id."""
    first = attempt(folder, "write", folder, 0, 5, 0, LOGGERS=logger, **environment)
    again = ("write", folder, CHECKPOINT + 1, LAST, CHECKPOINT)
    second = attempt(folder, *again, ids=first, LOGGERS=logger, **environment)
    assert first == second == {logger: "abc123"}


def test_wandb_online_continues_its_run(tmp_path):
    with wandb_server() as (address, runs):
        two_attempts(
            tmp_path, "wandb", WANDB_MODE="online", WANDB_API_KEY="k" * 40, WANDB_BASE_URL=address
        )
    lines = [line for _, line in sorted(runs["abc123"].items())]
    assert [line["_step"] for line in lines] == list(range(len(lines)))
    assert [line[STEP] for line in lines if "lr" in line] == [0, 1, 2, 3, 4, 5, 4, 5, 6, 7]
    assert over_the_training_step(lines) == expected()


def test_swanlab_online_continues_its_experiment(tmp_path):
    """Check also that no step is sent twice."""
    with swanlab_server() as (address, experiments):
        hosts = {"SWANLAB_API_HOST": address, "SWANLAB_WEB_HOST": address}
        two_attempts(tmp_path, "swanlab", SWANLAB_MODE="online", SWANLAB_API_KEY="k" * 21, **hosts)
    kept = experiments["abc123"]
    assert {
        name: {str(step): value for step, value in points} for name, points in kept.curves.items()
    } == expected()
    assert [step for step, _ in kept.curves["lr"]] == list(range(LAST + 1))
    assert (kept.media, kept.state) == ({"val/generations": [0, 2, 4, 6]}, "FINISHED")


def test_tensorboard_shows_one_curve_and_the_samples(kept):
    assert kept["tensorboard"]["scalars"] == expected(("@", "_"), single=True)
    texts = kept["tensorboard"]["texts"]
    assert "# answer 1 of step 6" in texts["val/generations/0/text_summary"]["6"]
    assert list(texts["val/generations/1/text_summary"]) == ["0", "2", "4", "6"]


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


MODES = """
import sys
from rlctl.errors import RlctlError
from rlctl.tracking.loggers import preflight
try:
    print(preflight(*sys.argv[1:], *[None][len(sys.argv) - 2:]))
except RlctlError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["wandb"], {}, "offline: no key"),
        (["wandb", "online"], {}, "ConfigError W&B's online mode needs a key"),
        (
            ["wandb"],
            {"WANDB_API_KEY": "k" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"},
            "offline: http://127.0.0.1:9 does not respond",
        ),
        (
            ["wandb", "online"],
            {"WANDB_API_KEY": "k" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"},
            "ResourceError the W&B server",
        ),
        (["wandb"], {"WANDB_MODE": "dryrun"}, "ConfigError WANDB_MODE=dryrun is not a mode"),
        (
            ["swanlab"],
            {"SWANLAB_API_KEY": "k" * 21, "SWANLAB_API_HOST": "http://127.0.0.1:9"},
            "offline: http://127.0.0.1:9",
        ),
        (["swanlab"], {"SWANLAB_MODE": "cloud"}, "ConfigError SwanLab's online mode needs a key"),
        (["swanlab", "local"], {}, "local: as requested"),
        (["swanlab"], {"SWANLAB_PROJECT": "house"}, "ConfigError SwanLab cannot read its settings"),
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
    environment = in_a_home(tmp_path) | environment
    done = run_python("-c", MODES, *arguments, cwd=tmp_path, env=environment)
    assert done.stdout.startswith(message), done.stdout + done.stderr
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith(".")]
