from __future__ import annotations

from pathlib import Path

import pytest

from rlctl.data_prep.arithmetic import train_and_validation
from rlctl.data_prep.rows import write_rows
from tests.models import write_tiny_model
from tests.settings import given


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
    train, val = (f"{shelf}/{split}.parquet" for split in ("train", "val"))
    return [
        *given(train=train, val=val, model=f"{shelf}/model", project="quickstart"),
        *given(prompt=160, response=12, batch=8, mini_batch=4, steps=2, validate=2),
        *given(save=-1, threads=1, warmup=0),
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        "trainer.timeouts.ray_start_s=120",
    ]
