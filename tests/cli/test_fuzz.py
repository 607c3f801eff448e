"""Damaged and hostile files are errors of the user, within seconds and a bounded memory."""

from __future__ import annotations

import json
import time
from pathlib import Path
from random import SystemRandom
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rlctl.data_prep.rows import PromptRow, write_rows
from rlctl.errors import ConfigError
from rlctl.recipes.compose import compose
from rlctl.recipes.role_table import ACTOR
from rlctl.redaction import SECRET, redact
from rlctl.runs.settings import read_settings
from rlctl.runtime.data.tokenizer import load_tokenizer
from rlctl.runtime.model.load import load_model
from rlctl.runtime.planning.preflight import read_model_config
from rlctl.runtime.planning.role_memory import read_size
from tests.cli import fuzzing
from tests.models import write_tiny_model
from tests.recorded import called

BOMB = "a: &a [1]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefghij", "bcdefghijk", strict=True)
)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_500_files(tmp_path: Path) -> None:
    seed = SystemRandom().randrange(10**6)
    print("seed", seed)
    (tmp_path / "valid").mkdir()
    valid = fuzzing.write_valid(tmp_path / "valid")
    faults: list[str] = []
    for index in range(500):
        folder = tmp_path / str(index)
        folder.mkdir()
        ends = fuzzing.run(fuzzing.case(index, seed, valid, folder), folder)
        faults += [
            f"seed {seed}, case {index}, {folder}: {end.fault}\n{' '.join(end.words)}\n{end.output}"
            for end in ends
            if end.fault is not None
        ]
    assert faults == []


def test_valid_files_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of the soak test read what they are given: without a fault they succeed."""
    for name in ("_bytes", "_json_text"):
        monkeypatch.setattr(fuzzing, name, lambda _, content: content)
    (tmp_path / "valid").mkdir()
    valid = fuzzing.write_valid(tmp_path / "valid")
    for index in (fuzzing.KINDS.index("jsonl"), fuzzing.KINDS.index("picture file")):
        folder = tmp_path / str(index)
        folder.mkdir()
        for words in fuzzing.case(index, 0, valid, folder)[:2]:
            assert called(*words, cwd=folder).returncode == 0, words


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"data:\n  train_files: [\xff]\n", "cannot read this file"),
        (BOMB.encode(), "stand for more than 100,000 values"),
        (b"a: &a\n  b: *a\n", "contains itself"),
    ],
)
def test_broken_recipes(here: Path, content: bytes, message: str) -> None:
    (here / "recipe.yaml").write_bytes(content)
    done = called("train", "grpo", "--inline", "--dry-run", "--recipe", "recipe.yaml")
    assert done.returncode == 3, done.stderr
    assert message in done.stderr


def test_aliases_within_reason_are_values(here: Path) -> None:
    (here / "config.yaml").write_text("a: &a [1, 2]\nb: {c: *a}\n")
    assert read_settings(here) == {"a": [1, 2], "b.c": [1, 2]}
    (here / "config.yaml").write_text(BOMB)
    assert read_settings(here) == {}


@pytest.mark.parametrize(
    "changes",
    [None, {"vocab_size": [None]}, {"tie_word_embeddings": ["a"]}, {"architectures": [1.5]}],
)
def test_config_of_wrong_types(tmp_path: Path, changes: dict[str, Any] | None) -> None:
    folder = write_tiny_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes if changes else 1.5))
    overrides = (f"actor_rollout_ref.model.path={folder}",)
    model = compose("grpo", overrides).config.actor_rollout_ref.model
    with pytest.raises(ConfigError, match=r"no readable config\.json"):
        read_model_config(model, "actor_rollout_ref.model.path")


@pytest.mark.parametrize(
    "changes", [{"hidden_act": ""}, {"num_attention_heads": 0}, {"pad_token_id": 2**31}]
)
def test_config_with_which_there_is_no_model(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = write_tiny_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    overrides = (f"actor_rollout_ref.model.path={folder}",)
    model = compose("grpo", overrides).config.actor_rollout_ref.model
    with pytest.raises(ConfigError, match=r"cannot be built|no readable config"):
        read_size(model, ACTOR)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(model, "policy", torch.float32, seed=1)


@pytest.mark.parametrize(
    "part",
    [
        {"model_type": "detr", "backbone": "owner/name", "use_timm_backbone": False},
        {"model_type": "timm_wrapper", "architecture": "hf-hub:owner/name"},
    ],
)
def test_config_that_names_another_model(
    here: Path, part: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers asks the hub for a backbone as it reads config.json, timm as it is built."""
    asked: list[str] = []
    monkeypatch.setattr(
        "huggingface_hub.HfApi.repo_exists", lambda _, name, **__: bool(asked.append(name))
    )
    file = write_tiny_model(here / "model") / "config.json"
    text = json.loads(file.read_text())
    parts = {"model_type": "llava", "text_config": text, "vision_config": part}
    file.write_text(json.dumps(parts).replace("backbone", "back\\u0062one"))
    write_rows(here / "rows.parquet", [PromptRow("x", [{"role": "user", "content": "a"}], "1")])
    done = called("data", "show", "rows.parquet", "--model", "model")
    assert done.returncode == 3, done.stderr
    given = ["data.train_files=rows.parquet", "actor_rollout_ref.model.path=model"]
    done = called("train", "grpo", "--inline", "--dry-run", *given)
    assert done.returncode == 3, done.stderr
    assert "names another model, which would be looked up: " in done.stderr
    assert asked == []


def test_tokenizer_settings_of_wrong_types(tmp_path: Path) -> None:
    file = write_tiny_model(tmp_path / "model") / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": "x"}))
    with pytest.raises(ConfigError, match="tokenizer cannot be loaded"):
        load_tokenizer(str(file.parent))


def test_rows_whose_values_json_or_text_cannot_have(here: Path) -> None:
    row = fuzzing.ROW | {"ability": [["a"]], "extra_info": {"index": float("nan")}}
    pq.write_table(pa.Table.from_pylist([row]), here / "rows.parquet")
    done = called("data", "show", "rows.parquet", "--json")
    assert json.loads(done.stdout)[0]["extra_info"] == {"index": None}, done.stderr
    assert called("data", "show", "rows.parquet").returncode == 0


def test_time_of_redaction_is_proportional_to_the_length() -> None:
    def seconds(length: int) -> float:
        text = f"a: {'x' * length} b=1 c://{'y' * length} token={'z' * length}"
        begun = time.process_time()
        assert redact(text).endswith(f"token={SECRET}")
        return time.process_time() - begun

    short = min(seconds(2000) for _ in range(5))
    assert min(seconds(16_000) for _ in range(2)) < 24 * short
