"""Hashes of models: sampled files, models of the hub, and what is not on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlctl.recipes.schema import Model
from rlctl.runtime.model import digest
from rlctl.runtime.model.digest import model_hashes
from tests.configs import configured


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
    monkeypatch.setattr(digest, "_WHOLE_BYTES", 1000)
    monkeypatch.setattr(digest, "_HEAD_BYTES", 100)
    monkeypatch.setattr(digest, "_BLOCK_BYTES", 16)
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
