"""A run that one Python began and another continues, in both directions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.e2e.command import metrics

HOME = os.environ["ABROAD_HOME"]  # Python of the checkout


def rlctl(python: str, folder: Path, *words: str) -> None:
    done = subprocess.run(
        [python, "-m", "rlctl", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_python_resumes_runs_of_the_other(tmp_path: Path) -> None:
    assert sys.executable != HOME
    for number, (first, second) in enumerate(((HOME, sys.executable), (sys.executable, HOME))):
        name = f"run{number}"
        settings = ["trainer.total_training_steps=2", "trainer.save_freq=2"]
        short = ["data.val_max_samples=8", "trainer.critic_warmup=0"]
        rlctl(first, tmp_path, "train", "ppo", "--inline", "--name", name, *settings, *short)
        more = "trainer.total_training_steps=3"
        rlctl(second, tmp_path, "resume", name, "--inline", "--force", more)
        rows = metrics(tmp_path / "runs/quickstart" / name)
        assert [row["step"] for row in rows] == [0, 1, 2, 3]
