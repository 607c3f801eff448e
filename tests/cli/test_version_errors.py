"""Errors of libraries outside of the declared range name it, instead of a defect of rlctl."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest

from rlctl.installer import adapted
from rlctl.version_errors import outside_range

PARTS = "BaseDistribution CategoricalDistribution FloatDistribution IntDistribution".split()


def old_optuna(folder: Path, distributions: str) -> None:
    """Write a package of that name whose version is below the range."""
    info = folder / "optuna-3.0.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: optuna\nVersion: 3.0.0\n")
    (info / "top_level.txt").write_text("optuna\n")
    (folder / "optuna").mkdir()
    (folder / "optuna" / "__init__.py").touch()
    (folder / "optuna" / "distributions.py").write_text(distributions)
    (folder / "optuna" / "trial.py").write_text("class TrialState: pass\nFrozenTrial = TrialState")


@pytest.mark.parametrize(
    ("distributions", "reason"),
    [
        ("", "ImportError: cannot import name 'BaseDistribution'"),
        (
            "\n".join(f"{name} = object" for name in PARTS),
            "AttributeError: type object 'TrialState' has no attribute 'WAITING'",
        ),
    ],
)
def test_a_library_outside_of_the_range_is_named(
    distributions: str, reason: str, tmp_path: Path
) -> None:
    old_optuna(tmp_path / "packages", distributions)
    paths = [str(tmp_path / "packages"), os.environ.get("PYTHONPATH")]
    done = subprocess.run(
        [sys.executable, "-m", "rlctl", "sweep", "ppo", "data.seed=1,2", "--dry-run"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    wanted = next(text for text in requires("rlctl") or () if text.startswith("optuna"))
    assert done.returncode == 6, done.stderr
    assert f"optuna 3.0.0 is installed, and rlctl needs {wanted} ({reason}" in done.stderr
    command = adapted(f"pip install '{wanted}'")
    assert f"help: {command}\n" in done.stderr
    assert "rlctl explain E-VERSION" in done.stderr


def test_defects_of_rlctl_and_of_libraries_in_the_range_stay_defects() -> None:
    assert outside_range(AttributeError("x", name="x", obj=[])) is None
    assert outside_range(ImportError("no x", name="numpy")) is None
    assert outside_range(ValueError("x")) is None
