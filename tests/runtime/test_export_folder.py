"""Folders that an export may replace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlctl.errors import ConfigError, ConflictError, NotFoundError, ResourceError
from rlctl.runs.run import Run, read_run
from rlctl.runs.run_dir import RunDir
from rlctl.runtime.checkpoint.export import MARKER, export
from rlctl.runtime.checkpoint.store import CONFIG, CheckpointStore
from tests.small_disk import small_disk


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a run with a checkpoint whose policy is one small file."""
    made = RunDir.create(tmp_path / "runs", "p", "r", "ppo")
    made.write_config("trainer: {}\n", {})
    store = CheckpointStore(made.path / "checkpoints")
    aside = store.begin(1)
    (aside / "huggingface").mkdir()
    (aside / "huggingface" / "config.json").write_text("{}")
    (aside / CONFIG).write_text("trainer: {}\n")
    store.finish(1)
    return read_run(made.path)


def test_force_replaces_an_export(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    export(run, None, target)  # an empty folder is accepted
    with pytest.raises(ConflictError, match="already exists"):
        export(run, None, target)
    (target / "config.json").unlink()
    export(run, None, target, force=True)
    assert json.loads((target / MARKER).read_text())["run"] == "p/r"
    assert (target / "config.json").exists()


def test_force_keeps_a_folder_with_anything_else(run: Run, tmp_path: Path) -> None:
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / "chapter1.tex").write_text("years of work")
    with pytest.raises(ConflictError, match=f"is not an export: it has no {MARKER}") as caught:
        export(run, None, thesis, force=True)
    assert caught.value.exit_code == 5
    model = tmp_path / "model"
    export(run, None, model)
    (model / "notes").mkdir()
    (model / "notes" / "mine.txt").write_text("mine")
    with pytest.raises(ConflictError, match=r"it also has notes/mine\.txt"):
        export(run, None, model, force=True)
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(ConflictError, match="is a file"):
        export(run, None, file, force=True)
    assert (thesis / "chapter1.tex").exists()
    assert (model / "notes" / "mine.txt").exists()


def test_a_full_disk_is_one_line(run: Run, tmp_path: Path) -> None:
    policy = CheckpointStore(run.path / "checkpoints").policy(None)
    (policy / "model.safetensors").write_bytes(b"x" * 100_000)
    with small_disk(tmp_path / "disk", "size=64k") as disk:
        with pytest.raises(ResourceError) as caught:
            export(run, None, disk / "model")
        assert not list(disk.iterdir())
    assert [str(each) for each in caught.value.problems] == [
        f"cannot write {tmp_path}/disk/model/model.safetensors: No space left on device"
    ]


def test_the_current_folder_is_refused(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" / "below")
    with pytest.raises(ConflictError, match="is the current folder"):
        export(run, None, Path(), force=True)
    with pytest.raises(ConflictError, match="is not an export"):
        export(run, None, Path(".."), force=True)


def test_a_missing_or_damaged_checkpoint_leaves_no_folder(run: Run, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="of step 99"):
        export(run, 99, tmp_path / "never")
    policy = CheckpointStore(run.path / "checkpoints").policy(None)
    (policy / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json has"):
        export(run, None, tmp_path / "never")
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
