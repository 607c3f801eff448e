"""Jobs on a cluster: what is checked before they are sent, and where their output goes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlctl.recipes.compose import compose
from rlctl.runs.run_dir import RunDir
from rlctl.runtime.cluster import jobs
from rlctl.runtime.training.checkpoint_store import CheckpointStore
from tests.recorded import called, exportable

ADDRESS = ("--address", "http://127.0.0.1:1", "--detach")


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Any, ...]]:
    """Return the list of the jobs that are sent."""
    found: list[tuple[Any, ...]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jobs, "submit", lambda *job: found.append(job))
    return found


def finished(root: Path) -> RunDir:
    run = exportable(root)
    recipe = compose("ppo", ["trainer.total_training_steps=1"])
    (run.path / "config.yaml").write_text(yaml.safe_dump(recipe.recorded))
    record = json.loads((run.path / "run.json").read_text())
    ended = {"state": "finished", "exit_code": 0, "ended": record["created"], "total_steps": 1}
    (run.path / "run.json").write_text(json.dumps(record | ended))
    return run


def test_the_output_of_a_job_is_on_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    def follow(address: str, name: str, write: Callable[[str], Any]) -> int:
        write("a line of the job\n")
        return 3

    monkeypatch.setattr(jobs, "follow", follow)
    done = called("logs", "job", "--address", "auto")
    assert (done.returncode, done.stdout) == (3, "a line of the job\n")


def test_a_resume_is_checked_before_it_is_sent(sent: list[Any], tmp_path: Path) -> None:
    run = finished(tmp_path / "runs")
    steps = "trainer.total_training_steps"
    for words, code, message in (
        (["r", f"{steps}=1"], 3, "no step is left: the checkpoint is that of step 1"),
        (["r", "--from-step", "7"], 4, "no checkpoint of step 7"),
        (["nothing"], 4, "no run is named 'nothing'"),
        (["r", "--fork", "r", f"{steps}=9"], 5, "already"),
        (["r", "trainer.total_step=9"], 3, "total_step"),
    ):
        done = called("resume", *words, *ADDRESS)
        assert (done.returncode, message in done.stderr) == (code, True), (words, done.stderr)
    assert sent == []
    for words in (["r", f"{steps}=9"], ["r", "--fork", "other", f"{steps}=9"]):
        done = called("resume", *words, *ADDRESS)
        assert done.returncode == 0, done.stderr
    assert called("resume", "any", "--root", "elsewhere", *ADDRESS).returncode == 0
    assert len(sent) == 3
    CheckpointStore(run.path / "checkpoints").remove(1)


def test_a_start_is_checked_before_it_is_sent(sent: list[Any], tmp_path: Path) -> None:
    finished(tmp_path / "runs")
    name = ("trainer.project_name=p", "--name", "r", "trainer.total_training_steps=1")
    done = called("train", "ppo", *name, "trainer.resume_mode=disable", *ADDRESS)
    assert (done.returncode, "already" in done.stderr) == (5, True), done.stderr
    done = called("train", "ppo", *name, "trainer.resume_mode=auto", *ADDRESS)
    assert (done.returncode, "no step is left" in done.stderr) == (3, True), done.stderr
    assert sent == []
    assert called("train", "ppo", "--name", "new", *ADDRESS).returncode == 0
    assert len(sent) == 1
