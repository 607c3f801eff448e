"""Names of models in `rlctl eval` and `rlctl generate`."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlctl.runtime.planning.evaluation import target_config
from tests.models import write_tiny_model


def test_folders_of_models_may_have_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "model"
    write_tiny_model(folder)
    for name in ("äpfel", "model(1)", "a b", 'a"b', "x=y,z"):
        folder = folder.rename(tmp_path / name)
        assert target_config(name, [], "ppo").actor_rollout_ref.model.path == name
