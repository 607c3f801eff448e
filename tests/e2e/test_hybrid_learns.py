"""A hybrid model learns from random weights by GRPO."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from rlctl.quickstart import NAME, real_path
from tests.e2e.command import metrics, rlctl
from tests.miniatures import miniature_config

pytestmark = pytest.mark.soak

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))
"""


def test_a_miniature_of_qwen3_5_learns_from_random_weights(tmp_path: Path) -> None:
    """An easy version of the quickstart: the score is the share of digits in a response.

    Random weights write about as many digits as there are among the tokens, one in ten.
    """
    model = tmp_path / "model"
    shutil.copytree(real_path(NAME), model, ignore=shutil.ignore_patterns("*.safetensors"))
    config = miniature_config("qwen3_5_text")
    config.vocab_size = len(PreTrainedTokenizerFast.from_pretrained(model))
    config.save_pretrained(model)
    (tmp_path / "digits.py").write_text(REWARD)
    rlctl(
        *("train", "grpo", "--recipe", "grpo", "--inline", "--name", "hybrid"),
        *(f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.model.init=random"),
        *("actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.actor.optim.lr=3e-3"),
        *("data.max_response_length=12", "data.val_max_samples=32"),
        f"reward.custom_reward_function.path={tmp_path / 'digits.py'}",
        *("trainer.total_training_steps=60", "trainer.num_threads=1", "trainer.save_freq=-1"),
        cwd=tmp_path,
    )
    steps = metrics(tmp_path / "runs" / "quickstart" / "hybrid")
    rewards = [step["critic/score/mean"] for step in steps if "critic/score/mean" in step]
    assert rewards[0] < 0.3
    assert rewards[-1] > 0.8
    assert max(step.get("training/rollout_probs_diff_max", 0.0) for step in steps) <= 1e-3
