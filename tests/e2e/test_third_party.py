"""Tests of an installed third-party package with plug-ins of eight kinds, most with a setting."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.forks import completed
from tests.processes import run_python
from tests.settings import given

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "plugins"
ACTOR = "actor_rollout_ref.actor"
SETTINGS = [
    "algorithm.adv_estimator=scaled_score",
    "algorithm.adv_estimator_params={scale: 2.0}",
    f"{ACTOR}.policy_loss.loss_mode=leashed",
    f"{ACTOR}.policy_loss.params={{beta: 0.5}}",
    "actor_rollout_ref.rollout.name=cool",
    "actor_rollout_ref.rollout.params={min_top_k: 2}",
    *("reward.functions=[contains]", "reward.num_processes=1"),  # a process imports torch
    "reward.params.contains={reward: 0.25}",
    "trainer.logger=[console, tsv]",
    "trainer.tracking.params.tsv={file: lines.tsv}",
    "data.sampler=every_other",
    "data.sampler_params={stride: 3}",
    *given(batch=4, mini_batch=2, n=4, response=12, val_rows=4, threads=1),
    *given(steps=2, validate=2, validate_first=False),
    "trainer.log_val_generations=2",
    "trainer.tracking.system_s=null",  # their number depends on the machine's speed
]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Install the example package, and return an environment with it on the path."""
    site = str(tmp_path_factory.mktemp("site"))
    install = ("-m", "uv", "pip", "install", "--quiet", "--no-deps", "--target")
    done = run_python(*install, site, EXAMPLE)
    assert done.returncode == 0, done.stderr
    path = [site, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def rlctl(
    environment: dict[str, str], folder: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    return completed(list(arguments), folder, environment)


@pytest.fixture(scope="module")
def run(environment, tmp_path_factory) -> Path:
    """Return the folder of a run with the plug-ins."""
    folder = tmp_path_factory.mktemp("trained")
    done = rlctl(environment, folder, "train", "grpo", "--inline", "--name", "one", *SETTINGS)
    assert done.returncode == 0, done.stderr
    return folder / "runs" / "quickstart" / "one"


def test_run_uses_the_plugins_and_their_settings(environment, run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line.split("\t") for line in (run / "lines.tsv").read_text().splitlines()]
    assert (lines[0], lines[-1]) == (["#", "quickstart/one", "2 steps"], ["#", "finished"])
    assert ["step 2", "2 samples"] in [line[1:3] for line in lines if line[0] == "#"]
    logged = [len(line) for line in lines if line[0] != "#"]
    assert logged == [len([value for value in row.values() if value is not None]) for row in rows]
    assert json.loads((run / "run.json").read_text())["trackers"] == {"tsv": "lines.tsv"}
    assert all("actor/leash" in row for row in rows)
    assert {row["critic/score/max"] for row in rows} <= {0.0, 0.25}
    done = rlctl(environment, run.parents[2], "lengths", "--run", "one")
    means = [f"{row['step']}\t{row['response_length/mean']:.1f}" for row in rows]
    assert done.stdout.splitlines() == means, done.stderr


@pytest.mark.plugin("console", "bridges")
def test_its_logger_has_nothing_to_sync(environment, run):
    from rlctl.plugins.console.sync import Sent

    folder, num_steps = run.parents[2], 2
    done = rlctl(environment, folder, "runs", "sync", "one", "-l", "tsv")
    assert "nothing is missing" in done.stderr
    done = rlctl(environment, folder, "runs", "sync", "one", "-l", "tensorboard", "--json")
    sent = Sent("one", "tensorboard", ".", num_steps, full_replay=True, total=num_steps)
    assert json.loads(done.stdout) == [asdict(sent)]
    assert list(run.glob("events.out.tfevents*"))


def test_its_command_is_in_the_help(environment, tmp_path):
    done = rlctl(environment, tmp_path, "--help")
    assert "A command of the package rlctl-example-plugins." in done.stdout
    done = rlctl(environment, tmp_path, "lengths", "--help")
    assert "mean length of the responses" in done.stdout
    done = rlctl(environment, tmp_path, "lenghts")
    assert (done.returncode, "lengths" in done.stderr) == (2, True)


def test_wrong_settings_are_refused_before_the_run(environment, tmp_path):
    wrong = "algorithm.adv_estimator_params={scael: 2.0}"
    done = rlctl(environment, tmp_path, "train", "grpo", "--inline", *SETTINGS, wrong)
    assert done.returncode == 3
    assert "scaled_score has no setting 'scael'" in done.stderr
    assert "did you mean 'scale'" in done.stderr


def test_prep_has_the_data_set_as_a_command(environment, tmp_path):
    done = rlctl(environment, tmp_path, "prep", "sums", "--count", "3", "--json")
    assert done.returncode == 0, done.stderr
    assert {split: each["num_rows"] for split, each in json.loads(done.stdout).items()} == {
        "train": 3,
        "val": 3,
    }
