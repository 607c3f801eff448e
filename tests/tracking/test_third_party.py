"""Tests of a logger in an installed third-party package: listing, training and syncing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from rlctl.__main__ import main
from rlctl.runs.sync import Sent
from tests.forks import completed
from tests.processes import run_python

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "plugins"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Install the example package, and return an environment with it on the path."""
    site = str(tmp_path_factory.mktemp("site"))
    install = ["-m", "uv", "pip", "install", "--quiet", "--no-deps", "--target"]
    done = run_python(*install, site, EXAMPLE)
    assert done.returncode == 0, done.stderr
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RLCTL_", "WANDB_", "SWANLAB_"))
    }
    path = [site, *filter(None, [os.environ.get("PYTHONPATH")])]
    return kept | {"PYTHONPATH": os.pathsep.join(path), "HOME": site}


def rlctl(
    environment: dict[str, str], folder: Path, *arguments: str, process: bool = False
) -> subprocess.CompletedProcess[str]:
    if not process:
        return completed(list(arguments), folder, environment)
    return run_python("-m", "rlctl", *arguments, cwd=folder, env=environment)


def test_run_logs_to_it_and_syncs_to_another_logger(environment, tmp_path):
    settings = [
        *("data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8"),
        *("data.val_max_samples=4", "critic.ppo_mini_batch_size=8"),
        "trainer.total_training_steps=3",
        "trainer.test_freq=2",
        "trainer.log_val_generations=2",
        "trainer.num_threads=1",
    ]
    done = rlctl(
        environment,
        tmp_path,
        "train",
        "ppo",
        "--inline",
        "--name",
        "one",
        "-l",
        "tsv",
        *settings,
    )
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "quickstart" / "one"
    lines = [line.split("\t") for line in (run / "metrics.tsv").read_text().splitlines()]
    assert (lines[0], lines[-1]) == (["#", "quickstart/one", "3 steps"], ["#", "finished"])
    assert ["step 2", "2 samples"] in [line[1:3] for line in lines if line[0] == "#"]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if line[0] != "#"]
    assert [len(line) for line in logged] == [
        len([value for value in row.values() if value is not None]) for row in rows
    ]
    assert json.loads((run / "run.json").read_text())["trackers"] == {"tsv": "metrics.tsv"}
    assert (
        "nothing is missing"
        in rlctl(environment, tmp_path, "runs", "sync", "one", "-l", "tsv").stderr
    )
    again = rlctl(environment, tmp_path, "runs", "sync", "one", "-l", "tensorboard", "--json")
    assert again.returncode == 0, again.stderr
    expected = Sent("tensorboard", "tensorboard", num_steps=len(rows), full_replay=True)
    assert json.loads(again.stdout) == [asdict(expected)]
    assert list((run / "tensorboard").glob("events*"))


def test_missing_package_of_a_logger_exits_6_with_the_install_command(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RLCTL_RUNS", raising=False)
    monkeypatch.setitem(sys.modules, "wandb", None)
    # An earlier test may have imported the tracker while its package was there.
    monkeypatch.delitem(sys.modules, "rlctl.tracking.wandb", raising=False)
    assert main(["train", "ppo", "-l", "wandb"]) == 6
    assert "pip install 'rlctl[wandb]'" in capsys.readouterr().err
    assert not (tmp_path / "runs" / "quickstart").exists()
