"""Archive of `rlctl doctor --bug-report`: its contents, its size, and no secrets."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from rlctl.__main__ import main
from rlctl.errors import ConflictError, NotFoundError, ResourceError
from rlctl.plugins.console import bug_report
from rlctl.plugins.console.bug_report import write_bug_report
from rlctl.runs.run import Run, read_run
from rlctl.runs.run_dir import RunDir
from tests.small_disk import fill, small_disk

TOKEN = "hf_" + "Qz" * 17  # of a known shape
PLAIN = "correct-Horse-9"  # only its name shows that it is a secret
CHECKS = [{"check": "python", "state": "ok", "message": "3.11", "remedy": None}]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a finished run with secrets planted in all of its files."""
    made = RunDir.create(tmp_path / "runs", "p", "r", "ppo")
    settings = f"trainer:\n  seed: 1\nreward:\n  judge:\n    api_key: {PLAIN}\n    url: {TOKEN}\n"
    (made.path / "config.yaml").write_text(settings)
    (made.path / "origins.json").write_text(json.dumps({"a.password": [{"value": PLAIN}]}))
    made.event("note", url=f"https://me:{PLAIN}@host/x")
    rows = [json.dumps({"step": step, "reward": 0.5}) for step in range(120)]
    (made.path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    (made.attempt / "actor-0.log").write_text(f"start\nAuthorization: Bearer {TOKEN}\n{PLAIN}\n")
    (made.attempt / "actor-1.log").write_text("x" * 70 + "\n" + "line\n" * 400_000)
    (made.path / "generations" / "step_000001.jsonl").write_text('{"prompt": "PRIVATE"}\n')
    (made.path / "generations" / "images").mkdir()
    (made.path / "generations" / "images" / "a.jpg").write_text("PRIVATE")
    outside = tmp_path / "outside.log"
    outside.write_text("OUTSIDE")
    (made.attempt / "linked.log").symlink_to(outside)
    made.update(state="failed", exit_code=1)
    return read_run(made.path)


def texts(archive: Path) -> dict[str, str]:
    with zipfile.ZipFile(archive) as file:
        return {name.partition("/")[2]: file.read(name).decode() for name in file.namelist()}


def test_a_report_has_the_records_of_a_run_and_no_secret(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", PLAIN)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HTTPS_PROXY", f"http://me:{PLAIN}@proxy:3128")
    monkeypatch.setenv("SOMETHING_ELSE", "UNRELATED")
    target = tmp_path / "report.zip"
    items = write_bug_report(target, CHECKS, run)
    found = texts(target)
    assert not any("images" in name for name in found)
    assert {"README.txt", *(each.name for each in items)} == set(found)
    assert {
        *("versions.json", "environment.json", "doctor.json", "run/run.json", "run/config.yaml"),
        *("run/events.jsonl", "run/metrics.jsonl", "run/logs/actor-0.log", "run/logs/actor-1.log"),
    } <= set(found)
    everything = "\n".join(found.values())
    for secret in (TOKEN, PLAIN, "PRIVATE", "OUTSIDE", "UNRELATED"):
        assert secret not in everything
    assert json.loads(found["environment.json"])["variables"]["WANDB_API_KEY"] == "<secret>"
    assert json.loads(found["versions.json"])["torch"]
    assert json.loads(found["doctor.json"]) == CHECKS
    assert [json.loads(row)["step"] for row in found["run/metrics.jsonl"].splitlines()] == [
        *range(70, 120)
    ]
    assert target.stat().st_mode & 0o077 == 0


def test_a_long_file_is_cut_to_its_end(run: Run, tmp_path: Path) -> None:
    items = {each.name: each for each in write_bug_report(tmp_path / "a.zip", CHECKS, run)}
    log = items["run/logs/actor-1.log"]
    assert log.bytes <= bug_report.MAX_BYTES
    assert log.remark == "end of 2,000,071 bytes"
    assert "run/logs/linked.log" not in items
    assert "end of 2,000,071 bytes" in texts(tmp_path / "a.zip")["README.txt"]


def test_a_file_is_never_replaced(tmp_path: Path) -> None:
    target = tmp_path / "a.zip"
    target.write_text("mine")
    with pytest.raises(ConflictError, match="already exists"):
        write_bug_report(target, CHECKS)
    assert target.read_text() == "mine"
    with pytest.raises(NotFoundError, match="no/folder does not exist"):
        write_bug_report(tmp_path / "no" / "folder" / "a.zip", CHECKS)


def test_a_full_disk_leaves_no_archive(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=64k") as disk:
        fill(disk)
        with pytest.raises(ResourceError, match="cannot write the archive: No space left"):
            write_bug_report(disk / "a.zip", CHECKS)
        assert [each.name for each in disk.iterdir()] == ["filler"]


def test_the_command_lists_what_it_wrote(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rlctl.runtime.planning.doctor.examine", lambda _: [])
    words = ["doctor", "--bug-report", "--run", "r", "--root", str(tmp_path / "runs")]
    assert main([*words, "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert Path(written["file"]).name.startswith("rlctl-bug-report-")
    assert {each["name"] for each in written["contents"]} <= set(texts(Path(written["file"])))
    assert main([*words, "mine.zip"]) == 0
    shown = capsys.readouterr()
    assert "run/config.yaml" in shown.out
    assert "wrote mine.zip" in shown.err
    assert main(["doctor", "mine.zip"]) == 2
    assert "needs --bug-report" in capsys.readouterr().err
    assert main(["doctor", "--bug-report", "@last"]) == 2
    assert "corrected: rlctl doctor --bug-report --run @last" in capsys.readouterr().err
