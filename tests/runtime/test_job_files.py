"""Files of a project that a Ray job gets, its submission and its result."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.exceptions import RpcError

from rlctl.__main__ import main
from rlctl.errors import ConflictError, ResourceError
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


def test_unreachable_cluster_is_an_error(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and does not listen: the port refuses connections
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert main(["train", "grpo", "--address", address]) == 7
    assert "no Ray cluster replied" in capsys.readouterr().err


def test_a_cluster_without_its_controller_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: str) -> None:
        raise RpcError("Timed out while waiting for GCS to become available.")

    monkeypatch.setattr(jobs, "JobSubmissionClient", refuse)
    with pytest.raises(ResourceError, match="no Ray cluster replied: Timed out"):
        jobs.follow("auto", "job", print)


def test_network_interfaces_of_this_machine_reach_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    client = SimpleNamespace(submit_job=lambda entrypoint, **_: sent.append(entrypoint))
    monkeypatch.setattr(jobs, "_client", lambda _: client)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth1,eth2")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    jobs.submit("http://h:8265", "j", ["train", "ppo"], tmp_path)
    assert sent == ["env NCCL_SOCKET_IFNAME=eth1,eth2 python -m rlctl train ppo"]
