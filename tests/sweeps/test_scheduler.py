"""Tests of the scheduler with a study and runs that exist on disk."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, cast

import pytest

from rlctl.cli.views.sweep import show_sweep
from rlctl.errors import ConfigError, NotFoundError
from rlctl.process import DriverProcess
from rlctl.recipes.axes import axes_of
from rlctl.recipes.compose import compose
from rlctl.runs.run_dir import RunDir
from rlctl.sweeps import child
from rlctl.sweeps.results import best, overview, results, runs_of, search
from rlctl.sweeps.scheduler import Scheduler
from rlctl.sweeps.sweep_launch import _first_data_seed
from rlctl.sweeps.sweep_plan import SweepPlan
from rlctl.sweeps.sweep_record import SweepDir, SweepRecord, Trial
from tests.sweeps.test_study import settings, study


class FreeCluster:
    """Cluster with room for every run."""

    def need(self, trial: object) -> dict[str, float]:
        return {"CPU": 1.0}

    def shortage(self, need: object, pending: object) -> None: ...

    def overrides(self) -> list[str]:
        raise AssertionError("no run is started")

    def environment(self) -> dict[str, str]:
        raise AssertionError("no run is started")


def scheduler(folder: Path, axis: str, **changes: Any) -> Scheduler:
    """Return the scheduler of a new sweep over `axis` whose first trial has been drawn."""
    chosen = settings(**changes)
    record = SweepRecord(
        "s",
        "p",
        "ppo",
        "ppo",
        "ppo_trainer",
        [],
        [axis],
        chosen.model_dump(),
        "",
        9,
        1,
        [],
        "",
        "",
        DriverProcess.current(),
    )
    sweep = SweepDir.create(folder, record)
    made = study(sweep.path, [axis], **changes)
    assert made.ask() is not None
    return Scheduler(sweep, chosen, made, cast(Any, FreeCluster()), lambda _: None)


def write_run(folder: Path, trial: int, rows: str) -> RunDir:
    """Write a run of a trial with the metrics `rows`."""
    run = RunDir.create(folder, "p", f"s-{trial:03d}", "ppo")
    run.metrics.write_text(rows)
    return run


def test_a_searched_seed_is_that_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(child, "start_rlctl", lambda words, *_, **__: started.append(words))
    monkeypatch.setattr(FreeCluster, "overrides", lambda _: [])
    monkeypatch.setattr(FreeCluster, "environment", lambda _: {})
    made = scheduler(tmp_path, "trainer.seed=7,8")
    made._add(Trial(0, ["trainer.seed=7"]))
    made.children[0].start(made.sweep, cast(Any, FreeCluster()))
    assert [word for word in started[0] if word.startswith("trainer.seed")][-1] == "trainer.seed=7"


def test_unknown_metric_ends_the_sweep_after_the_first_trial(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "rlctl")
    made = scheduler(tmp_path, "a=1,2,3", metric="val/none")
    write_run(tmp_path, 0, '{"step": 9, "val-core/x/acc": 0.5}\n').finish("finished", 0)
    with pytest.raises(
        ConfigError, match="no validation logged val/none; validation metrics: val-core/x/acc"
    ):
        made.run()
    assert [line.split(":")[0] for line in caplog.messages] == ["trial 0 failed"]


def test_trial_without_a_finite_value_fails_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "rlctl")
    made = scheduler(tmp_path, "a=1,2", metric="val/x")
    for trial, value in enumerate(("null", "0.5")):  # null is NaN
        rows = f'{{"step": 1, "val/x": 0.1}}\n{{"step": 2, "val/x": {value}}}\n'
        write_run(tmp_path, trial, rows).finish("finished", 0)
    made.run()
    assert caplog.messages == [
        "trial 0 failed: its last value is not finite",
        "trial 1 finished: 0.5",
    ]
    ranked = results(made.sweep).trials
    assert [(trial.number, trial.state) for trial in ranked] == [(1, "finished"), (0, "failed")]
    assert (best(made.sweep).value, ranked[1].best) == (0.5, 0.1)


def test_validation_before_training_prunes_no_trial(tmp_path: Path) -> None:
    made = scheduler(tmp_path, "a=1,2,3,4", metric="val/x", pruner="median")
    for trial in range(3):
        rows = '{"step": 0, "val/x": 0.5}\n{"step": 1, "val/x": 0.6}\n'
        write_run(tmp_path, trial, rows).finish("finished", 0)
    last = write_run(tmp_path, 3, '{"step": 0, "val/x": 0.4}\n')
    for trial in range(4):
        if trial > 0:
            assert made.study.ask() is not None
        made._add(Trial(trial, [f"a={trial + 1}"]))
    running = made.children[-1]
    running.state = "running"
    states = []
    for rows in ("", '{"step": 1, "val/x": 0.3}\n'):
        with last.metrics.open("a") as file:
            file.write(rows)
        running.read()
        made._report(running.trial)
        states.append(made.study.outcomes()[3].state)
    assert states == ["running", "pruned"]


def test_results_are_read_without_optuna(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = scheduler(tmp_path, "a=1,2", metric="val/x")
    for trial in range(2):
        write_run(tmp_path, trial, f'{{"step": 2, "val/x": 0.{trial}}}\n').finish("finished", 0)
    made.run()
    monkeypatch.delitem(sys.modules, "rlctl.sweeps.study")
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert best(made.sweep).overrides == ["a=2"]
    assert overview(made.sweep)["trials"] == {"finished": 2}
    assert len(runs_of(made.sweep)) == 2
    file = made.sweep.path / "trials.json"
    file.write_text(file.read_text().replace("finished", "running", 1))
    made.sweep.finish("stopped", 130)
    assert overview(made.sweep)["trials"] == {"finished": 1, "stopped": 1}
    file.write_text("{")
    with pytest.raises(NotFoundError, match="has no table of its trials"):
        best(made.sweep)


def test_reasons_of_trials_are_recorded_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = scheduler(tmp_path, "a=1,2", metric="val/x")
    write_run(tmp_path, 0, '{"step": 1, "val/x": null}\n').finish("finished", 0)
    write_run(tmp_path, 1, '{"step": 1, "val/x": 0.5}\n').finish("finished", 0)
    made.run()
    assert results(made.sweep).trials[1].reason == "its last value is not finite"
    show_sweep(made.sweep, as_json=False)
    assert "trial 0 failed: its last value is not finite" in capsys.readouterr().out


def test_only_a_value_of_all_seeds_has_a_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = scheduler(tmp_path, "a=1,2", metric="val/x", seeds=2)
    for trial, seed, value in ((0, 1, 0.4), (0, 2, 0.6), (1, 1, 0.5)):
        name = f"s-{trial:03d}-seed{seed}"
        run = RunDir.create(tmp_path, "p", name, "ppo")
        run.metrics.write_text(f'{{"step": 1, "val/x": {value}}}\n')
        run.finish("finished", 0)
    first = made.study.running()[0]
    made._add(first)
    made.study.ask()
    made._show()
    ended, stopped = results(made.sweep).trials
    assert (ended.value, ended.error) == (pytest.approx(0.5), pytest.approx(0.1))
    assert (stopped.value, stopped.error) == (None, None)
    # Student's t of one degree of freedom: 12.7062.
    assert (ended.n, ended.low, ended.high) == (
        2,
        *map(pytest.approx, (0.5 - 1.27062, 0.5 + 1.27062)),
    )
    assert (stopped.n, stopped.low, stopped.high) == (0, None, None)
    shown = {trial["number"]: trial for trial in search(made.sweep)["trials"]}
    assert (shown[0]["n"], shown[0]["low"]) == (2, ended.low)
    show_sweep(made.sweep, as_json=False)
    assert (
        "± half of the 95 % interval of the mean (Student's t), n = 2 seeds"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(("data_seed", "wanted"), [(5, ["data.seed=6"]), (None, [])])
def test_seeds_of_a_trial_also_change_the_order_of_the_data(
    data_seed: int | None, wanted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(child, "start_rlctl", lambda words, *_, **__: started.append(words))
    monkeypatch.setattr(FreeCluster, "overrides", lambda _: [])
    monkeypatch.setattr(FreeCluster, "environment", lambda _: {})
    made = scheduler(tmp_path, "a=1,2", seeds=2)
    made.sweep.update(first_data_seed=data_seed)  # None: a sweep that an earlier version started
    made._add(Trial(0, ["a=1"]))
    made.children[1].start(made.sweep, cast(Any, FreeCluster()))
    assert "trainer.seed=2" in started[0]
    assert [word for word in started[0] if word.startswith("data.seed")] == wanted


def test_an_override_of_the_data_seed_keeps_the_order() -> None:
    """Only that of the command line: the same recipe is used with and without it."""
    for words, first in (([], 1), (["data.seed=7"], None), (["data.shuffle=false"], None)):
        fixed, (axis,) = ["sweep.seeds=2", *words], axes_of({"trainer.total_epochs": "1,2"}, "ppo")
        plan = SweepPlan("ppo", "ppo", fixed, [axis], compose("ppo", fixed), 1, ())
        assert _first_data_seed(plan) == first
