"""Files of a project that a Ray job gets."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from rlctl.runtime.cluster.jobs import _files


def test_tracked_files_are_packed_wherever_they_are(tmp_path: Path) -> None:
    project, shared = tmp_path / "project", tmp_path / "shared"
    for name in ("build/reward.py", ".config/x.yaml", "runs/p/r/run.json", ".venv/a", "own.py"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).touch()
    (project / os.fsdecode(b"caf\xe9.txt")).touch()
    shared.mkdir()
    (shared / "lib.py").touch()
    (project / "linked").symlink_to(shared)
    git = ["git", "-C", str(project)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "build", ".config", "linked"], check=True)
    expected = {"build/reward.py", ".config/x.yaml", "linked/lib.py", "own.py"}
    expected.add(os.fsdecode(b"caf\xe9.txt"))
    assert {str(path) for path in _files(project)} == expected
