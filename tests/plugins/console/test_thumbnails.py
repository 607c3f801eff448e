"""Thumbnails of images: files in the run's folder, reports and lists of samples."""

from __future__ import annotations

import io
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from rlctl.__main__ import main
from rlctl.cli.views import samples as views
from rlctl.data_prep import thumbnails
from rlctl.data_prep.rows import PromptRow
from rlctl.data_prep.thumbnails import MAX_BYTES, read_thumbnail, write_thumbnails
from rlctl.plugins.console.report.content import MAX_IMAGES, content
from rlctl.plugins.console.report.page import page as report_page
from rlctl.runs.run_dir import RunDir
from rlctl.runs.store import RunStore
from rlctl.tracking.jsonl import generations_file, read_generations
from tests.browser import chromium, wait_for
from tests.data_prep.test_images import picture
from tests.plugins.console.test_report import opened, sample
from tests.recorded import record
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


ALT = ["image 1 of prompt 2", "image 1 of prompt 3"]
LOADED = "images => images.map(image => [image.alt, image.naturalWidth > 0])"


def test_a_report_shows_each_image_once(tmp_path: Path) -> None:
    write_run(tmp_path)
    made = content([RunStore(tmp_path).find("seen")], 50)
    (run,) = made["runs"]
    assert list(run["thumbnails"]) == list(named(NOISE, picture()))
    assert len(run["samples"][0]["shown"][2]["images"]) == MAX_IMAGES
    (tmp_path / "x.html").write_text(report_page(made))
    with chromium() as browser, opened(browser, tmp_path / "x.html") as page:
        images = page.locator(".sample img")
        images.last.scroll_into_view_if_needed()
        wait_for(page, "[...document.images].every(image => image.complete)")
        assert images.evaluate_all(LOADED) == [[name, True] for name in ALT]
        heads = page.locator(".sample .images h3")
        assert heads.all_text_contents() == ["image", "images8 of 10"]
        lost = page.get_by_text("image 2 of prompt 3, without a thumbnail")
        assert lost.count() == 1
        page.evaluate("$('sample-step').value = 'all', $('sample-step').onchange(), null")
        assert images.count() == 2


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


def test_a_terminal_with_colours_draws_the_images_of_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.png").write_bytes(picture("blue"))
    images = (picture(), str(tmp_path / "a.png"), str(tmp_path / "none.png"), b"damaged")
    row = PromptRow("s", [{"role": "user", "content": "<image>" * 4}], "1", images=images)
    out = io.StringIO()

    def printed(colours: str | None, no_color: bool = False) -> str:
        out.seek(0)
        out.truncate()
        console = Console(
            file=out,
            force_terminal=colours is not None,
            color_system=colours,  # pyright: ignore[reportArgumentType]
            no_color=no_color,
            highlight=False,
            width=200,
        )
        monkeypatch.setattr(views, "stdout", lambda: console)
        views.print_row(views.row_entry(0, row, None), row.images)
        return out.getvalue()

    pixel = "\x1b[38;2;{0};48;2;{0}m▀\x1b[0m"
    found = printed("truecolor")
    assert found.count(pixel.format("255;0;0") * 4) == 1
    assert found.count(pixel.format("0;0;255") * 4) == 1
    assert found.count("▀") == 8
    for colours in (None, "standard"):
        assert "▀" not in printed(colours)
        assert f"{tmp_path}/none.png" in out.getvalue()
    assert "▀" not in printed("truecolor", no_color=True)
