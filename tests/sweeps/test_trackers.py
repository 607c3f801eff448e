"""Trackers of a sweep: where the data of its runs are, and `rlctl runs sync SWEEP`."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from rlctl.recipes.compose import compose
from rlctl.runs.run_dir import RunDir
from rlctl.sweeps import trackers
from rlctl.tracking.destination import STARTED, Destination
from tests.recorded import called
from tests.sweeps.test_selection import sweep


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "SWANLAB_API_KEY", "SWANLAB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_sweep_says_where_the_data_of_its_runs_are(here: Path) -> None:
    made = sweep(here / "runs", "lrs", "fff", seeds=1)
    for number in range(3):
        run = RunDir(here / "runs/p" / made.run_name(number, 1))
        online = Destination("online", "key found", f"http://h/{number}")
        offline = Destination("offline", "no key; …", str(run.path / "swanlog"), "", "swanlab sync")
        run.event(STARTED, tracker="wandb", **online.as_event())
        run.event(STARTED, tracker="swanlab", **offline.as_event())
    run.event("tracker_off", tracker="wandb", why="3 failures")
    shown = called("show", "lrs", cwd=here).stdout.splitlines()
    first = made.run_name(2, 1)  # the best
    assert shown[-6:] == [
        "wandb  online (key found): http://h/1, and 1 run more",
        "wandb  off in 1 run: 3 failures",
        "next  rlctl runs sync lrs --logger wandb",
        f"swanlab  offline (no key): runs/p/{first}/swanlog, and 2 runs more",
        "next  rlctl runs sync lrs --logger swanlab",
        "next  rlctl sweep best lrs --export best.yaml",
    ]
    written = json.loads(called("show", "lrs", "--json", cwd=here).stdout)["trackers"]
    assert {name: len(places) for name, places in written.items()} == {"wandb": 3, "swanlab": 3}
    assert written["wandb"][first]["off"] == "3 failures"


def test_a_sweep_says_at_its_start_what_trackers_would_do(
    here: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("rlctl"), "propagate", True)
    caplog.set_level(logging.INFO, "rlctl")
    trackers.announce(compose("ppo", ["trainer.logger=[console,swanlab]"]).config)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("swanlab: offline: no key; ")
