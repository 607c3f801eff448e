"""A run whose folder somebody removes, moves or replaces ends at its next step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.command import rlctl

REWARD = """
import json, os, shutil
from pathlib import Path

run = Path("runs/quickstart/x")

def replace():
    record = json.loads((run / "run.json").read_text())
    os.rename(run, "moved")
    run.mkdir()
    (run / "run.json").write_text(json.dumps(record | {"id": "another"}))

def score(**_):
    if (run / "checkpoints" / "step_000001").exists():
        DEED
    return 1.0
"""
DEEDS = {
    "removed": "shutil.rmtree('runs')",
    "moved": "os.rename(run, 'moved')",
    "replaced": "replace()",
}


@pytest.mark.parametrize(
    "deed",
    ["removed", *(pytest.param(deed, marks=pytest.mark.soak) for deed in ("moved", "replaced"))],
)
def test_a_run_without_its_folder_ends_at_its_next_step(deed: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REWARD.replace("DEED", DEEDS[deed]))
    done = rlctl(
        *("train", "grpo", "--inline", "--name", "x", "trainer.total_training_steps=6"),
        *("trainer.save_freq=1", "data.train_batch_size=4", "trainer.val_before_train=false"),
        *("trainer.test_freq=-1", "actor_rollout_ref.rollout.n=2"),
        *("actor_rollout_ref.actor.ppo_mini_batch_size=4",),
        *(
            "reward.custom_reward_function.path=mine.py",
            "+reward.custom_reward_function.name=score",
        ),
        cwd=tmp_path,
        code=7,
        fork=True,
    )
    assert "removed, moved or replaced before the end of step" in done.stderr
    assert "Traceback" not in done.stderr
    assert "step 6/6" not in done.stderr
    if deed == "replaced":
        assert [path.name for path in (tmp_path / "runs/quickstart/x").iterdir()] == ["run.json"]
