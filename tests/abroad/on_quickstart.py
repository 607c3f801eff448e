"""The quickstart on a Ray cluster of its own, as the command line starts it."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.command import metrics, rlctl


def test_quickstart_trains_and_resumes(tmp_path: Path) -> None:
    short = ["data.val_max_samples=8"]
    first = ["trainer.total_training_steps=2", "trainer.save_freq=2"]
    rlctl("train", "ppo", "--name", "one", *first, *short, cwd=tmp_path, process=True)
    more = "trainer.total_training_steps=3"
    rlctl("resume", "one", "--force", more, cwd=tmp_path, process=True)
    rows = metrics(tmp_path / "runs/quickstart/one")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(row["training/rollout_probs_diff_max"] < 1e-3 for row in rows[1:])
