"""Tests of real SwanLab in offline mode."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlctl.errors import MissingExtraError
from tests.processes import run_python

SCRIPT = """
import json, sys
from pathlib import Path
from rlctl.tracking.swanlab import SwanLabTracker
from rlctl.tracking.tracker import RunInfo, Sample
tracker = SwanLabTracker()
tracker.start(RunInfo("abc123", "house", "first", Path(sys.argv[1]), 3, {"trainer": {"seed": 1}}))
for step in (1, 2, 3):
    tracker.log(step, {"critic/score/mean": step / 4})
tracker.generations(3, [Sample("1+1?", "two #### 2", "2", 1.0, {}, 4, "stop", "x")])
tracker.finish("finished")
"""


def run(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SWANLAB_")}
    environment = kept | {"HOME": str(folder)} | environment
    return run_python("-c", SCRIPT, folder, cwd=folder, env=environment)


def records(folder: Path) -> bytes:
    (file,) = folder.glob("swanlog/run-*/*.swanlab")
    return file.read_bytes()


def test_without_a_key_swanlab_is_offline_and_never_prompts(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    written = records(tmp_path)
    assert b"critic/score/mean" in written
    assert b"val/generations" in written
    texts = [
        path.read_text()
        for path in tmp_path.glob("swanlog/run-*/**/*")
        if path.suffix in (".txt", ".md", ".json")
    ]
    assert any("two #### 2" in text for text in texts) or b"two #### 2" in written


def test_disabled_writes_nothing_and_unknown_modes_raise(tmp_path: Path) -> None:
    assert run(tmp_path, SWANLAB_MODE="disabled").returncode == 0
    assert not list(tmp_path.glob("swanlog/run-*/*.swanlab"))
    done = run(tmp_path, SWANLAB_MODE="clowd")
    assert done.returncode != 0
    assert "SWANLAB_MODE=clowd is not a mode" in done.stderr


def test_local_mode_without_the_dashboard_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("swanlab")
    from rlctl.tracking.swanlab import SwanLabTracker

    monkeypatch.setitem(sys.modules, "swanboard", None)
    with pytest.raises(MissingExtraError, match="needs its dashboard") as raised:
        SwanLabTracker.preflight("local")
    assert "rlctl[swanlab]" in str(raised.value)
