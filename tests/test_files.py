"""Tests of atomic writes."""

import pytest

from rlctl import files


def test_write_text_replaces_the_file_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "record.json"
    files.write_text(path, "old")
    files.write_text(path, "new é")
    assert path.read_text(encoding="utf-8") == "new é"
    assert [each.name for each in tmp_path.iterdir()] == ["record.json"]


def test_failed_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "record.json"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        files.write_text(path, "new \ud800")
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["record.json"]


def test_folder_appears_complete_or_not_at_all(tmp_path):
    target = tmp_path / "model"

    def fail() -> None:
        with files.replacing(target) as aside:
            aside.mkdir()
            (aside / "a").write_text("1")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not list(tmp_path.iterdir())
    with files.replacing(target) as aside:
        (aside / "sub").mkdir(parents=True)
        (aside / "sub" / "a").write_text("1")
        assert not target.exists()
    assert (target / "sub" / "a").read_text() == "1"
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


def test_fixed_temporary_name_removes_leftovers_of_a_killed_writer(tmp_path):
    leftover = tmp_path / ".model.partial"
    leftover.mkdir()
    (leftover / "old").write_text("torn")
    with files.replacing(tmp_path / "model", unique=False, sync=False) as aside:
        assert aside == leftover
        aside.mkdir()
    assert [each.name for each in (tmp_path / "model").iterdir()] == []


def test_folder_with_files_is_not_replaced(tmp_path):
    target = tmp_path / "model"
    target.mkdir()
    (target / "kept").write_text("1")
    with pytest.raises(OSError), files.replacing(target) as aside:
        aside.mkdir()
    assert (target / "kept").exists()


def test_copies_of_a_step_are_no_steps(tmp_path):
    names = ["step_000020", "step_1000000", "step_000003", "step_000020_1", "step_000020.bak"]
    for name in (*names, "step_20", "step_", "step_٠٠٠٠٢٠", "step_0000020", "step_000020 (1)"):
        (tmp_path / name).mkdir()
    assert list(files.by_step(tmp_path)) == [3, 20, 1_000_000]
    (tmp_path / "step_000004.jsonl").touch()
    (tmp_path / "step_000004 (1).jsonl").touch()
    assert files.by_step(tmp_path, ".jsonl") == {4: tmp_path / "step_000004.jsonl"}


def test_free_space_of_a_path_that_does_not_exist_is_that_of_its_parent(tmp_path):
    assert files.free_space(tmp_path / "a" / "b") > 0
