"""Runs of several ranks train with the experts that their engines chose."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.command import metrics, rlctl
from tests.models import mixture_model, tiny_tokenizer

pytestmark = pytest.mark.soak
ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("size", "mode"),
    [
        ("tensor_model_parallel_size", "R2"),
        ("tensor_model_parallel_size", "R3"),
        ("pipeline_model_parallel_size", "R3"),
    ],
)
def test_ranks_that_divide_a_mixture_replay_its_experts(
    size: str, mode: str, settings: list[str], tmp_path: Path
) -> None:
    model = tmp_path / "mixture"
    tiny_tokenizer().save_pretrained(model)
    mixture_model("qwen3_moe", vocab_size=264).save_pretrained(model)  # which ranks can divide
    (tmp_path / "length.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return float(len(set(solution_str)))\n"
    )
    rlctl(
        *("train", "grpo", "--name", "replay", *settings, "trainer.n_gpus_per_node=2"),
        *(f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.rollout.name=hf"),
        "+actor_rollout_ref.model.override_config.experts_implementation=eager",
        *(f"{ACTOR}.fsdp_config.{size}=2", f"{ACTOR}.router_replay.mode={mode}"),
        *("actor_rollout_ref.rollout.n=4", f"{ACTOR}.optim.lr=1e-3"),
        f"reward.custom_reward_function.path={tmp_path}/length.py",
        *("reward.custom_reward_function.name=score", "data.max_prompt_length=200"),
        *("data.max_response_length=16", f"{ACTOR}.ppo_mini_batch_size=8"),  # one update per step
        cwd=tmp_path,
    )
    steps = metrics(tmp_path / "runs/quickstart/replay")[-2:]
    assert all(step["actor/grad_norm"] > 0 for step in steps)
    assert all(step["training/router_agreement"] > 0.999 for step in steps)
    assert all(step["training/rollout_probs_diff_max"] <= 1e-5 for step in steps)
