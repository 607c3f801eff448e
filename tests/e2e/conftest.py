from __future__ import annotations

from pathlib import Path

import pytest

from rlctl.data_prep.arithmetic import train_and_validation
from rlctl.data_prep.rows import write_rows
from tests.models import write_tiny_model


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shelf(tmp_path_factory.mktemp("shelf"))


def write_shelf(folder: Path) -> Path:
    """Write `model/`, `train.parquet` and `val.parquet` to a folder, and return it."""
    write_tiny_model(folder / "model")
    train, val = train_and_validation(64, 8, seed=1, level=1, careless=0.0)
    write_rows(folder / "train.parquet", train)
    write_rows(folder / "val.parquet", val)
    return folder


@pytest.fixture
def settings(shelf: Path) -> list[str]:
    return small(shelf)


def small(shelf: Path) -> list[str]:
    """Return overrides that make any recipe small: two steps of eight prompts."""
    return [
        f"data.train_files={shelf}/train.parquet",
        f"data.val_files={shelf}/val.parquet",
        f"actor_rollout_ref.model.path={shelf}/model",
        "data.max_prompt_length=160",
        "data.max_response_length=12",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "trainer.total_training_steps=2",
        "trainer.test_freq=2",
        "trainer.save_freq=-1",
        "trainer.project_name=quickstart",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        "trainer.num_threads=1",
        "trainer.critic_warmup=0",
        "trainer.timeouts.ray_start_s=120",
    ]
