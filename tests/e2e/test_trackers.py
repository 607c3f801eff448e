"""Test of a killed and resumed run with five trackers, each read with its own reader."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.command import metrics
from tests.e2e.killed_runs import WRITTEN, run
from tests.tracking.real import LOGGERS

STEP = "training/global_step"
IN_STEP_4 = f"35:{WRITTEN}"  # the first phase after step 3; the checkpoint is of step 2


def curves(
    rows: list[dict[str, Any]],
    rename: tuple[str, str] = ("@", "@"),
    single: bool = False,
    leave_out: str = "",
) -> dict[str, dict[str, float]]:
    """Return rows of metrics.jsonl by name and step; `single` rounds to 32-bit floats."""
    found: dict[str, dict[str, float]] = {}
    for each in rows:
        for name, value in each.items():
            if name not in ("step", leave_out) and value is not None:
                number = struct.unpack("f", struct.pack("f", value))[0] if single else value
                found.setdefault(name.replace(*rename), {})[str(each["step"])] = number
    return found


def joined_by_step(parts: list[list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Return W&B's history by name and training step; later values replace earlier ones."""
    found: dict[str, dict[str, float]] = {}
    for item in (
        each["history"]["item"] for part in parts for each in part if each["type"] == "history"
    ):
        for name, value in item.items():
            if not name.startswith(("_", "val/generations", STEP)):
                found.setdefault(name, {})[str(item[STEP])] = value
    return found


@pytest.mark.soak
@pytest.mark.slow
def test_trackers_show_one_complete_curve_after_a_kill(settings: list[str], tmp_path: Path) -> None:
    own = ["trainer.total_training_steps=4", "trainer.save_freq=2", "trainer.log_val_generations=2"]
    loggers = f"trainer.logger=['tests.e2e.killed_runs:Killer',{','.join(LOGGERS)}]"
    home = {
        "HOME": str(tmp_path),
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "WANDB_MODE": "offline",
        "SWANLAB_MODE": "offline",
    }
    killed = run(
        "train",
        "grpo",
        "--inline",
        "--name",
        "long",
        *settings,
        *own,
        loggers,
        cwd=tmp_path,
        kill_at=IN_STEP_4,
        environment=home,
    )
    assert killed.code == -signal.SIGKILL, killed.talk
    folder = tmp_path / "runs" / "quickstart" / "long"
    assert [row["step"] for row in metrics(folder)] == [0, 1, 2, 3]
    before = json.loads((folder / "run.json").read_text())["trackers"]
    resumed = run("resume", "long", "--inline", cwd=tmp_path, environment=home)
    assert resumed.code == 0, resumed.talk
    after = json.loads((folder / "run.json").read_text())["trackers"]
    assert set(after) == set(LOGGERS)
    assert {name for name in LOGGERS if after[name] != before[name]} == {"swanlab"}, (
        "offline experiments cannot be continued"
    )

    reader = [sys.executable, "-m", "tests.tracking.real", "read", str(folder)]
    done = subprocess.run(
        reader, env=os.environ | home, capture_output=True, text=True, timeout=600, check=True
    )
    kept = json.loads(done.stdout)
    rows = metrics(folder)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    shown = kept["swanlab"][-1]
    assert shown.pop("val/generations") == {"0": 2, "2": 2, "4": 2}
    assert shown == curves(rows)
    # W&B writes in the background: the killed attempt left nothing but a header, which the tracker
    # removes, or some of its steps as a part of the same run.
    assert len({path.stem for path in folder.glob("wandb/offline-run-*/run-*.wandb")}) == 1
    assert len(kept["wandb"]) in (1, 2)
    assert joined_by_step(kept["wandb"]) == curves(rows, leave_out=STEP)
    assert kept["tensorboard"]["scalars"] == curves(rows, ("@", "_"), single=True)
    assert kept["mlflow"]["scalars"] == curves(rows, ("@", "_at_"))
    assert (kept["trackio"]["runs"], kept["trackio"]["scalars"]) == (1, curves(rows))
