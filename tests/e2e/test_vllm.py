"""Complete runs with vLLM: in this process, and on Ray with one engine for two ranks.

The policy has LoRA adapters, which vLLM computes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.command import metrics, rlctl
from tests.e2e.killed_runs import SCORE
from tests.settings import given

pytestmark = [pytest.mark.extra("vllm"), pytest.mark.slow]


LORA = [
    "actor_rollout_ref.model.lora_rank=6",
    "actor_rollout_ref.model.use_rslora=true",
    "actor_rollout_ref.rollout.lora_merge=false",
    "actor_rollout_ref.actor.optim.lr=0.05",
]


def test_vllm_inline_and_shared_by_two_ranks(tmp_path: Path, settings: list[str]) -> None:
    (tmp_path / "score.py").write_text(SCORE)
    settings = [*settings, *LORA, *given(engine="vllm", reward_processes=1, reward="score.py")]
    two_ranks = given(ranks=2, tensor=2)
    # The other scores responses while vLLM generates; the numbers are the same.
    apart = [*settings, "reward.overlap=false"]
    rlctl("train", "ppo", "--inline", "--name", "inline", *apart, cwd=tmp_path)
    told = rlctl("train", "ppo", "--name", "two", *settings, *two_ranks, cwd=tmp_path).stderr
    runs = tmp_path / "runs" / "quickstart"
    log = (runs / "two" / "attempts" / "1" / "main-0.log").read_text()
    for phase in (
        "importing vLLM",
        "building vLLM's engine and cache",
        "connecting vLLM's weights",
    ):
        assert f"s] {phase}\n" in told
        assert f"{phase}\n" in log
    for name in ("inline", "two"):
        steps = metrics(runs / name)[1:]
        assert len(steps) == 2
        for step in steps:
            assert step["training/rollout_probs_diff_mean"] <= 1e-5
            assert step["training/rollout_probs_diff_max"] <= 1e-3
    one, two = metrics(runs / "inline")[1], metrics(runs / "two")[1]
    for name in ("critic/score/mean", "response_length/mean"):  # the same responses
        assert two[name] == pytest.approx(one[name])
