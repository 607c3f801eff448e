"""Multimodal checkpoints are trained on rows of text, and exported as what they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, PreTrainedConfig

from tests.e2e.command import metrics, rlctl
from tests.miniatures import with_random_weights
from tests.models import tiny_tokenizer
from tests.multimodal import multimodal_config
from tests.vlm import FAMILIES, vlm_config

pytestmark = pytest.mark.soak
VLLM = pytest.mark.extra("vllm")


def write(config: PreTrainedConfig, folder: Path) -> Path:
    """Write a miniature with weights and a tokenizer of 259 tokens; return its folder."""
    text = config.get_text_config(decoder=True)
    text.vocab_size, text.max_position_embeddings = 264, 512
    for name in ("image_token_id", "image_token_index", "video_token_id"):
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, 263)
    with_random_weights(config, folder).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        *((kind, "hf") for kind in ("qwen3_5", "gemma3", "llama4", "mistral3")),
        *(pytest.param(kind, "vllm", marks=VLLM) for kind in ("qwen3_5", "gemma3", "mistral3")),
    ],
)
def test_rows_of_text_train_a_multimodal_checkpoint(
    kind: str, engine: str, settings: list[str], tmp_path: Path
) -> None:
    has_sizes = engine == "vllm" and kind in FAMILIES  # of its kernels
    config = vlm_config(kind) if has_sizes else multimodal_config(kind)
    model = write(config, tmp_path / "model")
    (tmp_path / "length.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return float(len(set(solution_str)))\n"
    )
    command = (
        *("train", "grpo", "--inline", "--name", "text", *settings),
        *(f"actor_rollout_ref.model.path={model}", f"actor_rollout_ref.rollout.name={engine}"),
        *("actor_rollout_ref.rollout.n=4", "actor_rollout_ref.actor.optim.lr=1e-3"),
        f"reward.custom_reward_function.path={tmp_path}/length.py",
        *("reward.custom_reward_function.name=score", "trainer.save_freq=2"),
    )
    rlctl(*command, cwd=tmp_path)
    steps = metrics(tmp_path / "runs/quickstart/text")
    assert all(step["training/rollout_probs_diff_max"] <= 1e-4 for step in steps[-2:])
    assert all(step["actor/grad_norm"] > 0 for step in steps[-2:])
    rlctl("export", "text", "exported", cwd=tmp_path)
    before, after = (
        AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        for folder in (model, tmp_path / "exported")
    )
    assert type(before) is type(after)
    changed = {
        name
        for name, weight in after.named_parameters()
        if not torch.equal(weight, before.get_parameter(name))
    }
    assert changed
    assert not [name for name in changed if "vision" in name or "projector" in name]
