"""Export to a model folder: it reproduces the run's last validation in transformers and vLLM."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rlctl.errors import ConfigError, ConflictError
from rlctl.runs.run import Run
from rlctl.runs.store import RunStore
from rlctl.runtime.export import MARKER, export, exported_files
from tests.e2e.command import metrics, rlctl, train
from tests.e2e.conftest import small
from tests.models import write_tiny_model
from tests.settings import given
from tests.tolerance import assert_as_exact, in_float64

RUNS = Path("runs") / "quickstart"
LORA = [
    *("actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_alpha=16"),
    *given(kl_loss=True, lr=1e-2),
]

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(char.islower() for char in solution_str) / 12
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose head size has vLLM kernels."""
    return write_tiny_model(tmp_path_factory.mktemp("base"), hidden_size=128, head_dim=32)


@pytest.fixture(scope="module")
def trained(folder: Path, shelf: Path, base: Path) -> Path:
    """Return a GRPO run with LoRA and a KL loss; an untrained model gets part of the reward."""
    (folder / "reward.py").write_text(REWARD)
    own = given(model=base, mini_batch=8, n=2, steps=3, validate=3, save=1, keep=5)
    own += given(reward_processes=1, reward=f"{folder}/reward.py")
    return train("grpo", "lora", "--inline", *small(shelf), *own, *LORA, cwd=folder)


def found(path: Path) -> Run:
    return RunStore(path.parent.parent).find(path.name)


def weights(path: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())


def test_lora_run_learns_and_uses_its_base_as_reference(trained: Path) -> None:
    rows = metrics(trained)
    # Before the first update policy and base are the same.
    assert rows[1]["actor/kl_loss"] == pytest.approx(0, abs=1e-6)
    assert rows[3]["actor/kl_loss"] > 1e-4
    for row in rows[1:]:
        assert row["training/rollout_probs_diff_max"] < 1e-4
        assert row["actor/grad_norm"] > 0
    actor = trained / "checkpoints" / "step_000003" / "actor"
    saved = [*FileSystemReader(actor).read_metadata().state_dict_metadata]
    assert any(name.startswith("model.") for name in saved)
    assert all("lora_" in name for name in saved if name.startswith(("model.", "optimizer.state.")))


def test_exported_model_scores_as_the_run_did(trained: Path, folder: Path, shelf: Path) -> None:
    rlctl("export", "lora", "model", cwd=folder)
    files = {path.name for path in (folder / "model").iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors"} <= files
    assert {"tokenizer.json", "README.md"} <= files
    last = {name: value for name, value in metrics(trained)[3].items() if name.startswith("val-")}
    for target in ("model", "lora"):
        reward = f"{folder}/reward.py"
        own = given(val=f"{shelf}/val.parquet", reward=reward, prompt=160, response=12)
        words = [f"-s{each}" for each in own]
        scores = json.loads(rlctl("eval", target, *words, "--json", cwd=folder).stdout)
        core = [name for name in last if name.startswith("val-core/")]
        assert core
        for name in core:
            assert scores[name] == pytest.approx(last[name]), (target, name)
    card = (folder / "model" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "lora, step 3" in card
    assert "actor_rollout_ref.model.lora_rank | 8" in card
    GenerationConfig.from_pretrained(folder / "model")
    assert AutoTokenizer.from_pretrained(folder / "model").chat_template


def test_export_copies_what_the_manifest_lists(trained: Path, folder: Path, tmp_path: Path) -> None:
    """Leave out links and other files that somebody put into the checkpoint."""
    (tmp_path / "secret.txt").write_text("TOPSECRET")
    copy = tmp_path / "runs" / "p" / "links"
    shutil.copytree(trained, copy, symlinks=True)
    checkpoint = copy / "checkpoints" / "step_000002"
    (checkpoint / "huggingface" / "notes.txt").symlink_to(tmp_path / "secret.txt")
    more = checkpoint / "huggingface" / "more"
    more.symlink_to(tmp_path)
    with pytest.raises(ConflictError, match="a folder of a run must not be a link"):
        found(copy)
    more.unlink()
    export(found(copy), 2, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").rglob("*")}
    assert {"config.json", "model.safetensors"} <= names
    assert not names & {"notes.txt", "secret.txt"}
    assert set(exported_files(tmp_path / "out")) == names - {MARKER}
    (tmp_path / "out" / "notes.txt").symlink_to(tmp_path / "secret.txt")
    assert "notes.txt" not in exported_files(tmp_path / "out")
    manifest = checkpoint / "manifest.json"
    listing = json.loads(manifest.read_text())
    for name in ("huggingface/notes.txt", "../../../../secret.txt"):
        sha256 = hashlib.sha256(b"TOPSECRET").hexdigest()
        files = listing["files"] | {name: {"bytes": 9, "sha256": sha256}}
        manifest.write_text(json.dumps(listing | {"files": files}))
        with pytest.raises(ConfigError, match="is a link or a path to another folder"):
            export(found(copy), 2, tmp_path / "again")


def test_export_of_adapter_and_of_checkpoint_without_model_folder(
    trained: Path, folder: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import peft

    export(found(trained), 2, folder / "merged")
    export(found(trained), 2, folder / "adapter", "adapter")
    merged = weights(folder / "merged")
    loaded = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), str(folder / "adapter")
    )
    exact = dict(in_float64(loaded).merge_and_unload().named_parameters())
    for name, value in loaded.merge_and_unload().named_parameters():
        assert_as_exact(merged[name], value, exact[name])
    checkpoint = trained / "checkpoints" / "step_000002"
    copy = folder / RUNS / "bare"
    shutil.copytree(trained, copy)
    shutil.rmtree(copy / "checkpoints" / checkpoint.name / "huggingface")
    manifest = copy / "checkpoints" / checkpoint.name / "manifest.json"
    listing = json.loads(manifest.read_text())
    listing["files"] = {
        name: each for name, each in listing["files"].items() if not name.startswith("huggingface/")
    }
    manifest.write_text(json.dumps(listing))
    with pytest.raises(ConfigError, match="was not made by you in this folder"):
        export(found(copy), 2, folder / "rebuilt")
    monkeypatch.setenv("RLCTL_TRUSTED", str(folder))
    export(found(copy), 2, folder / "rebuilt")
    for name, value in weights(folder / "rebuilt").items():
        assert_as_exact(value, merged[name], exact[name])
    assert AutoTokenizer.from_pretrained(folder / "rebuilt").chat_template
