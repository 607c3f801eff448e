"""Tests of plug-ins: look-up by name, settings and unused keys."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import Field

from rlctl import plugins
from rlctl.errors import ConfigError, MissingExtraError


def test_names_are_listed_without_importing() -> None:
    code = (
        "import sys; from rlctl import plugins; assert 'ppo' in plugins.names('algorithms'); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert plugins.names("samplers") == ["curriculum", "random", "sequential", "thompson"]
    assert plugins.names("nothing") == []


def test_unknown_name_raises_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="unknown reward 'gms8k'") as caught:
        plugins.load("rewards", "gms8k")
    known = ", ".join(plugins.names("rewards"))
    assert "geo3k, gsm8k" in known
    hint = f"did you mean 'gsm8k'? known: {known}, FILE.py:NAME or module:NAME"
    assert caught.value.problems[0].hint == hint
    with pytest.raises(ConfigError) as caught:
        plugins.load("environments", "game.py")
    assert str(caught.value.problems[0].hint).endswith("game.py:NAME or module:NAME")


def test_plugin_is_found_by_module_and_name() -> None:
    assert plugins.load("rewards", "rlctl.plugins:load") is plugins.load
    with pytest.raises(ConfigError, match=r"no module named 'rlctl.nothing'"):
        plugins.load("rewards", "rlctl.nothing:x")
    with pytest.raises(ConfigError, match=r"'rlctl.plugins' has no 'laod'") as caught:
        plugins.load("rewards", "rlctl.plugins:laod")
    assert "did you mean 'load'" in str(caught.value.problems[0].hint)


def test_modules_of_the_current_folder_are_found(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "own_estimator.py").write_text("def plain(): ...\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert plugins.load("advantages", "own_estimator:plain").__module__ == "own_estimator"
    assert sys.path[-1] == str(here)
    with pytest.raises(ConfigError) as caught:
        plugins.load("advantages", "own_estimator.py:plain")
    assert caught.value.problems[0].hint.startswith("write own_estimator:plain;")
    with pytest.raises(ConfigError, match="not of the form module:Name") as caught:
        plugins.load("advantages", "own/estimator.py:plain")
    assert "write own.estimator:plain" in str(caught.value.problems[0].hint)


def test_missing_package_raises_with_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needy_plugin.py").write_text("import surely_not_installed.deep\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        MissingExtraError, match="needs the package 'surely_not_installed'"
    ) as caught:
        plugins.load("loggers", "needy_plugin:Thing")
    assert caught.value.problems[0].hint == "pip install surely_not_installed"


def test_missing_package_of_an_extra_raises_with_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needy_logger.py").write_text("import surely_not_installed\n")
    info = tmp_path / "needy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: needy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rlctl.loggers]\nneedy = needy_logger:Thing [fancy]\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "needy" in plugins.names("loggers")
    with pytest.raises(MissingExtraError) as caught:
        plugins.load("loggers", "needy")
    assert caught.value.problems[0].hint == "pip install 'needy[fancy]'"


class _Settings(plugins.Params):
    beta: float = Field(default=0.1, gt=0, description="weight of the penalty")
    keys: tuple[str, ...] | None = Field(default=None, description="components that count")


@plugins.declare(Params=_Settings, unused_keys=lambda config: {"actor.clip_*": config}, needs=None)
def _part() -> None: ...


def test_params_are_validated_and_typed() -> None:
    assert plugins.params_model(_part) is _Settings
    assert plugins.parse_params(_part, "part", {}, "a.params") == _Settings()
    parsed = plugins.parse_params(_part, "part", {"beta": 2, "keys": ["x", "y"]}, "a.params")
    assert parsed == _Settings(beta=2.0, keys=("x", "y"))
    assert not hasattr(_part, "needs")


def test_params_report_every_wrong_field_with_its_key() -> None:
    given = {"beta": -1, "keys": [1, 2], "bata": 3}
    with pytest.raises(ConfigError) as caught:
        plugins.parse_params(_part, "part", given, "a.params")
    beta, keys, bata = caught.value.problems
    assert (beta.where, beta.hint) == ("a.params.beta", "weight of the penalty")
    assert beta.message == "beta of part should be greater than 0, not -1"
    assert keys.where == "a.params.keys"
    assert "should be a valid string, not 1" in keys.message
    assert (bata.where, bata.message) == ("a.params.bata", "part has no setting 'bata'")
    assert "did you mean 'beta'" in str(bata.hint)


def test_a_plugin_without_params_refuses_settings() -> None:
    assert plugins.params_model(plugins.load) is None
    assert plugins.parse_params(plugins.load, "plain", {}, "a.params") is None
    with pytest.raises(ConfigError, match="plain has no settings, given: beta") as caught:
        plugins.parse_params(plugins.load, "plain", {"beta": 1}, "a.params")
    assert caught.value.problems[0].where == "a.params"


def test_unused_keys_are_optional() -> None:
    assert plugins.unused_keys(_part, "why") == {"actor.clip_*": plugins.Unused("why")}
    assert plugins.unused_keys(plugins.load, None) == {}
