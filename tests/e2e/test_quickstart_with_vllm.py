"""The quickstart with vLLM, in its own file because pytest-xdist distributes files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.command import metrics, rlctl

pytestmark = [pytest.mark.extra("vllm"), pytest.mark.slow, pytest.mark.soak]


def test_quickstart_accuracy_with_vllm(
    tmp_path: Path,
) -> None:
    """Train as shipped except for the engine, with five actor steps and fewer validation problems.

    The `hf` engine reaches 95.8 % here.
    """
    short = ["trainer.total_training_steps=10", "data.val_max_samples=96", "trainer.num_threads=1"]
    rlctl(
        "train",
        "ppo",
        "--inline",
        "--name",
        "vllm",
        "actor_rollout_ref.rollout.name=vllm",
        *short,
        cwd=tmp_path,
    )
    steps = metrics(tmp_path / "runs" / "quickstart" / "vllm")
    accuracies = [step[key] for step in steps for key in step if key.endswith("/acc/mean@1")]
    assert len(accuracies) == 2
    assert accuracies[0] < 0.4
    assert accuracies[1] > 0.9
    assert max(step["training/rollout_probs_diff_mean"] for step in steps[1:]) <= 1e-5
    assert max(step["training/rollout_probs_diff_max"] for step in steps[1:]) <= 1e-3
