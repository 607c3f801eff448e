"""Parts of checkpoints: which are saved, and the errors of a run that needs a missing one."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlctl.api import compose
from tests.e2e.command import rlctl
from tests.e2e.conftest import small, write_shelf


def train(folder: Path, contents: str) -> Path:
    """Train the run `a` for one step; return the folder of its checkpoint."""
    words = [*small(write_shelf(folder)), "trainer.save_freq=1", "trainer.total_training_steps=1"]
    contents = f"trainer.checkpoint.save_contents={contents}"
    rlctl("train", "grpo", "--name", "a", "--inline", *words, contents, cwd=folder)
    return folder / "runs" / "quickstart" / "a" / "checkpoints" / "step_000001"


def test_weights_alone_are_exported_and_resumed_without_the_optimizer(tmp_path: Path):
    folder = train(tmp_path, "[model]")
    assert not (folder / "huggingface").exists()
    assert not (folder / "actor" / "optimizer").exists()
    done = rlctl("eval", "a", cwd=tmp_path, code=4)
    assert "step_000001 has no folder for transformers" in done.stderr
    rlctl("export", "a", "exported", cwd=tmp_path)
    assert (tmp_path / "exported" / "model.safetensors").is_file()
    longer = ("resume", "a", "trainer.total_training_steps=2", "--inline")
    done = rlctl(*longer, cwd=tmp_path, code=3)
    assert "step_000001 has no optimizer: it has model" in done.stderr
    rlctl(*longer, "trainer.checkpoint.load_contents=[model,extra]", cwd=tmp_path)


@pytest.mark.soak
def test_an_export_alone_cannot_be_resumed(tmp_path: Path):
    train(tmp_path, "[hf_model]")
    done = rlctl("resume", "a", "trainer.total_training_steps=2", "--inline", cwd=tmp_path, code=3)
    assert "step_000001 has no model: it has hf_model" in done.stderr
    assert rlctl("eval", "a", cwd=tmp_path).returncode == 0


@pytest.mark.plugin("bridges")
def test_verls_keys_of_the_actor_are_those_of_all_roles():
    key = "actor_rollout_ref.actor.checkpoint.load_contents=[model,extra]"
    assert compose("ppo", [key]).config.trainer.checkpoint.load_contents == ("model", "extra")
