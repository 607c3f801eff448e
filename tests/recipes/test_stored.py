"""Configuration of an earlier run whose files were damaged or edited."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from rlctl.errors import ConfigError
from rlctl.recipes.compose import compose
from rlctl.recipes.stored import recompose


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    container = compose("ppo", ["trainer.seed=7"]).container
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(container))
    return tmp_path


def test_a_mesh_that_was_defined_as_another_follows_it(tmp_path: Path) -> None:
    sizes = [f"actor_rollout_ref.{role}.fsdp_config" for role in ("actor", "ref")]
    tensor, sequence = "tensor_model_parallel_size", "ulysses_sequence_parallel_size"
    given = [f"{sizes[0]}.{tensor}=2", f"{sizes[0]}.{sequence}=2", f"{sizes[1]}.{sequence}=2"]
    recipe = compose("ppo", given)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(recipe.container))
    chains = {key: [asdict(each) for each in chain] for key, chain in recipe.origins.items()}
    (tmp_path / "origins.json").write_text(json.dumps(chains))
    again = recompose(tmp_path, [f"{sizes[0]}.{tensor}=1", f"{sizes[0]}.{sequence}=1"])
    assert again.config.actor_rollout_ref.ref.fsdp_config.tensor_model_parallel_size == 1
    assert again.config.actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size == 2
    assert recompose(tmp_path).config == recipe.config


def test_torn_origins_are_reported_and_replaced(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "origins.json").write_text('{"trainer.seed": [{"val')
    recipe = recompose(folder)
    assert recipe.config.trainer.seed == 7
    assert recipe.origins["trainer.seed"][-1].where == str(folder / "config.yaml")
    assert f"{folder / 'origins.json'} cannot be read" in caplog.text


def test_errors_name_the_stored_file(folder: Path) -> None:
    stored = folder / "config.yaml"
    stored.write_text(stored.read_text().replace("seed: 7", "seed: seven"))
    with pytest.raises(ConfigError) as caught:
        recompose(folder)
    assert [each.where for each in caught.value.problems] == [str(stored)]
