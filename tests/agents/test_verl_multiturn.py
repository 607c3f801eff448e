"""verl's multi-turn configuration of GSM8K, with its tool, trains a bundled model unmodified."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlctl.__main__ import main
from rlctl.data_prep.arithmetic import ArithmeticParams, arithmetic
from rlctl.data_prep.rows import PromptRow, write_rows
from tests.e2e.command import metrics

# The keys of examples/sglang_multiturn/config/gsm8k_multiturn_grpo.yaml and of its tool file.
CONFIG = """
hydra:
  searchpath:
    - file://verl/trainer/config
defaults:
  - ppo_trainer
  - _self_
data:
  max_prompt_length: 1024
  max_response_length: 1024
  train_batch_size: 256
  return_raw_chat: True
actor_rollout_ref:
  hybrid_engine: True
  rollout:
    name: sglang
    multi_turn:
      enable: True
      max_assistant_turns: 5
"""
TOOLS = """
tools:
  - class_name: "verl.tools.gsm8k_tool.Gsm8kTool"
    config:
      type: native
    tool_schema:
      type: "function"
      function:
        name: "calc_gsm8k_reward"
        description: "A tool for calculating the reward of gsm8k."
        parameters:
          type: "object"
          properties:
            answer:
              type: "string"
              description: "The model's answer to the GSM8K math problem, must be a digits"
          required: ["answer"]
"""


@pytest.mark.soak
def test_multiturn_grpo_of_gsm8k(tmp_path: Path) -> None:
    config = tmp_path / "examples" / "sglang_multiturn" / "config"
    config.mkdir(parents=True)
    (config / "gsm8k_multiturn_grpo.yaml").write_text(CONFIG)
    (config / "tools.yaml").write_text(TOOLS)
    rows = [
        PromptRow(
            "openai/gsm8k",
            row.prompt,
            row.ground_truth,
            extra_info={
                "need_tools_kwargs": True,
                "tools_kwargs": {
                    "calc_gsm8k_reward": {"create_kwargs": {"ground_truth": str(row.ground_truth)}}
                },
                "interaction_kwargs": {},
            },
            agent_name="tool_agent",
        )
        for row in arithmetic(ArithmeticParams(train=16, val=1, level=1))["train"]
    ]
    write_rows(tmp_path / "train.parquet", rows)
    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    assert (
        main(
            [
                *("train", "ppo", "--inline", "--config-path", str(config)),
                *("--config-name", "gsm8k_multiturn_grpo"),
                "algorithm.adv_estimator=grpo",
                "data.train_batch_size=8",
                "data.filter_overlong_prompts=True",
                "data.truncation=error",
                "data.return_raw_chat=True",
                "data.max_prompt_length=200",
                "data.max_response_length=96",
                "actor_rollout_ref.model.path=quickstart-agent",
                "actor_rollout_ref.model.use_remove_padding=True",
                f"{actor}.ppo_mini_batch_size=8",
                f"{actor}.ppo_micro_batch_size_per_gpu=8",
                f"{actor}.use_kl_loss=True",
                f"{actor}.optim.lr=1e-6",
                f"{rollout}.log_prob_micro_batch_size_per_gpu=8",
                "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8",
                f"{rollout}.tensor_model_parallel_size=1",
                f"{rollout}.n=4",
                f"{rollout}.multi_turn.tool_config_path={config}/tools.yaml",
                f"{rollout}.name=hf",  # the only change: SGLang is not installed
                "trainer.critic_warmup=0",
                "trainer.logger=[jsonl]",
                "trainer.project_name=gsm8k_async_rl",
                "trainer.experiment_name=multiturn",
                "trainer.n_gpus_per_node=1",
                "trainer.total_training_steps=1",
                f"trainer.run_dir={tmp_path / 'runs'}",
                f"data.train_files={tmp_path}/train.parquet",
            ]
        )
        == 0
    )
    *_, step = metrics(tmp_path / "runs" / "gsm8k_async_rl" / "multiturn")
    assert step["agent/turns/max"] >= 1
    assert step["agent/retokenized_tokens"] == 0
    assert step["agent/num_failed"] == 0
