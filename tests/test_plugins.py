"""Finding parts by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlctl import plugins
from rlctl.errors import ConfigError, MissingExtraError, UsageError


def test_names_are_listed_without_importing() -> None:
    code = "import sys; from rlctl import plugins; assert 'ppo' in plugins.names('algorithms'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert plugins.names("rewards")[:1] == ["gsm8k"]
    assert plugins.names("nothing") == []


def test_an_unknown_name_is_corrected() -> None:
    with pytest.raises(ConfigError, match="unknown reward 'gms8k'") as caught:
        plugins.load("rewards", "gms8k")
    assert caught.value.problems[0].hint == "did you mean 'gsm8k'? known: gsm8k, or module:Name"
    with pytest.raises(UsageError):
        plugins.load("algorithms", "zzz", unknown=UsageError)


def test_module_and_name() -> None:
    assert plugins.load("rewards", "rlctl.plugins:load") is plugins.load
    with pytest.raises(ConfigError, match=r"no module named 'rlctl.nothing'"):
        plugins.load("rewards", "rlctl.nothing:x")
    with pytest.raises(ConfigError, match=r"'rlctl.plugins' has no 'lode'") as caught:
        plugins.load("rewards", "rlctl.plugins:lode")
    assert "did you mean 'load'" in str(caught.value.problems[0].hint)


def test_a_part_whose_package_is_missing_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needy_part.py").write_text("import surely_not_installed.deep\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        MissingExtraError, match="needs the package 'surely_not_installed'"
    ) as caught:
        plugins.load("loggers", "needy_part:Thing")
    assert caught.value.problems[0].hint == "pip install surely_not_installed"


def test_an_entry_point_with_an_extra_names_the_extra(
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


def test_suggestion_lists_what_is_known() -> None:
    assert plugins.suggestion("x", []) == "known: none"
