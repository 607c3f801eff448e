"""`sweep … --slurm`: an array of its runs, or one job; and both on a real cluster of one node."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from getpass import getuser
from pathlib import Path

import pytest

from rlctl.plugins.console.slurm.array import why_one_job
from rlctl.plugins.console.slurm.job import ON_SLURM, runs_of
from rlctl.plugins.console.slurm.sbatch import find
from rlctl.process import DriverProcess
from rlctl.recipes.compose import compose
from rlctl.runs.run_dir import RunDir
from rlctl.sweeps.sweep_record import SweepDir
from tests.plugins.console import slurm_cluster
from tests.plugins.console.queued import wait
from tests.plugins.console.test_slurm import here, job
from tests.recorded import called
from tests.settings import given
from tests.slurm_programs import missing_programs

__all__ = ["here"]  # the fixture

LR = "actor_rollout_ref.actor.optim.lr"
GRID = ("sweep", "ppo", "--name", "mine", f"{LR}=1e-4,1e-3", "--detach", "--slurm")


def test_a_grid_is_an_array_of_its_runs_and_a_job_that_resumes_the_sweep(here: Path):
    done = called(*GRID, "time=20 nodes=2", "--seeds", "2", "--parallel", "3", cwd=here)
    assert done.returncode == 0, done.stderr
    array, last = ((here / f"submitted-{name}.sh").read_text() for name in ("tasks", "job"))
    assert "#SBATCH --array=0-3%3\n" in array
    assert array.endswith('/.slurm/mine "$SLURM_ARRAY_TASK_ID"\n')
    assert "#SBATCH --dependency=afterany:42\n" in last
    sweep = SweepDir(here / "runs/quickstart/mine")
    folder = sweep.path.parent / ".slurm/mine"
    order = json.loads((folder / "job.json").read_text())
    assert (order["words"], order["is_last"]) == (["resume", str(sweep.path)], True)
    names = [f"mine-{trial:03d}-seed{seed}" for trial in (0, 1) for seed in (1, 2)]
    assert [Path(task["run"]).name for task in order["tasks"]] == names
    words = order["tasks"][3]["words"]
    assert words[:6] == ["train", "ppo", "--recipe", "ppo", "--name", names[3]]
    assert {"trainer.nnodes=2", "trainer.seed=2", f"{LR}=0.001"} <= {*words}
    assert (sweep.state, sweep.record.process.host) == ("running", ON_SLURM)
    shown = json.loads(called("show", "mine", "--json", cwd=here).stdout)
    assert [trial["overrides"] for trial in shown["trials"]] == [[f"{LR}=0.0001"], [f"{LR}=0.001"]]
    assert json.loads(called("stop", "mine", "--json", cwd=here).stdout)[0]["state"] == "cancelled"
    assert (here / "cancelled").read_text().splitlines() == [
        "--state=PENDING 42 42",
        "--state=RUNNING --batch --signal=TERM 42 42",
    ]
    assert SweepDir(sweep.path).state == "stopped"


def test_a_submission_that_was_interrupted_cancels_its_jobs_alone(here: Path):
    assert called(*GRID, "", cwd=here).returncode == 0
    (here / "runs/quickstart/.slurm/mine/id").unlink()
    assert called("stop", "mine", cwd=here).returncode == 0
    which = f"--name=mine --user={getuser()}"
    assert [line[-len(which) :] for line in (here / "cancelled").read_text().splitlines()] == [
        which,
        which,
    ]


def test_a_sweep_that_slurm_refuses_leaves_nothing(here: Path):
    (here / "refuse").touch()
    done = called(*GRID, "", cwd=here)
    assert (done.returncode, "sbatch: error: invalid partition" in done.stderr) == (7, True)
    assert not (here / "runs/quickstart/mine").exists()
    assert find(here / "runs", "mine") is None


def test_samplers_that_need_results_are_one_job(here: Path):
    done = called(*GRID, "time=20", "--sampler", "tpe", "--trials", "3", cwd=here)
    assert done.returncode == 0, done.stderr
    assert "one job" in done.stderr
    assert "the sampler tpe needs the results of earlier trials" in done.stderr
    assert "array" not in (here / "submitted").read_text()
    settings = compose("ppo").config.sweep
    pruned = settings.model_copy(update={"pruner": "median"})
    assert why_one_job(pruned) == "the pruner median compares trials while they run"
    assert why_one_job(settings.model_copy(update={"sampler": "random"})) is None


def sweep_in(here: Path) -> SweepDir:
    """Return a sweep named `mine` whose node is lost, for `job`, with one of its runs."""
    assert called(*GRID, "", "trainer.project_name=p", cwd=here).returncode == 0
    sweep = SweepDir(here / "runs/p/mine")
    elsewhere = replace(DriverProcess.current(), host="node7")
    sweep.update(process=elsewhere)
    run = RunDir.create(here / "runs", "p", "mine-000", "ppo")
    run.update(state="running", process=elsewhere)
    RunDir.create(here / "runs", "p", "mine-000-fork", "ppo")
    return sweep


def test_a_requeued_sweep_is_resumed(here: Path):
    sweep = sweep_in(here)
    run = sweep.run_folder("mine-000")
    assert runs_of(sweep.path) == [run]
    (here / "end").touch()
    process, _ = job(here, SLURM_RESTART_COUNT="1")
    process.communicate(timeout=120)
    assert (here / "ran").read_text() == "resume x\n"
    assert SweepDir(sweep.path).state == "stopped"
    assert json.loads((run / "run.json").read_text())["state"] == "stopped"
    assert (sweep.path / "slurm.sh").exists()


def test_steps_of_any_trial_requeue_the_job_of_a_sweep(here: Path):
    run = sweep_in(here).run_folder("mine-000")
    (here / "saves").touch()
    process, _ = job(here, RUN=str(run))
    wait((here / "runs/p/mine/slurm.sh").exists)
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=120)
    assert "the job is requeued" in output
    assert (here / "requeued").read_text() == "requeue 42\n"


def test_a_task_runs_its_run(here: Path):
    assert called(*GRID, "", cwd=here).returncode == 0
    folder = here / "runs/quickstart/.slurm/mine"
    order = json.loads((folder / "job.json").read_text())
    stand_in = here / "bin/python"
    stand_in.write_text(f"#!/bin/sh\nshift 3; echo $RLCTL_SWEEP $* >>{here}/ran; echo printed\n")
    (folder / "job.json").write_text(json.dumps(order | {"python": str(stand_in)}))
    words = [sys.executable, "-P", "-m", "rlctl.plugins.console.slurm.job", str(folder), "1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert (here / "ran").read_text().startswith("mine train ppo --recipe ppo --name mine-001 ")
    log = here / "runs/quickstart/mine/logs/mine-001.log"
    assert log.read_text() == "printed\n"


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.skipif(bool(missing_programs()), reason=f"not here: {', '.join(missing_programs())}")
def test_runs_and_sweeps_on_a_real_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    own = given(batch=8, mini_batch=8, response=8, val_rows=8, threads=1)
    own += given(steps=2, validate=1, save=1)
    with slurm_cluster.one_node(tmp_path / "cluster") as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        slurm = ("--slurm", "time=30")
        done = called("train", "ppo", "--inline", "--name", "one", *own, *slurm, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        longer = "trainer.total_training_steps=3"
        done = called("resume", "one", longer, *slurm, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        run = tmp_path / "runs/quickstart/one"
        assert json.loads((run / "run.json").read_text())["state"] == "finished"
        assert [json.loads(row)["step"] for row in (run / "metrics.jsonl").open()][-1] == 3
        grid = ("sweep", "ppo", "--name", "mine", *own, f"{LR}=1e-4,1e-3", "--parallel", "1")
        assert called(*grid, *slurm, "--detach", cwd=tmp_path).returncode == 0
        last = find(tmp_path / "runs", "mine")
        assert last is not None
        wait(lambda: last.state() is None, 900)  # it resumes the sweep, which is stopped until then
        output = last.output.read_text()
        assert SweepDir(tmp_path / "runs/quickstart/mine").state == "finished", output
        assert [each["state"] for each in trials(tmp_path)] == ["finished", "finished"]


def trials(here: Path) -> list[dict[str, object]]:
    """Return the trials of the sweep `mine`."""
    return json.loads(called("show", "mine", "--json", cwd=here).stdout)["trials"]
