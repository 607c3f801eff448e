"""Folders elsewhere of copied, moved and removed runs: the original keeps its files."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path

import pytest

from rlctl.errors import ConflictError
from rlctl.runs import trash
from rlctl.runs.folders_elsewhere import is_foreign, place
from rlctl.runs.prune import Pruning, prune
from rlctl.runs.run_dir import RunDir
from rlctl.runs.store import RunStore


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "disk"


@pytest.fixture
def run(tmp_path: Path, disk: Path) -> RunDir:
    """Return a finished run whose checkpoints and rollouts are on another disk."""
    with RunDir.creating(tmp_path / "A" / "runs", "p", "r", "ppo") as run:
        place(run, "checkpoints", str(disk))
        place(run, "rollouts", str(disk / "rollouts"))
        run.write_config(f"trainer: {{run_dir: {tmp_path}/A/runs}}\n", {})
    for step in ("step_000001", "step_000002"):
        (run.path / "checkpoints" / step).mkdir()
        (run.path / "rollouts" / f"{step}.jsonl").write_text("{}\n")
    run.finish("finished", 0)
    return run


def copied(run: RunDir, tmp_path: Path) -> RunDir:
    """Copy the run's working folder, with its links and times, and start to resume the copy."""
    shutil.copytree(tmp_path / "A", tmp_path / "B", symlinks=True)
    return RunDir.reopen(tmp_path / "B" / run.path.relative_to(tmp_path / "A"))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def both(disk: Path) -> None:
    """Check that the original has both checkpoints and both files of responses."""
    assert names(disk / "p" / "r") == ["step_000001", "step_000002"]
    assert names(disk / "rollouts" / "p" / "r") == ["step_000001.jsonl", "step_000002.jsonl"]


@pytest.mark.parametrize("outside", ["same", "other", None])
def test_a_resumed_copy_gets_folders_of_its_own(run, tmp_path, disk, caplog, outside):
    copy = copied(run, tmp_path)
    folder = {"same": str(disk), "other": str(tmp_path / "other"), None: None}[outside]
    place(copy, "checkpoints", folder)
    assert "not certainly this run's" in caplog.text
    assert names(copy.path / "checkpoints") == ["step_000001", "step_000002"]
    shutil.rmtree((copy.path / "checkpoints").resolve() / "step_000001")
    (copy.path / "checkpoints" / "step_000003").mkdir()
    both(disk)
    copy.finish("stopped", 0)
    again = RunDir.reopen(copy.path)
    target = (copy.path / "checkpoints").resolve()
    place(again, "checkpoints", folder)
    assert (again.path / "checkpoints").resolve() == target
    assert names(target) == ["step_000002", "step_000003"]
    again.finish("finished", 0)
    original = RunDir.reopen(run.path)
    place(original, "checkpoints", str(disk))
    both(disk)


def test_relative_folder_in_a_copied_working_folder(run, tmp_path, disk):
    """B has a folder of the name that the copy would take: nothing of A is deleted."""
    copy = copied(run, tmp_path)
    shutil.copytree(disk, tmp_path / "B" / "ck", symlinks=True)
    place(copy, "checkpoints", str(tmp_path / "B" / "ck"))
    both(disk)
    assert names(copy.path / "checkpoints") == ["step_000001", "step_000002"]


def test_a_removed_copy_leaves_the_folders_of_the_original(run, tmp_path, disk):
    copy = copied(run, tmp_path)
    copy.finish("finished", 0)
    root = tmp_path / "B" / "runs"
    trash.remove(RunStore(root).find("r"))
    assert [item.elsewhere for item in trash.removed_runs(root)] == [[]]
    trash.empty(root)
    both(disk)
    root = tmp_path / "A" / "runs"
    trash.remove(RunStore(root).find("r"))
    trash.empty(root)
    assert not (disk / "p" / "r").exists()
    assert [path for path in disk.rglob("*") if path.is_file()] == []


def test_a_copy_is_not_pruned(run, tmp_path, disk):
    copy = copied(run, tmp_path)
    copy.finish("finished", 0)
    found = RunStore(tmp_path / "B" / "runs").find("r")
    with pytest.raises(ConflictError, match="may be another run's"):
        prune(Pruning(found, {1: 0}, [2], {}))
    both(disk)
    prune(Pruning(RunStore(tmp_path / "A" / "runs").find("r"), {1: 0}, [2], {}))
    assert names(disk / "p" / "r") == ["step_000002"]


def test_hard_linked_copy_is_a_copy(run, tmp_path):
    shutil.copytree(run.path, tmp_path / "linked", symlinks=True, copy_function=os.link)
    RunDir.reopen(run.path).finish("finished", 0)
    place(original := RunDir.reopen(run.path), "checkpoints", str(tmp_path / "disk"))
    original.finish("finished", 0)
    assert is_foreign(tmp_path / "linked", run.record, "checkpoints")
    assert not is_foreign(run.path, run.record, "checkpoints")


def test_moved_run_keeps_its_folders(run, tmp_path, disk):
    (tmp_path / "A").rename(tmp_path / "moved")
    moved = RunDir.reopen(tmp_path / "moved" / "runs" / "p" / "r")
    place(moved, "checkpoints", str(disk))
    assert (moved.path / "checkpoints").resolve() == disk / "p" / "r"
    shutil.copytree(moved.path, run.path, symlinks=True)
    assert is_foreign(run.path, run.record, "checkpoints")
    place(moved, "checkpoints", None)
    assert names(moved.path / "checkpoints") == ["step_000001", "step_000002"]
    assert not (disk / "p" / "r").exists()


def test_other_hosts_of_a_shared_disk_have_the_run(run, tmp_path, disk, monkeypatch):
    """The folder is the same on another host, but a folder copied to its disk is not."""
    monkeypatch.setattr(socket, "gethostname", lambda: "other")
    assert not is_foreign(run.path, run.record, "checkpoints")
    run.path.rename(tmp_path / "aside")
    shutil.copytree(tmp_path / "aside", run.path, symlinks=True)
    assert is_foreign(run.path, run.record, "checkpoints")


def test_claims_of_earlier_versions_are_of_the_run_where_it_was_started(run, tmp_path, disk):
    for claim in (disk / "p" / ".r.run", disk / "rollouts" / "p" / ".r.run"):
        claim.write_text(json.dumps({"run": run.record.id}))
    shutil.copytree(tmp_path / "A", tmp_path / "B", symlinks=True)
    copy = tmp_path / "B" / "runs" / "p" / "r"
    assert is_foreign(copy, run.record, "checkpoints")
    assert not is_foreign(run.path, run.record, "checkpoints")
    place(RunDir.reopen(run.path), "checkpoints", str(disk))
    assert json.loads((disk / "p" / ".r.run").read_text())["folder"] == str(run.path)


def test_a_link_without_a_claim_is_copied(run, tmp_path, disk):
    (disk / "p" / ".r.run").unlink()
    opened = RunDir.reopen(run.path)
    place(opened, "checkpoints", str(disk))
    place(opened, "checkpoints", None)
    assert names(run.path / "checkpoints") == ["step_000001", "step_000002"]
    both(disk)


def test_a_folder_elsewhere_is_locked_while_it_is_driven(run, tmp_path, disk):
    copy, original = copied(run, tmp_path), RunDir.reopen(run.path)
    place(original, "checkpoints", str(disk))
    if (child := os.fork()) == 0:
        try:
            place(copy, "checkpoints", None)
        except ConflictError as error:
            os._exit(9 if "another run writes to the folder" in str(error) else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    both(disk)


def test_parts_in_one_folder_move_together(tmp_path):
    run = RunDir.create(tmp_path / "runs", "p", "r", "ppo")
    for part in ("checkpoints", "rollouts"):
        place(run, part, str(tmp_path / "one"))
    (run.path / "checkpoints" / "step_000001").mkdir()
    (run.path / "rollouts" / "step_000001.jsonl").write_text("{}\n")
    for part in ("checkpoints", "rollouts"):
        place(run, part, str(tmp_path / "two"))
    assert names(run.path / "rollouts") == ["step_000001", "step_000001.jsonl"]
    assert not (tmp_path / "one" / "p" / "r").exists()
