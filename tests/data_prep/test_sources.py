"""Sources of data: files, folders in the layout of the hub, names on the hub, and weights."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlctl import hub
from rlctl.data_prep.arithmetic import generate
from rlctl.data_prep.records import read_records
from rlctl.data_prep.rows import PromptRow, write_rows
from rlctl.data_prep.sources import data_files, data_hashes
from rlctl.errors import ConfigError, NotFoundError, ResourceError
from rlctl.quickstart import real_path
from rlctl.recipes.compose import compose
from rlctl.runtime.data.loader import PromptLoader, PromptSet
from rlctl.runtime.data.mixing import Part, mixed_order, quotas
from rlctl.runtime.data.samplers import random_order, sequential_order
from rlctl.runtime.data.tokenizer import load_tokenizer


def rows(source: str, count: int) -> list[PromptRow]:
    made = generate(count, seed=1, level=1, careless=0.0, split="train")
    return [PromptRow(source, row.prompt, row.ground_truth) for row in made]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a data set in the hub's layout: two files of `train`, one of `test`, and a subset."""
    root = tmp_path_factory.mktemp("data_set")
    for name, count in [
        ("data/train-00000-of-00002.parquet", 3),
        ("data/train-00001-of-00002.parquet", 2),
        ("data/test-00000-of-00001.parquet", 4),
        ("hard/val/0000.parquet", 1),
    ]:
        write_rows(root / name, rows("set", count))
    (root / "README.md").write_text("a data set\n")
    return root


def test_a_folder_is_read_by_split(folder: Path) -> None:
    train = [path.name for path in data_files(str(folder), "train")]
    assert train == ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"]
    assert [path.name for path in data_files(f"{folder}:test", "train")] == [
        "test-00000-of-00001.parquet"
    ]
    assert [path.name for path in data_files(f"{folder}:val", "train")] == ["0000.parquet"]
    with pytest.raises(NotFoundError, match="no files of the split 'dev'") as error:
        data_files(f"{folder}:dev", "train")
    assert "data/test-00000" in str(error.value.problems[0].hint)
    assert list(data_hashes([str(folder)], "train")) == [f"{folder}/{name}" for name in train]


def test_configurations_of_a_folder_are_not_mixed(tmp_path: Path) -> None:
    for name in ("main/train-0.parquet", "socratic/train-0.parquet", "main/test.parquet"):
        write_rows(tmp_path / name, rows("set", 1))
    with pytest.raises(ConfigError, match="several configurations: main, socratic"):
        data_files(str(tmp_path), "train")
    for source in (f"{tmp_path}:socratic/train", f"{tmp_path}:socratic/"):
        assert data_files(source, "train") == [tmp_path / "socratic/train-0.parquet"]
    assert data_files(f"{tmp_path}:test", "train") == [tmp_path / "main/test.parquet"]


def test_patterns_hidden_files_and_upper_case(tmp_path: Path) -> None:
    for name in (
        *("d_1/train.parquet", "d_2/train.parquet", "d_2/.ipynb_checkpoints/train-copy.parquet"),
        *("set/TRAIN.PARQUET", "set/train.PARQUET"),
    ):
        write_rows(tmp_path / name, rows("set", 1))
    both = [tmp_path / "d_1/train.parquet", tmp_path / "d_2/train.parquet"]
    assert data_files(f"{tmp_path}/d_*/train.parquet", "train") == both
    assert data_files(f"{tmp_path}/d_*", "train") == both
    assert list(data_hashes([f"{tmp_path}/d_*"], "train")) == [str(each) for each in both]
    assert data_files(str(tmp_path / "set"), "train") == [tmp_path / "set/train.PARQUET"]
    with pytest.raises(NotFoundError, match="no file matches"):
        data_files(f"{tmp_path}/e_*.parquet", "train")
    (tmp_path / "X.JSON").write_text('[{"a": "1"}]')
    (tmp_path / "X.CSV").write_text("a\n1\n")
    for name in ("X.JSON", "X.CSV"):
        assert [each for _, each in read_records(tmp_path / name)] == [{"a": "1"}]


def test_files_stay_files(folder: Path, tmp_path: Path) -> None:
    file = folder / "data/test-00000-of-00001.parquet"
    assert data_files(file, "train") == [file]
    assert data_files("no/such.parquet", "train") == [Path("no/such.parquet")]
    assert list(data_hashes([str(file)], "train")) == [str(file)]


def test_a_name_on_the_hub_is_downloaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[str], bool]] = []

    def download(
        name: str,
        *,
        allow_patterns: Sequence[str] = (),
        local_files_only: bool = False,
        dry_run: bool = False,
        **_: str,
    ) -> Any:
        if name == "some/missing":
            raise OSError("404")
        if dry_run:
            subsets = ["main/train/0.parquet", "hard/train/0.parquet"] if "two" in name else []
            return [SimpleNamespace(filename=each) for each in ("hard/val/0000.parquet", *subsets)]
        asked.append((name, list(allow_patterns), local_files_only))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr(hub, "hub_answers", lambda: True)
    found = data_files("some/set:val", "train")
    assert [path.name for path in found] == ["0000.parquet"]
    assert asked == [("some/set", ["hard/val/*.parquet"], False)]
    with pytest.raises(ConfigError, match="several configurations: hard, main") as several:
        data_files("some/two", "train")
    assert several.value.problems[0].hint == "choose one: some/two:hard/train"
    data_files("some/two:main/", "train")
    assert asked[1:] == [("some/two", ["main/train/*.parquet"], False)]
    with pytest.raises(NotFoundError, match="no configuration 'easy'"):
        data_files("some/two:easy/train", "test")
    with pytest.raises(NotFoundError, match="no split 'train'"):
        data_files("some/set", "train")
    with pytest.raises(ResourceError, match=r"'some/missing' .* cannot be downloaded: 404"):
        data_files("some/missing", "train")


def test_a_hub_that_does_not_respond_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The look-up of a host's name may take minutes, which no HTTP client limits."""
    asked, end = threading.Event(), threading.Event()

    def head(*_: object, **__: object) -> None:
        asked.set()
        end.wait()

    monkeypatch.setattr(hub, "TIMEOUT_S", 0.05)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://unreachable.invalid")
    session = SimpleNamespace(head=head)
    monkeypatch.setattr("huggingface_hub.utils.get_session", lambda: session)
    try:
        with pytest.raises(ResourceError) as error:
            data_files("some/unknown:dev", "train")
    finally:
        end.set()
    assert asked.wait(60)
    (problem,) = error.value.problems
    assert problem.message == (
        "the data set 'some/unknown' is not in the local cache and cannot be downloaded: "
        "http://unreachable.invalid does not respond, or HF_HUB_OFFLINE is set"
    )
    assert "a file of your own works too" in (problem.hint or "")


def mixture(tmp_path: Path, *settings: str) -> PromptLoader:
    """Load 12 prompts of source a with weight 1 and 4 of source b with weight 3."""
    for name, count in (("a", 12), ("b", 4)):
        write_rows(tmp_path / f"{name}.parquet", rows(name, count))
    files = ", ".join(
        f"{{path: {tmp_path}/{n}.parquet, weight: {w}}}" for n, w in (("a", 1), ("b", 3))
    )
    data = compose(
        "grpo", [f"data.train_files=[{files}]", "data.train_batch_size=4", *settings]
    ).config.data
    prompts = PromptSet.load_train(data, load_tokenizer(real_path("quickstart")))
    return PromptLoader.from_config(prompts, data)


@pytest.mark.parametrize("settings", [[], ["data.shuffle=false"], ["data.sampler=curriculum"]])
def test_weights_are_shares_of_the_prompts(tmp_path: Path, settings: list[str]) -> None:
    loader = mixture(tmp_path, *settings)
    batches = [loader.batch_at(step) for step in range(1, 5)]
    drawn = [row for batch in batches for row in batch.rows]
    assert Counter(row.data_source for row in drawn) == {"a": 4, "b": 12}
    if "data.shuffle=false" in settings:
        assert [row.data_source for row in drawn[:4]].count("b") == 3, "evenly interleaved"
        assert loader.metrics(batches[0]) == {"data/share/a": 0.25, "data/share/b": 0.75}


def test_the_streams_of_a_mixture_continue_in_the_next_epoch() -> None:
    parts = (Part(0, 12, 0.25), Part(12, 16, 0.75))
    assert quotas(parts, 16) == [4, 12]
    assert quotas((Part(0, 1, 1 / 3), Part(1, 2, 1 / 3), Part(2, 4, 1 / 3)), 4) == [2, 1, 1]
    for order in (random_order, sequential_order):
        epochs = [mixed_order(parts, order, epoch, 5) for epoch in range(3)]
        first = torch.cat(epochs)[torch.cat(epochs) < 12]
        assert sorted(first.tolist()) == list(range(12)), "each prompt of `a` once in three epochs"
        assert torch.bincount(torch.cat(epochs))[12:].tolist() == [9] * 4
        assert torch.equal(mixed_order(parts, order, 2, 5), epochs[2])


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ("[{path: a.parquet, weight: 1}, b.parquet]", "some training files have a weight"),
        ("[{path: a.parquet, weight: 0}]", r"data\.train_files should be a list of text or"),
        ("[{path: a.parquet, wieght: 1}]", r"data\.train_files should be a list of text or"),
    ],
)
def test_wrong_weights_are_refused(files: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _ = compose("grpo", [f"data.train_files={files}"]).config.data.train_weights


def test_weights_do_not_combine_with_a_limit() -> None:
    overrides = ["data.train_files=[{path: a.parquet, weight: 1}]", "data.train_max_samples=4"]
    with pytest.raises(ConfigError, match="does not combine with the weights"):
        _ = compose("grpo", overrides).config.data.train_weights
