"""Runs in one file: a complete copy, and archives that somebody else has made."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from rlctl.runs.run_dir import RunDir
from rlctl.runtime.training.complete_checkpoints import damage
from tests.e2e.command import rlctl
from tests.recorded import exportable, record

ACC = "val-core/x/acc/mean@1"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Return a finished run with a checkpoint on another disk."""
    run = exportable(tmp_path / "runs")
    record(run.path, {1: {ACC: 0.5}})
    (run.attempt / "main.log").write_text("started\n")
    run.finish("finished", 0)
    disk = tmp_path / "disk"
    (run.path / "checkpoints").rename(disk)
    (run.path / "checkpoints").symlink_to(disk)
    (run.path / "link").symlink_to("/etc/passwd")
    return run


@pytest.mark.parametrize("ending", ["tar.zst", "tar.gz", "tar"])
def test_an_imported_run_is_complete(run: RunDir, tmp_path: Path, ending: str):
    file = tmp_path / f"a.{ending}"
    rlctl("runs", "export", "r", file, cwd=tmp_path)
    there = tmp_path / "there"
    done = rlctl("runs", "import", file, "--root", there, "--json", cwd=tmp_path)
    folder = there / "p" / "r"
    assert json.loads(done.stdout)["path"] == str(folder)
    assert json.loads((folder / "run.json").read_text())["id"] == run.record.id
    assert damage(folder / "checkpoints" / "step_000001") is None
    assert (folder / "attempts" / "latest").resolve() == folder / "attempts" / "1"
    assert not (folder / "link").exists()
    assert "50.0 %" in rlctl("show", "r", "--root", there, cwd=tmp_path).stdout
    taken = rlctl("runs", "import", file, "--root", there, cwd=tmp_path, code=5)
    assert "the name r-2 is free" in taken.stderr
    for name in ("../../out", "a/../b", str(tmp_path / "out"), ""):
        wrong = rlctl("runs", "import", file, "--root", there, "--name", name, cwd=tmp_path, code=2)
        assert "is not a valid run name" in wrong.stderr
    assert {path.name for path in (there / "p").glob("[!.]*")} == {"r"}
    assert not (tmp_path / "out").exists()
    rlctl("runs", "import", file, "--root", there, "--name", "r-2", cwd=tmp_path)
    assert (there / "p" / "r-2" / "metrics.jsonl").is_file()


def test_an_export_without_checkpoints_is_small_and_replaces_no_file(run: RunDir, tmp_path: Path):
    file = tmp_path / "a.tar.gz"
    rlctl("runs", "export", "r", file, "--no-checkpoints", cwd=tmp_path)
    lost = rlctl("runs", "export", "r", tmp_path / "no" / "a.tar.gz", cwd=tmp_path, code=2)
    assert f"there is no folder {tmp_path / 'no'}" in lost.stderr
    with tarfile.open(file) as tar:
        names = tar.getnames()
    assert names[-1] == "p/r/run.json"
    assert not any("checkpoints" in name for name in names)
    assert "already exists" in rlctl("runs", "export", "r", file, cwd=tmp_path, code=5).stderr
    assert "known ending" in rlctl("runs", "export", "r", "a.zip", cwd=tmp_path, code=2).stderr
    del run


def member(name: str, content: bytes = b"x", **fields: object) -> Callable[[tarfile.TarFile], None]:
    def add(tar: tarfile.TarFile) -> None:
        info = tarfile.TarInfo(name)
        info.size = len(content)
        for field, value in fields.items():
            setattr(info, field, value)
        tar.addfile(info, io.BytesIO(content) if info.isreg() else None)

    return add


def with_long_header(tar: tarfile.TarFile) -> None:
    info = tarfile.TarInfo("p/r/a")
    info.pax_headers = {"comment": "x" * 2**20}
    tar.addfile(info)


HOSTILE = {
    "absolute": (member("/etc/a/b"),),
    "above": (member("p/r/../../../a"),),
    "another run": (member("p/r/a"), member("p/q/a")),
    "too short": (member("p/run.json"),),
    "hidden project": (member(".p/r/a"),),
    "link": (member("p/r/a", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd"),),
    "hard link": (member("p/r/a"), member("p/r/b", b"", type=tarfile.LNKTYPE, linkname="p/r/a")),
    "device": (member("p/r/a", b"", type=tarfile.CHRTYPE),),
    "twice": (member("p/r/a"), member("p/r/a")),
    "file as folder": (member("p/r/a"), member("p/r/a/b")),
    "no record": (member("p/r/a"),),
    "no record in it": (member("p/r/run.json", b"{}"),),
    "large": (member("p/r/a", b"x" * 4096),),
    "long header": (with_long_header,),
    "empty": (),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_an_archive_of_others_is_refused_and_leaves_nothing(tmp_path: Path, kind: str):
    file, root = tmp_path / "a.tar.gz", tmp_path / "there"
    with tarfile.open(file, "w:gz", format=tarfile.PAX_FORMAT) as tar:
        for add in HOSTILE[kind]:
            add(tar)
    limit = ["--max-gib", "0.000002"] if kind == "large" else []
    code = 2 if kind == "hidden project" else 3
    done = rlctl("runs", "import", file, "--root", root, *limit, cwd=tmp_path, code=code)
    assert "error: " in done.stderr
    assert not [path for path in root.rglob("*") if path.is_file()]
    assert sorted(path.name for path in tmp_path.iterdir()) in (["a.tar.gz"], ["a.tar.gz", "there"])


def test_a_part_of_an_archive_is_refused(run: RunDir, tmp_path: Path):
    for ending in ("tar.zst", "tar.gz"):
        file = tmp_path / f"a.{ending}"
        rlctl("runs", "export", "r", file, cwd=tmp_path)
        file.write_bytes(file.read_bytes()[:-400])
        done = rlctl("runs", "import", file, "--root", tmp_path / "there", cwd=tmp_path, code=3)
        assert "cannot be imported" in done.stderr
    assert not [path for path in (tmp_path / "there").rglob("*") if path.is_file()]
    del run
