"""Weights compared with the model of a config, before the start and while loading; their hashes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rlctl.errors import ConfigError, Problem
from rlctl.recipes import schema
from rlctl.recipes.schema import Model
from rlctl.runtime.model.load import Kind, compute_dtype, load_model
from rlctl.runtime.planning.model_files import check_architecture
from rlctl.runtime.training import input_hashes
from rlctl.runtime.training.input_hashes import model_hashes
from tests.configs import configured
from tests.models import TINY, edit, write_tiny_model
from tests.runtime.test_probe import RIGHT

KEY = "actor_rollout_ref.model.path"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


def section(folder: Path, *overrides: str) -> schema.Model:
    settings = [f"actor_rollout_ref.model.path={folder}", *overrides]
    return configured("ppo", (), settings).actor_rollout_ref.model


def problems(folder: Path, kind: Kind = "policy") -> list[Problem]:
    return check_architecture(section(folder), AutoConfig.from_pretrained(folder), kind, KEY)


def change(folder: Path, *dropped: str, **added: torch.Tensor) -> None:
    weights = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in weights.items() if name not in dropped}
    save_file(kept | added, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("kind", ["policy", "backbone"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_as_saved_fits(tmp_path: Path, tied: bool, kind: Kind) -> None:
    assert problems(write_tiny_model(tmp_path, tie_word_embeddings=tied), kind) == []


KINDS: tuple[Kind, ...] = ("policy", "backbone")


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_layers_and_another_width_are_one_problem_each(folder: Path, kind: Kind) -> None:
    edit(folder, num_hidden_layers=1, layer_types=None)
    [found] = problems(folder, kind)
    assert found.message.startswith("12 weights are not expected by Qwen2")
    with pytest.raises(ConfigError, match="12 weights are not expected"):
        load_model(section(folder), kind, torch.float32, 0)
    edit(folder, num_hidden_layers=2, vocab_size=300)
    [found] = problems(folder, kind)
    assert found.message.startswith("1 weight is of another shape than in Qwen2")
    assert "embed_tokens.weight (259, 32) instead of (300, 32)" in found.message
    edit(folder, hidden_size=64)
    assert ["another shape" in each.message for each in problems(folder, kind)] == [True]
    with pytest.raises(ConfigError, match="of another shape"):
        load_model(section(folder), kind, torch.float32, 0)


def test_each_kind_of_misfit_is_one_problem(folder: Path) -> None:
    change(
        folder,
        "model.norm.weight",
        **{"model.extra.weight": torch.zeros(1), "model.embed_tokens.weight": torch.zeros(3, 32)},
    )
    assert [each.message.split(" Qwen2")[0] for each in problems(folder)] == [
        "1 weight is missing for",
        "1 weight is not expected by",
        "1 weight is of another shape than in",
    ]


def test_a_missing_head_is_no_problem_for_a_backbone(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, tie_word_embeddings=False)
    change(folder, "lm_head.weight", **{"score.weight": torch.zeros(1, 32)})
    assert problems(folder, "backbone") == []
    load_model(section(folder), "backbone", torch.float32, 0)
    missing, unexpected = problems(folder)
    assert "missing for Qwen2ForCausalLM of config.json: lm_head.weight" in missing.message
    assert "score.weight" in unexpected.message
    assert "a reward model writes no text" in (unexpected.hint or "")


def test_shards_are_read_through_the_index(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    parts = {"a.safetensors": list(weights)[:5], "b.safetensors": list(weights)[5:]}
    for file, names in parts.items():
        save_file({name: weights[name] for name in names}, folder / file, {"format": "pt"})
    index = {"weight_map": {name: file for file, names in parts.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert problems(folder) == []
    edit(folder, num_hidden_layers=3, layer_types=None)
    assert "12 weights are missing" in problems(folder)[0].message


@pytest.mark.parametrize("kind", ["mixtral", "granitemoe", "qwen3_moe", "gpt2", "opt", "gpt_neox"])
def test_renamed_merged_and_ignored_weights_are_those_of_transformers(
    tmp_path: Path, kind: str
) -> None:
    config = AutoConfig.for_model(kind, **(TINY | RIGHT[kind]))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert problems(tmp_path) == []
    assert problems(tmp_path, "backbone") == []
    names = load_file(tmp_path / "model.safetensors")
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    if kind == "mixtral":  # experts are single weights in the file, and merged in the model
        assert any("experts.3.w2" in name for name in names)
        change(tmp_path, **buffer)
        assert problems(tmp_path) == []
        change(tmp_path, *(name for name in names if ".layers.1." in name))
        [found] = problems(tmp_path)
        assert "missing for MixtralForCausalLM" in found.message


def test_a_model_without_causal_attention_is_refused(folder: Path) -> None:
    shutil.rmtree(folder)
    config = AutoConfig.for_model("bert", **TINY)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    [found] = problems(folder)
    assert found.message == "bert is no causal language model: its tokens attend to later ones"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_pickled_weights_are_refused(folder: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"")
    [found] = problems(folder)
    assert "as pickle only" in found.message
    assert "save_pretrained" in found.hint
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(section(folder), "policy", torch.float32, 0)


def test_random_weights_need_no_file(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    random = section(folder, "actor_rollout_ref.model.init=random")
    assert check_architecture(random, AutoConfig.from_pretrained(folder), "policy", KEY) == []


@pytest.mark.parametrize(
    ("native", "available", "expected"),
    [
        (True, True, torch.bfloat16),
        (False, True, torch.float32),  # before Ampere
        (False, False, torch.bfloat16),  # a driver without a GPU
    ],
)
def test_dtype_auto(
    native: bool,
    available: bool,
    expected: torch.dtype,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: native)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    assert compute_dtype(section(folder), "cuda") is expected
    assert compute_dtype(section(folder), "cpu") is torch.float32
    half = section(folder, "actor_rollout_ref.model.dtype=float16")
    assert compute_dtype(half, "cuda") is torch.float16


def model(path: object, tokenizer: object = None) -> Model:
    config = configured(
        "ppo_trainer", ["data.train_files=[t]", "actor_rollout_ref.model.path=m"], ()
    )
    return config.actor_rollout_ref.model.model_copy(
        update={"path": str(path), "tokenizer_path": tokenizer and str(tokenizer)}
    )


@pytest.mark.parametrize("at", [0, 100, 5_000, 99_999])
def test_a_large_file_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Notice a changed tensor of a hundredth of the file, wherever it is."""
    monkeypatch.setattr(input_hashes, "_WHOLE_BYTES", 1000)
    monkeypatch.setattr(input_hashes, "_HEAD_BYTES", 100)
    monkeypatch.setattr(input_hashes, "_BLOCK_BYTES", 16)
    weights = tmp_path / "model.safetensors"
    content = bytearray(100_000)
    weights.write_bytes(content)
    before = model_hashes([model(tmp_path)])
    content[at : at + 1000] = b"1" * len(content[at : at + 1000])
    weights.write_bytes(content)
    assert model_hashes([model(tmp_path)]) != before


def test_models_that_are_not_here_have_no_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--me--mine" / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    refs = tmp_path / "models--me--mine" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path), raising=False)
    given = [model("me/mine", "me/other"), model(tmp_path / "missing"), model("./no")]
    assert model_hashes(given) == {"me/mine": "abc123"}


def test_a_changed_chat_template_changes_the_hashes(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    used = model(tmp_path / "none").model_copy(update={"custom_chat_template": str(template)})
    before = model_hashes([used])
    assert list(before) == [str(template)]
    template.write_text("{{ messages }} ")
    assert model_hashes([used]) != before
    text = used.model_copy(update={"custom_chat_template": "{{ messages }}" * 1000})
    assert model_hashes([text]) == {}
