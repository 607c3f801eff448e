"""Configuration of an earlier run whose files were damaged or edited."""

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
