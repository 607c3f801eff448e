"""Selection of files for `trainer.mirror`; e2e/test_storage.py copies them."""

from __future__ import annotations

from pathlib import Path

from rlctl.runtime.checkpoint.remote_copy import _plain_files


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
