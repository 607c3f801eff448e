"""Thumbnails of images: files in the run's folder, reports and lists of samples."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
from PIL import Image

from rlctl.__main__ import main
from rlctl.runs import thumbnails
from rlctl.runs.run_dir import RunDir
from rlctl.runs.thumbnails import MAX_BYTES, read_thumbnail, write_thumbnails
from rlctl.tracking.jsonl import generations_file, read_generations
from tests.data_prep.test_images import picture
from tests.recorded import record
from tests.runs.test_report import sample
from tests.vlm import noise

NOISE = noise(500, 300, 0)


def named(*images: bytes) -> dict[str, bytes]:
    return {sha256(image).hexdigest(): image for image in images}


def test_thumbnails_are_small_made_once_and_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thumbnails, "MAX_FILES", 3)
    write_thumbnails(tmp_path, {})
    assert not (tmp_path / "generations").exists()
    images = named(NOISE, picture(), b"no image", NOISE[:5000])
    write_thumbnails(tmp_path, images)
    files = {file.stem: file for file in (tmp_path / "generations" / "images").iterdir()}
    assert files.keys() == named(NOISE, picture()).keys()
    for digest, file in files.items():
        small = read_thumbnail(tmp_path, digest)
        assert small == file.read_bytes()
        assert 0 < len(small) <= MAX_BYTES
    first = Image.open(files[sha256(picture()).hexdigest()])
    assert (first.format, first.size) == ("JPEG", (4, 2))
    inodes = {file.stat().st_ino for file in files.values()}
    more = named(picture("blue"), picture("white"))
    write_thumbnails(tmp_path, images | more)
    folder = tmp_path / "generations" / "images"
    assert inodes < {file.stat().st_ino for file in folder.iterdir()}
    assert [read_thumbnail(tmp_path, digest) is None for digest in more] == [False, True]


def test_a_huge_image_and_a_full_disk_do_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    images = named(noise(15, 15, 1))  # more than twice the limit
    write_thumbnails(tmp_path, images)
    assert read_thumbnail(tmp_path, *images) is None
    (tmp_path / "file").write_text("")
    write_thumbnails(tmp_path / "file", named(picture()))
    assert "thumbnails of images are not written" in caplog.text


def test_only_valid_thumbnails_are_read(tmp_path: Path) -> None:
    (digest,) = images = named(picture())
    write_thumbnails(tmp_path, images)
    file = tmp_path / "generations" / "images" / f"{digest}.jpg"
    (tmp_path / "secret.jpg").write_bytes(file.read_bytes())
    for wrong in ("../../secret", "", "\0" * 64, digest.upper(), "0" * 64):
        assert read_thumbnail(tmp_path, wrong) is None
    valid = file.read_bytes()
    for content_ in (b"<svg/>", valid + b"x" * MAX_BYTES):
        file.write_bytes(content_)
        assert read_thumbnail(tmp_path, digest) is None
    file.unlink()
    file.symlink_to(tmp_path / "secret.jpg")
    assert read_thumbnail(tmp_path, digest) is None


def write_run(root: Path, name: str = "seen") -> None:
    """Write a run with a sample without an image, one with one and one with ten."""
    run = RunDir.create(root, "demo", name, "ppo")
    run.write_config("{}", {})
    images = named(NOISE, picture())
    first, second = images
    lost = ["0" * 64] * 9
    asked = [replace(sample(n, 1), episode=None) for n in range(3)]
    shown = [
        asked[0],
        replace(asked[1], images=(first,)),
        replace(asked[2], images=[second, *lost]),
    ]
    record(run.path, {1: {"x": 1.0}, 2: {"x": 1.0}}, {1: shown, 2: shown})
    write_thumbnails(run.path, images)
    run.finish("finished", 0)


def test_samples_name_their_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "runs")
    folder = tmp_path / "runs" / "demo" / "seen"
    digest = sha256(NOISE).hexdigest()
    assert read_generations(generations_file(folder, 1))[1].images == (digest,)
    assert "images" not in generations_file(folder, 1).read_text().splitlines()[0]
    assert main(["show", "seen", "--samples", "--root", str(tmp_path / "runs")]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index(f"image: SHA-256 {digest}")
    assert lines[at - 1] == "prompt: What is 1 + 1?"
