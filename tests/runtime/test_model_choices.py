"""Model folders whose files ask for code or files from elsewhere, and loading without output."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.utils.logging import enable_progress_bar

from rlctl import quickstart
from rlctl.errors import RlctlError
from rlctl.recipes import schema
from rlctl.recipes.compose import compose
from rlctl.runtime.data.tokenizer import load_tokenizer
from rlctl.runtime.model.load import load_model
from tests.e2e.command import rlctl

EVIL = "import os\nos.mkdir({place!r})\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Copy of the quickstart's model, with Python files that must not run."""
    return copy_of("quickstart", tmp_path)


def copy_of(model: str, tmp_path: Path) -> Path:
    copy = tmp_path / model
    shutil.copytree(quickstart.real_path(model), copy)
    (copy / "custom_generate").mkdir()
    for name in ("evil.py", "custom_generate/generate.py"):
        (copy / name).write_text(EVIL.format(place=str(tmp_path / "ran")), encoding="utf-8")
    return copy


def edit(file: Path, values: Mapping[str, Any]) -> None:
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    file.write_text(json.dumps({**before, **values}), encoding="utf-8")


def model_of(folder: Path, **more: Any) -> schema.Model:
    overrides = [f"actor_rollout_ref.model.path={folder}"]
    return compose("ppo", overrides).config.actor_rollout_ref.model.model_copy(update=more)


NAMES = ["evil/kernel", "kernels-community/flash-attn@0123abcd", "paged|evil/kernel:name"]


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
@pytest.mark.parametrize("name", [*NAMES, {"": "evil/kernel"}], ids=str)
def test_an_attention_of_a_hub_is_refused(folder: Path, key: str, name: object) -> None:
    edit(folder / "config.json", {key: name})
    with pytest.raises(RlctlError, match=r"config\.json asks for attn_implementation='.*/"):
        load_model(model_of(folder), "policy", torch.float32, 0)


def test_an_attention_of_a_hub_is_refused_before_a_run(folder: Path, tmp_path: Path) -> None:
    edit(folder / "config.json", {"attn_implementation": "evil/kernel"})
    words = ["train", "grpo", "--inline", "--dry-run", "--recipe", "grpo"]
    refused = rlctl(*words, f"actor_rollout_ref.model.path={folder}", cwd=tmp_path, code=3)
    assert "config.json asks for attn_implementation='evil/kernel', code of a hub" in refused.stderr


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3", "flex_attention", "no"])
@pytest.mark.parametrize("init", ["auto", "random"])
def test_the_attention_of_a_config_is_not_used(
    folder: Path, name: str, init: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flash attention that is not installed would come from a hub."""

    def refuse(*names: object, **_: object) -> None:
        raise AssertionError(names)

    monkeypatch.setattr("transformers.modeling_utils.lazy_import_flash_attention", refuse)
    edit(folder / "config.json", {"attn_implementation": name})
    loaded = load_model(model_of(folder, init=init), "policy", torch.float32, 0)
    assert "rlctl" in str(loaded.config._attn_implementation)


@pytest.mark.parametrize("init", ["auto", "random"])
def test_loading_and_saving_print_no_progress_bar(
    folder: Path, init: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    enable_progress_bar()
    load_model(model_of(folder, init=init), "policy", torch.float32, 0).save_pretrained(tmp_path)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("name", ["sonicmoe", "deepgemm", "evil/experts"])
def test_the_experts_of_a_config_are_not_used(tmp_path: Path, name: str) -> None:
    config = MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
    )
    config.save_pretrained(tmp_path)
    edit(tmp_path / "config.json", {"experts_implementation": name})
    model = model_of(tmp_path, init="random")
    if "/" in name:
        with pytest.raises(RlctlError, match="asks for experts_implementation='evil/experts'"):
            load_model(model, "policy", torch.float32, 0)
    else:
        loaded = load_model(model, "policy", torch.float32, 0)
        assert loaded.config._experts_implementation != name


# By file: what would import the file `evil`, or load a model or a package of that name.
REQUESTS: dict[str, list[dict[str, Any]]] = {
    "config.json": [
        {"auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}},
        {"auto_map": {"AutoModelForCausalLM": "evil/hub--evil.Evil"}},
        {"_name_or_path": "evil/hub"},
        {"transformers_weights": "evil.bin"},
        {"external_lib": "evil"},
        *(
            {"quantization_config": {"quant_method": method, "kernel": "evil/kernel"}}
            for method in (
                "evil",
                "gptq",
                "awq",
                "torchao",
                "quark",
                "fp8",
                "mxfp4",
                "aqlm",
                "eetq",
            )
        ),
    ],
    "generation_config.json": [
        {"custom_generate": "evil/hub"},
        {"cache_implementation": "evil"},
        {"auto_map": {"GenerationConfig": "evil.Evil"}},
    ],
    "tokenizer_config.json": [
        {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}},
        {"auto_map": {"AutoTokenizer": ["evil/hub--evil.Evil", None]}},
        {"tokenizer_class": "evil.Evil"},
    ],
    "preprocessor_config.json": [
        {"auto_map": {"AutoImageProcessor": "evil.Evil", "AutoProcessor": "evil.Evil"}},
        {"image_processor_type": "evil.Evil"},
    ],
    "processor_config.json": [{"auto_map": {"AutoProcessor": "evil.Evil"}}],
    "adapter_config.json": [
        {"peft_type": "LORA", "base_model_name_or_path": "evil/hub", "megatron_core": "evil"},
        {"peft_type": "LORA", "auto_mapping": {"parent_library": "evil"}},
    ],
}


@pytest.mark.parametrize("file", REQUESTS)
def test_nothing_of_a_model_folder_is_imported_or_requested(
    tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy_of("quickstart-vision" if "processor" in file else "quickstart", tmp_path)
    requested: list[object] = []

    def refuse(*arguments: object, **_: object) -> None:
        requested.append(arguments)
        raise OSError("there is no network")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    monkeypatch.syspath_prepend(str(folder))
    place = folder / file
    original = place.read_bytes() if place.exists() else None
    for request in REQUESTS[file]:
        edit(place, request)
        try:
            load_model(model_of(folder), "policy", torch.float32, 0)
            load_tokenizer(str(folder), trust_remote_code=False)
        except RlctlError as error:  # refused
            print(file, request, error)
        assert not (tmp_path / "ran").exists(), request
        assert requested == [], request
        place.unlink() if original is None else place.write_bytes(original)


def test_a_folder_with_an_adapter_is_refused(folder: Path) -> None:
    edit(folder / "adapter_config.json", {"base_model_name_or_path": "evil/hub"})
    with pytest.raises(RlctlError, match=r"has an adapter_config\.json, whose base and adapter"):
        load_model(model_of(folder), "policy", torch.float32, 0)
