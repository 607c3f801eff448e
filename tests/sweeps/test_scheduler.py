"""Tests of the scheduler with a study and runs that exist on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlctl.errors import ConfigError
from rlctl.runs.process import DriverProcess
from rlctl.runs.run_dir import RunDir
from rlctl.sweeps.record import SweepDir, SweepRecord
from rlctl.sweeps.scheduler import Scheduler
from tests.sweeps.test_study import settings, study


class FreeCluster:
    """Cluster with room for every run."""

    def need(self, trial: object) -> dict[str, float]:
        return {"CPU": 1.0}

    def shortage(self, need: object, pending: object) -> None: ...

    def overrides(self) -> list[str]:
        raise AssertionError("no run is started")


def test_unknown_metric_ends_the_sweep_after_the_first_trial(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "rlctl")
    made, chosen = study(tmp_path, ["a=1,2,3"], metric="val/none"), settings(metric="val/none")
    process = DriverProcess.current()
    record = SweepRecord(
        "s",
        "p",
        "ppo",
        "ppo",
        "ppo_trainer",
        [],
        ["a=1,2,3"],
        chosen.model_dump(),
        "",
        9,
        1,
        [],
        "",
        "",
        process,
    )
    sweep = SweepDir.create(tmp_path, record)
    assert made.ask() is not None
    run = RunDir.create(tmp_path, "p", "s-000", "ppo")
    run.metrics.write_text('{"step": 9, "val-core/x/acc": 0.5}\n')
    run.finish("finished", 0)
    with pytest.raises(
        ConfigError, match="no validation logged val/none; validation metrics: val-core/x/acc"
    ):
        Scheduler(sweep, chosen, made, FreeCluster(), lambda _: None).run()
    assert [line.split(":")[0] for line in caplog.messages] == ["trial 0 failed"]
