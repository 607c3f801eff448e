"""`rlctl compare` and `rlctl watch` by sweeps and trials, and the progress within a trial."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from rich.console import Console

from rlctl.__main__ import main
from rlctl.cli.views import sweep as sweep_view
from rlctl.cli.views import sweep_watch
from rlctl.process import DriverProcess
from rlctl.runs.run_dir import RunDir
from rlctl.sweeps import sweep_watcher
from rlctl.sweeps.sweep_record import Outcome, SweepDir, SweepRecord, Trial, TrialTable
from tests.sweeps.test_scheduler import scheduler
from tests.sweeps.test_study import settings

ROW = '{{"step": {step}, "critic/score/mean": {value}}}\n'


def sweep(root: Path, name: str, states: str, seeds: int = 2) -> SweepDir:
    """Write a sweep with trials in these states (f: finished, r: running, w: waiting) and runs."""
    chosen = settings(seeds=seeds, metric="val/x").model_dump()
    record = SweepRecord(
        name=name,
        project="p",
        verb="ppo",
        recipe="ppo",
        base="ppo_trainer",
        fixed=[],
        axes=["a=1,2,3"],
        settings=chosen,
        config_sha256="",
        total_steps=4,
        first_seed=1,
        command=[],
        cwd="",
        created="",
        process=DriverProcess.current(),
    )
    made = SweepDir.create(root, record)
    outcomes: list[Outcome] = []
    for number, letter in enumerate(states):
        state = {"f": "finished", "r": "running", "w": "waiting"}[letter]
        value = number / 10 if letter == "f" else None
        values = {4: number / 10} if letter == "f" else {}
        outcomes.append(Outcome(Trial(number, [f"a={number}"]), state, value, values))
        for seed in range(1, seeds + 1) if letter != "w" else ():
            run = RunDir.create(root, "p", made.run_name(number, seed), "ppo")
            run.update(state="running", total_steps=4)
            run.metrics.write_text(ROW.format(step=1, value=number + seed / 10))
            if letter == "f":
                run.finish("finished", 0)
    made.write_table(TrialTable(outcomes, {}))
    return made


def end(made: SweepDir) -> None:
    """End the sweep and its runs after one more step of each."""
    for path in sorted(made.path.parent.glob(f"{made.record.name}-*")):
        run = RunDir(path)
        if run.record.state == "running":
            with run.metrics.open("a") as file:
                file.write(ROW.format(step=2, value=0.5))
            run.finish("finished", 0)
    table = made.read_table()
    assert table is not None
    ended = [dataclasses.replace(outcome, state="finished") for outcome in table.outcomes]
    made.write_table(TrialTable(ended, {}))
    made.finish("finished", 0)


@pytest.mark.plugin("console")
@pytest.mark.parametrize(
    ("words", "runs"),
    [
        ("git 0 2", "gitter-000 gitter-002"),
        ("gitter-001 git-2", "gitter-001 gitter-002"),
        ("gitter other", "gitter-002 other-001"),
        ("gitter-000-seed2 other 0", "gitter-000-seed2 other-000"),
        ("gitter-1", "gitter-001"),
    ],
)
def test_compare_takes_sweeps_and_trials(
    words: str, runs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, states in (("gitter", "fff"), ("other", "ff")):
        end(sweep(tmp_path, name, states))
    assert main(["compare", *words.split(), "--json", "--root", str(tmp_path)]) == 0
    compared = json.loads(capsys.readouterr().out)["runs"]
    seeds = {name: ("",) if "seed" in name else ("-seed1", "-seed2") for name in runs.split()}
    assert compared == [f"p/{name}{seed}" for name in seeds for seed in seeds[name]]


@pytest.mark.plugin("console")
@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("gitter 0 7", 4, "the sweep gitter has no trial 7"),
        ("gitter 0 2", 4, "trial 2 of the sweep gitter has no run yet"),
        ("gitter-7 gitter-0", 4, "no run is named 'gitter-7'"),
        ("single-0 single-000", 2, "compare takes two different runs or more"),
        ("single 0", 2, "compare takes two different runs or more"),
    ],
)
def test_wrong_trials_are_named(
    words: str, code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    end(sweep(tmp_path, "single", "f", seeds=1))
    sweep(tmp_path, "gitter", "ffw")
    assert main(["compare", *words.split(), "--root", str(tmp_path)]) == code
    assert message in capsys.readouterr().err


@pytest.mark.plugin("console")
def test_a_run_goes_before_a_trial_of_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    end(sweep(tmp_path, "gitter", "f"))
    for name in ("git-0", "git-1"):
        RunDir.create(tmp_path, "p", name, "ppo").finish("finished", 0)
    assert main(["compare", "git-0", "git-1", "--json", "--root", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["runs"] == ["p/git-0", "p/git-1"]


@pytest.mark.parametrize(
    ("selector", "seen", "last"),
    [
        (
            "git",
            [
                "gitter-000-seed1: step 1/4",
                "gitter-001-seed2: step 1/4",
                "gitter-001-seed2: step 2",
            ],
            "gitter is finished; `rlctl show gitter` shows its trials",
        ),
        (
            "gitter-1",
            ["gitter-001-seed1: step 1/4", "gitter-001-seed1: step 2/4"],
            "trial 1 of gitter is finished;",
        ),
    ],
)
def test_watch_follows_a_sweep_or_a_trial_to_its_end(
    selector: str,
    seen: list[str],
    last: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = sweep(tmp_path, "gitter", "fr")
    monkeypatch.setattr(sweep_watcher.time, "sleep", lambda _: end(made))
    assert main(["watch", selector, "--root", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert [line for line in seen if line not in out] == []
    assert ("gitter-000" in out) == (selector == "git")
    assert last in err


def test_watch_shows_the_step_of_each_trial_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = sweep(tmp_path, "gitter", "frw")
    console = Console(force_terminal=True, width=100, record=True)
    monkeypatch.setattr(sweep_watch, "stdout", lambda: console)
    monkeypatch.setattr(sweep_watcher.time, "sleep", lambda _: end(made))
    sweep_watch.watch_sweep(made, None)
    rows = [line.split() for line in console.export_text().splitlines()]
    assert ["1", "a=1", "2", "of", "4", "finished"] in rows


def test_sweep_logs_the_steps_of_a_trial(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "rlctl")
    made = scheduler(tmp_path, "a=1,2", metric="val/x")
    run = RunDir.create(tmp_path, "p", "s-000", "ppo")
    run.update(state="running", total_steps=40)
    made._add(Trial(0, ["a=1"]))
    child = made.children[0]
    child.state = "running"
    lines = sweep_view._ProgressLines()
    for step in (1, 3, 4, 5, 20, 40):
        run.metrics.write_text(ROW.format(step=step, value=step))
        assert child.read()
        lines.update(made.children)
    assert caplog.messages == ["trial 0: step 4 of 40", "trial 0: step 20 of 40"]
    console = Console(width=100, record=True)
    console.print(sweep_view._follow(made.study, made.children))
    assert "40 of 40" in console.export_text()


def test_live_table_has_the_lowest_value_of_a_sweep_that_minimizes(tmp_path: Path) -> None:
    outcomes = [Outcome(Trial(0, ["a=1"]), "running", None, {1: 0.25, 2: 0.75})]
    for mode, best in (("min", "0.25"), ("max", "0.75")):
        console = Console(width=100, record=True)
        console.print(sweep_view.trials_table(outcomes, {0: (2, 0)}, {0}, mode))
        row = console.export_text().splitlines()[-1].split()
        assert row == ["0", "a=1", "2", "0.75", best, "running"]
