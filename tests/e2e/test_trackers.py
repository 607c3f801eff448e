"""Test of a killed and resumed run with five trackers, each read with its own reader."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.e2e.command import metrics
from tests.e2e.killed_runs import WRITTEN, run
from tests.tracking.real import LOGGERS, STEP, Forks, curves, read, wandb_curves, wandb_history

IN_STEP_4 = f"35:{WRITTEN}"  # the first phase after step 3; the checkpoint is of step 2


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

    with Forks(tmp_path) as forks:
        kept = forks.call(read, folder)
    rows = metrics(folder)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    shown = kept["swanlab"][-1]
    assert shown.pop("val/generations") == {"0": 2, "2": 2, "4": 2}
    assert shown == curves(rows)
    # W&B writes in the background: the killed attempt left nothing but a header, which the tracker
    # removes, or some of its steps as a part of the same run.
    assert len({path.stem for path in folder.glob("wandb/offline-run-*/run-*.wandb")}) == 1
    assert len(kept["wandb"]) in (1, 2)
    own = [{name: value for name, value in row.items() if name != STEP} for row in rows]
    assert wandb_curves(wandb_history(kept["wandb"])) == curves(own)
    assert kept["tensorboard"]["scalars"] == curves(rows, ("@", "_"), single=True)
    assert kept["mlflow"]["scalars"] == curves(rows, ("@", "_at_"))
    assert (kept["trackio"]["runs"], kept["trackio"]["scalars"]) == (1, curves(rows))
