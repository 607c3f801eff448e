"""Rows with images: every form of verl's and TRL's columns, and what refers to them."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from rlctl.cli.views.samples import row_entry
from rlctl.data_prep.decoded_images import opened, size_of
from rlctl.data_prep.images import content_of, digest_of, with_parts
from rlctl.data_prep.rows import PromptRow, read_rows, write_rows
from rlctl.errors import ConfigError
from rlctl.runtime.data.row_table import Rows
from tests.configs import configured

PARTS = [{"type": "image", "text": None}, {"type": "text", "text": "Which colour?"}]


def picture(colour: str = "red") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 2), colour).save(buffer, "PNG")
    return buffer.getvalue()


def record(images: Any, content: Any = "<image>Which colour?", key: str = "images") -> Any:
    return {
        "data_source": "s",
        "prompt": [{"role": "user", "content": content}],
        "reward_model": {"ground_truth": "red"},
        key: images,
    }


def written(folder: Path, *records: Any) -> Path:
    pq.write_table(pa.Table.from_pylist(list(records)), folder / "x.parquet")
    return folder / "x.parquet"


@pytest.mark.parametrize(
    "images",
    [
        [picture()],
        picture(),
        [{"bytes": picture(), "path": "a.png"}],
        {"bytes": picture(), "path": None},
    ],
)
@pytest.mark.parametrize("content", ["<image>Which colour?", PARTS])
def test_all_forms_of_images_and_placeholders_are_one(
    tmp_path: Path, images: Any, content: Any
) -> None:
    (row,) = read_rows(written(tmp_path, record(images, content)))
    assert row.images == (picture(),)
    assert row.prompt == [{"role": "user", "content": "<image>Which colour?"}]


def test_paths_are_kept_and_read_when_needed(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture("blue"))
    path = str(tmp_path / "a.png")
    (tmp_path / "x.jsonl").write_text(json.dumps(record([path], PARTS, "image")))
    (row,) = read_rows(tmp_path / "x.jsonl", image_key="image")
    assert row.images == (path,)
    assert content_of(path) == picture("blue")
    assert digest_of(path) == digest_of(picture("blue")) != digest_of(picture())
    assert opened(content_of(path)).getpixel((0, 0)) == (0, 0, 255)
    assert size_of(content_of(path)) == opened(content_of(path)).size == (4, 2)
    with pytest.raises(ConfigError, match="an image cannot be read"):
        content_of(path + "x")
    with pytest.raises(ConfigError, match="an image cannot be decoded"):
        opened(picture()[:40])


def test_written_rows_are_read_again(tmp_path: Path) -> None:
    chat: Any = "<image>a<image>"
    rows = [
        PromptRow("s", chat, "red", images=(Image.new("RGB", (4, 2), "red"), "a.png")),  # pyright: ignore[reportArgumentType]
        PromptRow("s", [{"role": "user", "content": "no image"}], "1"),
    ]
    assert rows[0].images == (picture(), "a.png")
    write_rows(tmp_path / "x.parquet", rows)
    assert read_rows(tmp_path / "x.parquet") == rows
    found = Rows.load(tmp_path / "x.parquet", configured("ppo", (), ()).data)
    assert found.with_images().tolist() == [True, False]
    assert found.select(slice(1, 2)).with_images().tolist() == [False]
    assert list(found) == rows


@pytest.mark.parametrize(
    ("images", "content", "message"),
    [
        ([picture()], "Which colour?", "refers to 0 images by <image>, and column 'images' has 1"),
        ([], [*PARTS, PARTS[0]], "refers to 2 images by <image>, and column 'images' has 0"),
        ([3], "<image>?", "column 'images': an image is bytes, a path, or {bytes, path}, not int"),
        ([picture()], [{"type": "video", "text": None}], "expected {role, content}, both text"),
    ],
)
def test_faults_name_the_row(tmp_path: Path, images: Any, content: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_rows(written(tmp_path, record(images, content)))
    problem = caught.value.problems[0]
    assert message in problem.message
    assert str(problem.where).endswith("row 0")


def test_a_text_without_a_column_of_images_may_have_the_word(tmp_path: Path) -> None:
    row = {name: value for name, value in record(None).items() if name != "images"}
    assert read_rows(written(tmp_path, row))[0].images == ()


def test_parts_of_a_text() -> None:
    message = {"role": "user", "content": "a<image><image>b"}
    (found,) = with_parts([message], (b"1", b"2"))
    assert found["content"] == [
        {"type": "text", "text": "a"},
        {"type": "image", "image": b"1"},
        {"type": "image", "image": b"2"},
        {"type": "text", "text": "b"},
    ]


def test_a_shown_row_names_its_images() -> None:
    row = PromptRow("source", [], "truth", images=(b"abc", "a.png"))
    assert row_entry(0, row, None)["images"] == [f"3 bytes, SHA-256 {digest_of(b'abc')}", "a.png"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "cannot identify image file"),
        (b"P6 2 2 255 " + bytes(12), "cannot identify image file"),
        (b"", "cannot identify image file"),
    ],
    ids=["EPS runs Ghostscript", "PPM", "empty"],
)
def test_only_common_formats_are_decoded(
    content: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "gs"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for read in (opened, size_of):
        with pytest.raises(ConfigError, match=message):
            read(content)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_common_formats_are_decoded(kind: str) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 6), "red").save(buffer, kind)
    assert size_of(buffer.getvalue()) == opened(buffer.getvalue()).size == (8, 6)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_turned_images_are_upright(kind: str) -> None:
    buffer, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (8, 6), "red").save(buffer, kind, exif=exif)
    assert size_of(buffer.getvalue()) == opened(buffer.getvalue()).size == (6, 8)


@pytest.mark.filterwarnings("ignore:Image size")
def test_too_many_pixels_are_refused_before_they_are_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pixels of a PNG of 20 kB would take 500 MB."""
    buffer = io.BytesIO()
    Image.new("1", (13000, 13000)).save(buffer, "PNG")

    def load(*_: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)
    for read in (opened, size_of):
        with pytest.raises(ConfigError, match="it has 13000 x 13000 pixels"):
            read(buffer.getvalue())
    small = io.BytesIO(picture())
    size_of(small.getvalue())  # from the header


def test_only_regular_files_within_the_limit_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/zero", str(tmp_path / "pipe"), str(tmp_path)):
        with pytest.raises(ConfigError, match="no regular file"):
            content_of(path)
    (tmp_path / "large.png").write_bytes(picture())
    monkeypatch.setattr("rlctl.data_prep.images._MAX_BYTES", 10)
    with pytest.raises(ConfigError, match="bytes, and 10 are allowed"):
        content_of(str(tmp_path / "large.png"))
