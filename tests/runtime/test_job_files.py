"""Files of a project that a Ray job gets, and its submission."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlctl.errors import ConflictError
from rlctl.runtime.cluster import jobs
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


@pytest.mark.parametrize("started", [True, False])
def test_a_lost_connection_to_the_agent_submits_the_job_once(
    started: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent that accepts jobs may close the connection before or after it has the job."""
    known: list[str] = []

    def submit_job(submission_id: str, **_: object) -> None:
        if not known:
            known.append("seen")
            if started:
                known.append(submission_id)
            raise RuntimeError("status code 500: aiohttp ServerDisconnectedError")
        if submission_id in known:
            raise RuntimeError("Job with submission_id j already exists")
        known.append(submission_id)

    client = SimpleNamespace(submit_job=submit_job)
    monkeypatch.setattr(jobs, "_client", lambda _: client)
    monkeypatch.setattr(jobs.time, "sleep", lambda _: None)
    jobs.submit("http://h:8265", "j", ["train", "ppo"], tmp_path)
    assert known == ["seen", "j"]
    with pytest.raises(ConflictError, match="the cluster has a job named 'j'"):
        jobs.submit("http://h:8265", "j", ["train", "ppo"], tmp_path)
