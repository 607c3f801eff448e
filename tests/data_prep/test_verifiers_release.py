"""Releases of verifiers that rlctl does not play are named with those that it does."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from rlctl.data_prep.verifiers_range import check_release
from rlctl.data_prep.verifiers_rows import VerifiersParams, verifiers
from rlctl.errors import MissingExtraError, UsageError
from rlctl.runtime.agents.programs.verifiers_program import VerifiersParams as ProgramParams
from rlctl.runtime.agents.programs.verifiers_program import VerifiersProgram


@pytest.mark.parametrize(
    ("release", "is_played"),
    [
        ("0.1.9.post3", False),
        ("0.1.14", True),
        ("0.2.0", True),
        ("0.3.1.dev7", True),
        ("0.4.0", False),
        ("1.0", False),
    ],
)
def test_the_range(release: str, is_played: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: release)
    if is_played:
        check_release()
        return
    with pytest.raises(MissingExtraError, match=rf"its release is {release}, and .* 0\.1\.14 to"):
        VerifiersProgram(ProgramParams(environment="wordle"))


def test_another_interpreter_names_its_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "verifiers-0.4.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: verifiers\nVersion: 0.4.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"ImportError: its release is 0\.4\.0"):
        verifiers(VerifiersParams(environment="wordle", python=sys.executable))
