"""`rlctl prep geo3k`, and `rlctl prep jsonl --image-key`: rows with images from other files."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from rlctl.cli import app
from rlctl.data_prep import row_columns
from rlctl.data_prep.rows import PromptRow, read_rows, write_rows
from rlctl.errors import ConfigError, ResourceError
from rlctl.runtime.training.input_hashes import image_hashes
from tests.configs import configured
from tests.data_prep.test_images import PARTS, picture, record
from tests.vlm import noise, write_vlm

INSTRUCTION = (
    "You FIRST think about the reasoning process as an internal monologue and then provide the "
    "final answer. The reasoning process MUST BE enclosed within <think> </think> tags. "
    r"The final answer MUST BE put in \boxed{}."
)
PROBLEM = {"problem": "<image>Find x.", "answer": r"2 \sqrt { 221 }"}


def data_url(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def run(*words: object) -> Result:
    return CliRunner().invoke(app, ["prep", *(str(word) for word in words)])


def error(*words: object) -> ConfigError:
    result = run(*words)
    assert isinstance(result.exception, ConfigError), result.output
    return result.exception


def geometry(folder: Path, split: str, form: str) -> None:
    """Write one problem as the hub has it, or as JSONL."""
    path = folder / form.replace("SPLIT", split)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text(json.dumps(PROBLEM | {"images": [data_url(picture())]}))
    else:
        images = [{"bytes": picture(), "path": None}]
        pq.write_table(pa.Table.from_pylist([PROBLEM | {"images": images}]), path)


@pytest.mark.parametrize("form", ["data/SPLIT-00000-of-00001.parquet", "SPLIT.jsonl"])
def test_geo3k_has_verls_rows(tmp_path: Path, form: str) -> None:
    for split in ("train", "validation", "test"):
        geometry(tmp_path / "source", split, form)
    result = run("geo3k", "--source", tmp_path / "source", "--out", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert {split: made["num_rows"] for split, made in summary.items()} == {"train": 1, "test": 1}
    (row,) = read_rows(tmp_path / "out" / "test.parquet")
    assert row == PromptRow(
        "hiyouga/geometry3k",
        [{"role": "user", "content": f"<image>Find x. {INSTRUCTION}"}],
        PROBLEM["answer"],
        ability="math",
        style="rule",
        extra_info={
            "split": "test",
            "index": 0,
            "answer": PROBLEM["answer"],
            "question": PROBLEM["problem"],
        },
        images=(picture(),),
    )


def test_geo3k_without_hub_or_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # no server
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    result = run("geo3k", "--out", tmp_path / "out")
    assert isinstance(result.exception, ResourceError)
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(PROBLEM | {"images": []}))
    problem = error("geo3k", "--source", tmp_path, "--out", tmp_path / "out").problems[0]
    assert problem.message == "the prompt refers to 1 images by <image>, and column 'images' has 0"
    assert problem.where == f"{tmp_path}/train.jsonl:1"
    assert not (tmp_path / "out").exists()


def records(folder: Path, *records: Any) -> tuple[object, ...]:
    """Write JSONL with images beside it; return the words of `rlctl prep`."""
    (folder / "pictures").mkdir(parents=True)
    (folder / "pictures" / "a.png").write_bytes(picture())
    (folder / "x.jsonl").write_text("\n".join(map(json.dumps, records)))
    keys = ("--prompt-key", "q", "--answer-key", "a", "--image-key", "pictures")
    return ("jsonl", folder / "x.jsonl", *keys, "--out", folder / "out")


def test_images_of_own_records_are_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blue = picture("blue")
    chat = [{"role": "system", "content": "Look."}, {"role": "user", "content": PARTS}]
    words = records(
        tmp_path / "mine",
        {"q": "What?", "a": "red", "pictures": "pictures/a.png"},
        {"q": "<image> or <image>?", "a": "1", "pictures": ["pictures/a.png", data_url(blue)]},
        {"q": "No picture.", "a": "1", "pictures": None, "id": 7},
        {"q": chat, "a": "red", "pictures": [str(tmp_path / "mine" / "pictures" / "a.png")]},
    )
    monkeypatch.setattr(row_columns, "_TABLE_BYTES", 1)  # a row group per image
    result = run(*words)
    assert result.exit_code == 0, result.output
    out = tmp_path / "mine" / "out" / "train.parquet"
    assert pq.ParquetFile(out).num_row_groups == 3
    rows = read_rows(out)
    assert [row.images for row in rows] == [(picture(),), (picture(), blue), (), (picture(),)]
    assert [row.prompt[-1]["content"] for row in rows] == [
        "<image>What?",
        "<image> or <image>?",
        "No picture.",
        "<image>Which colour?",
    ]
    assert rows[3].prompt[0]["content"] == "Look."
    assert rows[2].extra_info == {"index": 2, "split": "train", "question": "No picture.", "id": 7}


def test_wrong_images_of_records_are_one_error_each(tmp_path: Path) -> None:
    words = records(
        tmp_path / "mine",
        {"q": "a?", "a": "1", "pictures": ["pictures/b.png"]},
        {"q": "a?", "a": "1", "pictures": [data_url(b"GIF89a")]},
        {"q": "a?", "a": "1", "pictures": ["data:image/png;base64,?"]},
        {"q": "a?", "a": "1", "pictures": [3]},
        {"q": "<image>?", "a": "1", "pictures": ["pictures/a.png"] * 2},
        {"q": "a?", "a": "1"},
    )
    file = tmp_path / "mine" / "x.jsonl"
    assert [(problem.message, problem.where) for problem in error(*words).problems] == [
        (
            "an image cannot be read: [Errno 2] No such file or directory: "
            f"'{tmp_path}/mine/pictures/b.png'",
            f"{file}:1",
        ),
        ("an image cannot be decoded: cannot identify image file", f"{file}:2"),
        ("an image is bytes, a path, or {bytes, path}, not empty value", f"{file}:3"),
        ("an image is bytes, a path, or {bytes, path}, not int", f"{file}:4"),
        ("the prompt refers to 1 images by <image>, and column 'pictures' has 2", f"{file}:5"),
        ("no key 'pictures'; keys: q, a", f"{file}:6"),
    ]
    assert not (tmp_path / "mine" / "out").exists()


def test_lengths_count_the_tokens_of_images(tmp_path: Path) -> None:
    folder = write_vlm("qwen2_5_vl", tmp_path / "model")
    rows = [
        PromptRow("s", [{"role": "user", "content": "<image>what"}], "4", images=(noise(n, n, n),))
        for n in (32, 64)
    ]
    write_rows(tmp_path / "x.parquet", rows)
    others = len(["<user>", "<|vision_start|>", "<|vision_end|>", *"what", "<end>", "<assistant>"])
    first, second = others + (32 // 16) ** 2, others + (64 // 16) ** 2
    words = ("show", str(tmp_path / "x.parquet"), "--model", str(folder), "--json")
    shown = json.loads(CliRunner().invoke(app, ["data", *words]).stdout)
    assert [row["num_tokens"] for row in shown] == [first, second]
    renamed = pq.read_table(tmp_path / "x.parquet").rename_columns({"images": "image"})
    pq.write_table(renamed, tmp_path / "z.parquet")
    words = ("show", str(tmp_path / "z.parquet"), "--image-key", "image", "--json")
    assert len(json.loads(CliRunner().invoke(app, ["data", *words]).stdout)[1]["images"]) == 1
    for n in (32, 64):
        (tmp_path / f"{n}.png").write_bytes(noise(n, n, n))
    lines = [json.dumps({"q": "what", "a": "4", "i": f"{n}.png"}) for n in (32, 64)]
    (tmp_path / "y.jsonl").write_text("\n".join(lines))
    result = run(
        *("jsonl", tmp_path / "y.jsonl", "--prompt-key", "q", "--answer-key", "a"),
        *("--image-key", "i", "--out", tmp_path, "--model", folder, "--json"),
        *("--max-prompt-length", first),
    )
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)["train"]
    assert (summary["num_rows"], summary["num_dropped"]) == (1, 1)
    assert summary["prompt_tokens"]["max"] == second


def test_drift_covers_images_that_rows_name(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.png").write_bytes(picture())
    named = [[str(tmp_path / "a.png")], [picture()], [], [str(tmp_path / "b.png")]]
    text = [record([str(tmp_path / "a.png")]), record([], "?")]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, text)))
    write_rows(tmp_path / "x.parquet", [row_of_images(images) for images in named])
    write_rows(tmp_path / "bytes.parquet", [row_of_images([picture()])])
    files = [str(tmp_path / name) for name in ("x.jsonl", "x.parquet", "bytes.parquet")]

    def hashes() -> dict[str, str]:
        return image_hashes(files, "train", configured("ppo", (), ()).data)

    before = hashes()
    assert list(before) == [f"{files[0]} (images)", f"{files[1]} (images)"]
    (tmp_path / "b.png").write_bytes(picture("blue"))
    changed = hashes()
    assert changed[f"{files[0]} (images)"] == before[f"{files[0]} (images)"]
    assert changed[f"{files[1]} (images)"] != before[f"{files[1]} (images)"]
    (tmp_path / "a.png").unlink()
    with pytest.raises(ConfigError, match="an image cannot be read"):
        hashes()


def row_of_images(images: Any) -> PromptRow:
    chat = [{"role": "user", "content": "<image>" * len(images) or "?"}]
    return PromptRow("s", chat, "1", images=tuple(images))


def test_pairs_have_the_images_of_their_prompt(tmp_path: Path) -> None:
    said = [[{"role": "assistant", "content": [{"type": "text", "text": t}]}] for t in ("a", "b")]
    pairs = [  # of TRL, and of RLAIF-V
        {"prompt": [{"role": "user", "content": PARTS}], "chosen": said[0], "rejected": said[1]},
        {"prompt": "Which colour?", "chosen": "a", "rejected": "b"},
    ]
    image = {"images": [data_url(picture())]}
    source = tmp_path / "x.jsonl"
    source.write_text("\n".join(json.dumps(pair | image) for pair in pairs))
    words = ("preferences", source, "--image-key", "images", "--out", tmp_path / "out")
    result = run(*words)
    assert result.exit_code == 0, result.output
    for row in read_rows(tmp_path / "out" / "train.parquet"):
        assert row.prompt == [{"role": "user", "content": "<image>Which colour?"}]
        assert row.images == (picture(),)
        assert (row.extra_info["chosen"], row.extra_info["rejected"]) == ("a", "b")
    source.write_text(json.dumps(pairs[0] | {"images": []}))
    assert "refers to 1 images by <image>" in str(error(*words))
