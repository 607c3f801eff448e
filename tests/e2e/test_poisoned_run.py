"""Resume and export of a run whose checkpoint a stranger has changed, with a manifest that fits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rlctl.runtime.checkpoint.store import CheckpointStore, damage
from tests.distributed.test_poisoned import Bomb, poison, with_kind
from tests.e2e.command import rlctl


@pytest.fixture(scope="module")
def root(shelf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run of one step and its checkpoint."""
    root = tmp_path_factory.mktemp("poisoned")
    settings = [
        f"data.train_files={shelf}/train.parquet",
        f"actor_rollout_ref.model.path={shelf}/model",
        *("data.max_prompt_length=160", "data.max_response_length=8", "data.train_batch_size=4"),
        *("actor_rollout_ref.actor.ppo_mini_batch_size=4", "trainer.total_training_steps=1"),
        *("trainer.save_freq=1", "trainer.num_threads=1", "trainer.project_name=p"),
    ]
    rlctl("train", "sft", "--inline", "--name", "whole", *settings, cwd=root)
    return root


def write_manifest(checkpoint: Path) -> None:
    """Replace the manifest by one that fits the files."""
    (checkpoint / "manifest.json").unlink()
    partial = checkpoint.with_name(f".{checkpoint.name}.partial")
    checkpoint.rename(partial)
    CheckpointStore(checkpoint.parent).finish(1)


@pytest.mark.slow
@with_kind
def test_resume_and_export_run_nothing(kind: str, root: Path) -> None:
    run, marker = root / "runs" / "p" / kind, root / f"marker-{kind}"
    shutil.copytree(root / "runs" / "p" / "whole", run, symlinks=True)
    record = json.loads((run / "run.json").read_text()) | {"id": kind, "name": kind}
    (run / "run.json").write_text(json.dumps(record))
    checkpoint = run / "checkpoints" / "step_000001"
    poison(kind, checkpoint / "actor", Bomb(marker))
    shutil.rmtree(checkpoint / "huggingface")  # so that export reads the distributed files
    write_manifest(checkpoint)
    assert damage(checkpoint) is None
    more = "trainer.total_training_steps=2"
    done = rlctl("resume", str(run), "--inline", more, cwd=root, code=3)
    assert done.stderr.count("error:") == 1
    assert "a damaged checkpoint" in done.stderr
    assert "Traceback" not in done.stderr
    if kind != "object":  # export leaves out the optimizer
        done = rlctl("export", str(run), f"exported-{kind}", cwd=root, code=3)
        assert "a damaged checkpoint" in done.stderr
        assert not (root / f"exported-{kind}").exists()
    assert not marker.exists()
