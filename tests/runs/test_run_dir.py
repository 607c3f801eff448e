"""A run's folder: its layout, its record, and that nothing of it is ever half there."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from rlctl.data_prep.sources import data_hashes
from rlctl.errors import ConfigError, ConflictError, ResourceError, UsageError
from rlctl.process import relaxed_umask
from rlctl.recipes.layers import Origin
from rlctl.runs import folders_elsewhere, provenance, trash
from rlctl.runs.details import changed_settings
from rlctl.runs.events import read_events
from rlctl.runs.folders_elsewhere import place
from rlctl.runs.naming import check_free
from rlctl.runs.record import RunRecord
from rlctl.runs.run import build_run
from rlctl.runs.run_dir import RunDir
from rlctl.runs.store import RunStore
from tests.small_disk import fill, small_disk


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_new_run_has_folders_record_and_attempt(tmp_path):
    run = RunDir.create(tmp_path, "gsm8k", None, "recipes/my_ppo.yaml")
    assert run.path.parent == tmp_path / "gsm8k"
    assert re.fullmatch(r"my_ppo-\d{6}-\d{6}-[a-z]{3}", run.path.name)
    assert sorted(each.name for each in run.path.iterdir()) == [
        ".lock",
        "attempts",
        "checkpoints",
        "events.jsonl",
        "generations",
        "run.json",
    ]
    raw = json.loads((run.path / "run.json").read_text())
    assert (raw["name"], raw["project"], raw["state"], raw["attempts"]) == (
        run.path.name,
        "gsm8k",
        "starting",
        1,
    )
    assert raw["process"]["pid"] == os.getpid()
    assert raw["versions"]["python"] == sys.version.split()[0]
    assert raw["command"][0] == "rlctl"
    assert run.attempt == run.path / "attempts" / "1"
    assert (run.path / "attempts" / "latest").resolve() == run.attempt
    assert run.checkpoint(20) == run.path / "checkpoints" / "step_000020"
    assert run.metrics == run.path / "metrics.jsonl"


def test_a_copy_without_empty_folders_starts_an_attempt(tmp_path):
    run = RunDir.create(tmp_path, "p", "first", "ppo")
    run.attempt.rmdir()
    (run.path / "attempts" / "latest").unlink()
    run.attempt.parent.rmdir()
    assert run.new_attempt() == run.path / "attempts" / "2"


def test_record_and_events_follow_the_run(tmp_path):
    run = RunDir.create(tmp_path, "p", "first", "ppo")
    run.update(state="running", total_steps=40, seeds={"trainer": 1})
    with (run.path / "events.jsonl").open("a") as file:
        file.write('{"time": "20')  # a power cut
    run.event("checkpoint", step=20, path=run.checkpoint(20))
    run.finish("failed", 7)
    run.new_attempt()
    reopened = RunDir(run.path).record
    assert (reopened.state, reopened.attempts, reopened.exit_code, reopened.ended) == (
        "starting",
        2,
        None,
        None,
    )
    assert (reopened.total_steps, reopened.seeds) == (40, {"trainer": 1})
    assert (run.path / "attempts" / "latest").readlink() == Path("2")
    events = lines(run.path / "events.jsonl")
    assert [event["kind"] for event in events] == ["attempt", "checkpoint", "failed", "attempt"]
    assert events[1]["step"] == 20
    assert events[1]["path"] == str(run.checkpoint(20))
    assert events[2]["exit_code"] == 7


def test_config_and_origins_are_written_as_given(tmp_path, caplog):
    run = RunDir.create(tmp_path, "p", "r", "ppo")
    base, recipe, typed = (
        Origin(1, "base.yaml:3", 1),
        Origin(2, "ppo.yaml:5", 2),
        Origin(3, "override trainer.seed=3", 3),
    )
    origins = {
        "trainer.seed": [base, recipe, typed],
        "a": [base],
        "b": [recipe],
        "c": [base, Origin(1, "x", 3)],
    }
    run.write_config("trainer:\n  seed: 3\n", origins)
    assert (run.path / "config.yaml").read_text() == "trainer:\n  seed: 3\n"
    chains = json.loads((run.path / "origins.json").read_text())
    assert chains["trainer.seed"][1] == {"value": 2, "where": "ppo.yaml:5", "level": 2}
    assert changed_settings(run.path) == {
        "trainer.seed": {"value": 3, "base": 1, "where": "override trainer.seed=3"},
        "b": {"value": 2, "base": None, "where": "ppo.yaml:5"},
    }
    for damaged in ("", "[]", '{"a": []}', '{"a": 1}', '{"a": ["x"]}'):
        caplog.clear()
        (run.path / "origins.json").write_text(damaged)
        assert changed_settings(run.path) == {}
        assert f"{run.path}/origins.json cannot be read" in caplog.text


def test_existing_name_is_a_conflict_with_a_suggestion(tmp_path):
    RunDir.create(tmp_path, "p", "r", "ppo")
    RunDir.create(tmp_path, "p", "r-2", "ppo")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConflictError, match="'r' already exists") as caught:
        RunDir.create(tmp_path, "p", "r", "ppo")
    assert "the name r-3 is free" in (caught.value.problems[0].hint or "")
    assert sorted(tmp_path.rglob("*")) == before
    RunDir.create(tmp_path, "other", "r", "ppo")  # the same name in another project is another run


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "-n", "@last", "a\nb", "a\udcff"])
def test_invalid_folder_names_are_refused(tmp_path, name):
    with pytest.raises(UsageError):
        check_free(tmp_path, "p", name)
    with pytest.raises(UsageError):
        check_free(tmp_path, name, None)
    assert list(tmp_path.iterdir()) == []


def test_unwritable_folder_is_a_resource_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="cannot create the run's folder"):
        RunDir.create(tmp_path / "file", "p", "r", "ppo")


def test_newer_record_is_read_and_damaged_record_raises(tmp_path):
    path = RunDir.create(tmp_path, "p", "r", "ppo").path / "run.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | {"mood": "good"}))
    assert RunRecord.read(path).name == "r"
    for damaged in (
        "",
        "[]",
        "{}",
        json.dumps({name: value for name, value in raw.items() if name != "created"}),
    ):
        path.write_text(damaged)
        with pytest.raises(ConfigError, match="not a run record"):
            RunRecord.read(path)


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    return subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()


def test_git_state(tmp_path):
    assert provenance.git_state(tmp_path) is None
    git(tmp_path, "init", "-q")
    assert provenance.git_state(tmp_path) is None  # nothing committed yet
    (tmp_path / "a.txt").write_text("one\n")
    git(tmp_path, "add", "a.txt")
    git(tmp_path, "commit", "-q", "-m", "one")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert provenance.git_state(tmp_path) == {"commit": commit, "diff_sha256": None}
    (tmp_path / "a.txt").write_text("two\n")
    changed = provenance.git_state(tmp_path)
    assert changed is not None
    assert changed["commit"] == commit
    assert re.fullmatch(r"[0-9a-f]{64}", changed["diff_sha256"] or "")
    (tmp_path / "a.txt").write_text("three\n")
    assert provenance.git_state(tmp_path) != changed


def test_git_state_runs_no_program_of_the_repository(tmp_path):
    """Hooks, monitors, filters and converters are programs that `.git/config` names."""
    git(tmp_path, "init", "-q")
    (tmp_path / ".gitattributes").write_text("a.txt filter=evil diff=evil\n")
    (tmp_path / "a.txt").write_text("one\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    before = provenance.git_state(tmp_path)
    program = tmp_path / "program.sh"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\ncat\n")
    program.chmod(0o755)
    (tmp_path / "included").write_text(f'[filter "evil"]\nprocess = {program}\nrequired = true\n')
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    for name in ("post-index-change", "fsmonitor-watchman"):
        shutil.copy(program, hooks / name)
    for key in ("core.fsmonitor", "diff.external", "filter.evil.clean", "diff.evil.textconv"):
        git(tmp_path, "config", key, str(program))
    for key, value in {
        "core.hooksPath": hooks,
        "diff.evil.command": program,
        "include.path": tmp_path / "included",
    }.items():
        git(tmp_path, "config", key, str(value))
    (tmp_path / "a.txt").write_text("two\n")
    state = provenance.git_state(tmp_path)
    assert state is not None
    assert (state["commit"], state["diff_sha256"] is not None) == (before["commit"], True)
    assert not (tmp_path / "ran").exists()


def test_data_hashes(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    # FIPS 180-2, appendix B.1
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert data_hashes([str(tmp_path / "a")], "train") == {str(tmp_path / "a"): expected}


KILLED = """
import os, signal, sys
from pathlib import Path
from rlctl.runs.run import build_run
from rlctl.runs.run_dir import RunDir
with RunDir.creating(Path(sys.argv[1]), "p", "r", "ppo") as run:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_start_leaves_the_name_free(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert done.returncode == -9
    assert len(list((tmp_path / "p").iterdir())) == 1
    assert RunStore(tmp_path).runs() == []
    (abandoned,) = (tmp_path / "p").iterdir()
    os.utime(abandoned, (0, 0))  # a new one may be another process's
    with RunDir.creating(tmp_path, "p", "r", "ppo") as run:
        assert not (tmp_path / "p" / "r").exists()
        run.write_config("{}", {})
    assert [path.name for path in (tmp_path / "p").iterdir()] == ["r"]
    assert run.path == tmp_path / "p" / "r"


def test_of_two_processes_that_create_a_run_one_succeeds(tmp_path):
    with (
        pytest.raises(ConflictError, match="'r' already exists"),
        RunDir.creating(tmp_path, "p", "r", "ppo"),
    ):
        RunDir.create(tmp_path, "p", "r", "grpo")
    assert RunDir(tmp_path / "p" / "r").record.recipe == "grpo"
    assert [path.name for path in (tmp_path / "p").iterdir()] == ["r"]


def test_events_wait_in_memory_while_the_disk_is_full(tmp_path):
    with small_disk(tmp_path / "disk", "size=64k") as disk:
        run = RunDir.create(disk, "p", "r", "ppo")
        filler = fill(disk)
        run.event("first", text="x" * 5000)
        run.finish("failed", 1)
        assert RunDir(run.path).record.state == "failed"
        filler.unlink()
        run.event("second")
        kinds = [event["kind"] for event in read_events(run.path)]
    assert kinds == ["attempt", "first", "failed", "second"]


@pytest.mark.parametrize("hours", [-2, 3])
def test_durations_do_not_depend_on_the_clock(tmp_path, monkeypatch, hours):
    """Set the clock back or forward during a run, a kill and a second attempt."""
    run = RunDir.create(tmp_path, "p", "r", "ppo")
    shifted = (datetime.now(UTC) + timedelta(hours=hours)).isoformat()
    monkeypatch.setattr("rlctl.runs.run_dir.now", lambda: shifted)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert 0 <= RunStore(tmp_path).find("r").seconds < 600
    run.event("checkpoint", step=1)
    killed_after = read_events(run.path)[-1]["seconds"]
    run = RunDir(run.path)
    run.new_attempt()
    run.finish("finished", 0)
    assert killed_after <= run.record.seconds < 600
    assert RunStore(tmp_path).find("r").seconds == run.record.seconds


@pytest.mark.parametrize(("access", "mode"), [("owner", 0o700), ("group", 0o750), ("all", 0o755)])
@pytest.mark.parametrize("umask", [0, 0o077])
def test_access_does_not_depend_on_the_umask(tmp_path, access, mode, umask):
    before = os.umask(umask)
    try:
        with relaxed_umask(access):
            run = RunDir.create(tmp_path / "runs", "p", "r", "ppo", access)
            place(run, "checkpoints", str(tmp_path / "elsewhere"))
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
    assert run.path.stat().st_mode & 0o777 == mode
    for path in (run.path / "run.json", run.path.parent, *run.path.glob("*/")):
        assert path.stat().st_mode & mode & 0o444 == mode & 0o444, path
    assert (tmp_path / "elsewhere" / "p" / "r").stat().st_mode & 0o777 == mode


def test_emptied_trash_frees_folders_elsewhere(tmp_path):
    """Another run of the name gets the folder, and a folder that another run claims is kept."""
    root, disk = tmp_path / "runs", str(tmp_path / "disk")
    run = RunDir.create(root, "p", "r", "ppo")
    place(run, "checkpoints", disk)
    (run.path / "checkpoints" / "weights").write_bytes(bytes(1000))
    other = RunDir.create(tmp_path / "others", "p", "o", "ppo")
    place(other, "rollouts", disk)
    (run.path / "rollouts").symlink_to((other.path / "rollouts").resolve())
    run.finish("finished", 0)
    trash.remove(build_run(run.path))
    again = RunDir.create(root, "p", "r", "ppo")
    with pytest.raises(ConflictError, match="files of another run"):
        place(again, "checkpoints", disk)
    assert trash.removed_runs(root)[0].num_bytes > 1000
    trash.empty(root)
    assert not (tmp_path / "disk" / "p" / "r").exists()
    assert (tmp_path / "disk" / "p" / "o").is_dir()
    place(again, "checkpoints", disk)


def test_runs_that_cannot_be_deleted_are_reported(tmp_path, monkeypatch):
    root = tmp_path / "runs"
    for name in ("a", "b"):
        RunDir.create(root, "p", name, "ppo").finish("finished", 0)
        trash.remove(RunStore(root).find(name))
    rmtree = shutil.rmtree

    def fail(path, **given):
        if path.name == "a":
            raise PermissionError(13, "Permission denied", str(path))
        rmtree(path, **given)

    monkeypatch.setattr(shutil, "rmtree", fail)
    with pytest.raises(ResourceError, match=r"1 of 2 runs cannot be deleted: p/a: .*Permission"):
        trash.empty(root)
    assert [each.key for each in trash.removed_runs(root)] == ["p/a"]


@pytest.mark.parametrize("outward", [True, False])
def test_killed_between_the_renames_of_a_move_keeps_the_content(tmp_path, outward):
    """Exit while a folder is replaced by a link, or a link by a folder."""
    elsewhere, run = str(tmp_path / "elsewhere"), RunDir.create(tmp_path / "runs", "p", "r", "ppo")
    (run.path / "checkpoints" / "step_000001").mkdir()
    if not outward:
        place(run, "checkpoints", elsewhere)
    if (child := os.fork()) == 0:
        replace = Path.replace
        Path.replace = lambda path, to: (
            os._exit(9) if path.name.startswith(".checkpoints") else replace(path, to)
        )
        place(run, "checkpoints", elsewhere if outward else None)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert not (run.path / "checkpoints").exists()
    folders_elsewhere.complete(run.path)
    assert (run.path / "checkpoints" / "step_000001").is_dir()
    assert (run.path / "checkpoints").is_symlink() == outward
    place(run, "checkpoints", elsewhere if outward else None)
    assert [each.name for each in run.path.iterdir() if each.name.startswith(".")] == [".lock"]


def test_the_record_has_no_secrets(tmp_path, monkeypatch):
    words = ["rlctl", "train", "ppo", "+a.api_key=planted, really", "+b=https://u:planted@h/"]
    monkeypatch.setattr("sys.argv", words)
    run = RunDir.create(tmp_path, "p", "r", "ppo")
    run.update(data={"https://h/x?token=planted": "hash"})
    run.event("any", text="password=planted", urls=["s3://k:planted@b"])
    written = "".join(path.read_text() for path in run.path.glob("*.json*"))
    assert "planted" not in written
    assert json.loads((run.path / "run.json").read_text())["command"][3:] == [
        "+a.api_key=<secret>",
        "+b=https://<secret>@h/",
    ]


def test_two_runs_of_one_name_do_not_share_a_folder_elsewhere(tmp_path):
    first, second = (RunDir.create(tmp_path / root, "p", "r", "ppo") for root in ("a", "b"))
    place(first, "checkpoints", str(tmp_path / "disk"))
    place(first, "checkpoints", str(tmp_path / "disk"))
    with pytest.raises(ConflictError, match="files of another run named 'r'"):
        place(second, "checkpoints", str(tmp_path / "disk"))
    place(first, "checkpoints", None)
    place(second, "checkpoints", str(tmp_path / "disk"))


def test_a_folder_that_a_write_has_made_again_is_gone(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "p", "r", "ppo")
    assert not run.is_gone()
    shutil.rmtree(run.path)
    assert run.is_gone()
    (run.path / "checkpoints").mkdir(parents=True)
    assert run.is_gone()
