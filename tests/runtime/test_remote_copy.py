"""Selection of files for `trainer.mirror`; e2e/test_storage.py copies them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rlctl import remote_files as storage
from rlctl.errors import ConflictError, ResourceError
from rlctl.runs.folders_elsewhere import place
from rlctl.runs.run_dir import RunDir
from rlctl.runtime.training.checkpoint_store import CONFIG, STATE, CheckpointStore, Retention
from rlctl.runtime.training.remote_copy import RemoteCopy, _plain_files, check_remote_copy
from rlctl.runtime.training.remote_fetch import pull

EVERYTHING = Retention(None, None, True, 1)


def save(run: RunDir, step: int, acc: float = 0.0) -> None:
    store = CheckpointStore(run.path / "checkpoints")
    aside = store.begin(step)
    (aside / CONFIG).touch()
    (aside / STATE).write_text(json.dumps({"metrics": {"acc": acc}}))
    store.finish(step)


def copied(run: RunDir, url: str, retention: Retention) -> list[int]:
    copy = RemoteCopy(run, url, retention, 60.0)
    save(run, max(copy.store.steps(), default=0) + 20)
    run.finish("stopped", 0)
    copy.close()
    assert copy.failure is None
    return CheckpointStore(Path(url.removeprefix("file://")) / "checkpoints").steps()


@pytest.mark.parametrize(
    ("retention", "left"),
    [
        (EVERYTHING, [20, 40, 60, 80]),
        (Retention(2, None, True, 1), [60, 80]),
        (Retention(1, "acc", True, 1), [20, 60, 80]),  # 60 still exists here
    ],
)
def test_a_run_resumed_elsewhere_keeps_the_checkpoints_of_its_copy(
    tmp_path: Path, retention: Retention, left: list[int]
) -> None:
    url = f"file://{tmp_path}/copy"
    first = RunDir.create(tmp_path / "here", "p", "r", "ppo")
    for step, acc in ((20, 0.9), (40, 0.5)):
        save(first, step, acc)
    assert copied(first, url, EVERYTHING) == [20, 40, 60]
    (tmp_path / "copy/checkpoints/step_000062").mkdir()  # an upload that was interrupted
    (tmp_path / "copy/checkpoints/step_000062/state.json").touch()
    second = RunDir.reopen(pull(url, tmp_path / "there"), force=True)
    store = CheckpointStore(second.path / "checkpoints")
    assert store.steps() == [60]
    assert copied(second, url, retention) == left
    assert not (tmp_path / "copy/checkpoints/step_000062").exists()
    store.set_aside_after(60, "aside")  # a resume from step 60 undoes step 80
    save(second, 70)
    assert 80 not in copied(second, url, EVERYTHING)


def test_a_damaged_checkpoint_of_a_copy_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunDir.create(tmp_path / "here", "p", "r", "ppo")
    save(run, 1)
    url = f"file://{tmp_path}/copy"
    assert copied(run, url, EVERYTHING) == [1, 21]
    state = tmp_path / "copy/checkpoints/step_000021/state.json"
    state.write_text(state.read_text().replace("0", "1"))
    assert CheckpointStore(pull(url, tmp_path / "there") / "checkpoints").steps() == [1]
    assert "step_000021 is damaged: state.json has changed since it was written" in caplog.text


def test_a_folder_whose_copy_was_resumed_elsewhere_is_refused(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "here", "p", "r", "ppo")
    url = f"file://{tmp_path}/copies/p/r"
    copied(run, url, EVERYTHING)
    check_remote_copy(f"file://{tmp_path}/copies", "p", "r", run.path)
    second = RunDir.reopen(pull(url, tmp_path / "there"), force=True)
    copied(second, url, EVERYTHING)
    with pytest.raises(ConflictError, match="was resumed from its copy on"):
        check_remote_copy(f"file://{tmp_path}/copies", "p", "r", run.path)


def test_a_remote_copy_follows_no_link_but_parts_elsewhere(tmp_path: Path) -> None:
    run, disk = RunDir.create(tmp_path / "runs", "p", "r", "ppo"), tmp_path / "disk"
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "secret.txt").write_text("TOPSECRET")
    place(run, "rollouts", str(disk))
    (run.path / "rollouts" / "step_000001.jsonl").write_text("{}\n")
    (run.path / "note.txt").symlink_to(tmp_path / "private" / "secret.txt")
    save(run, 1)
    (run.path / "checkpoints" / "step_000001" / "more").symlink_to(tmp_path / "private")
    copied(run, f"file://{tmp_path}/copy", EVERYTHING)
    names = [path.name for path in (tmp_path / "copy").rglob("*")]
    assert "step_000001.jsonl" in names
    assert not {"secret.txt", "note.txt", "more"} & set(names)


def test_a_copied_folder_does_not_take_over_the_copy_of_a_later_original(tmp_path: Path) -> None:
    run, mirror = RunDir.create(tmp_path / "here", "p", "r", "ppo"), f"file://{tmp_path}/copies"
    save(run, 10)
    shutil.copytree(run.path, tmp_path / "there", symlinks=True)
    copied(run, f"{mirror}/p/r", EVERYTHING)
    with pytest.raises(ConflictError, match="has a checkpoint of step 30"):
        check_remote_copy(mirror, "p", "r", tmp_path / "there")
    CheckpointStore(run.path / "checkpoints").set_aside_after(10, "before_attempt_2")
    check_remote_copy(mirror, "p", "r", run.path)


def test_a_copy_that_cannot_be_written_is_refused_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match=r"copy of the run: .*/file is not a folder"):
        check_remote_copy(f"file://{tmp_path}/file/copies", "p", None, None)


def test_only_parts_of_a_run_may_be_links(tmp_path: Path) -> None:
    run, elsewhere, secret = tmp_path / "run", tmp_path / "elsewhere", tmp_path / "id_rsa"
    for folder in (run / "attempts" / "1", elsewhere):
        folder.mkdir(parents=True)
        (folder / "driver.log").write_text("log")
        (folder / "link.txt").symlink_to(secret)
        (folder / "folder").symlink_to(tmp_path)
    (run / "exports").symlink_to(elsewhere)
    secret.write_text("private")
    assert sorted(_plain_files(run)) == ["attempts/1/driver.log", "exports/driver.log"]


def test_a_checkpoint_is_sent_with_the_metrics_of_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Complete a checkpoint while files are sent: it waits for the next copy."""
    run = RunDir.create(tmp_path / "here", "p", "r", "ppo")
    save(run, 20)
    (run.path / "metrics.jsonl").write_text('{"step": 20}\n')
    put = storage.put

    def put_slowly(fs: object, files: dict[Path, str]) -> None:
        put(fs, files)
        if len(CheckpointStore(run.path / "checkpoints").steps()) == 1:
            (run.path / "metrics.jsonl").write_text('{"step": 20}\n{"step": 40}\n')
            save(run, 40)

    monkeypatch.setattr(storage, "put", put_slowly)
    copy = RemoteCopy(run, f"file://{tmp_path}/copy", EVERYTHING, 60.0)
    copy._copy()
    sent = CheckpointStore(tmp_path / "copy" / "checkpoints").steps()
    assert sent == [20]
    assert "40" not in (tmp_path / "copy" / "metrics.jsonl").read_text()
    run.finish("stopped", 0)
    copy.close()
    assert CheckpointStore(tmp_path / "copy" / "checkpoints").steps() == [20, 40]
    assert "40" in (tmp_path / "copy" / "metrics.jsonl").read_text()
