"""verl's published example commands for GSM8K compose unchanged."""

from __future__ import annotations

import shlex

import pytest

from rlctl.errors import ConfigError
from rlctl.recipes.compose import compose

# Arguments of examples/{grpo,rloo,reinforce_plus_plus}_trainer at verl's commit 3f38806, and of
# the first GRPO script (03aefba).
GRPO = """
algorithm.adv_estimator=grpo data.train_files=$HOME/data/gsm8k/train.parquet
data.val_files=$HOME/data/gsm8k/test.parquet
data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=1024
data.filter_overlong_prompts=True
data.truncation='error' actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct
actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.actor.ppo_mini_batch_size=256
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=40 actor_rollout_ref.actor.use_kl_loss=True
actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl
actor_rollout_ref.actor.entropy_coeff=0
actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.actor.fsdp_config.param_offload=False
actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=40
actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.n=5
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=40
actor_rollout_ref.ref.fsdp_config.param_offload=True
algorithm.use_kl_in_reward=False trainer.critic_warmup=0 trainer.logger=['console','wandb']
trainer.project_name='verl_grpo_example_gsm8k' trainer.experiment_name='qwen2_7b_function_rm'
trainer.n_gpus_per_node=8
trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15
"""
FIRST_GRPO = """
data.train_files=$HOME/data/gsm8k/train.parquet data.val_files=$HOME/data/gsm8k/test.parquet
data.train_batch_size=1024
data.val_batch_size=1312 data.max_prompt_length=512 data.max_response_length=512
actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size=128
actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.actor.fsdp_config.param_offload=False
actor_rollout_ref.actor.fsdp_config.grad_offload=False
actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
actor_rollout_ref.rollout.log_prob_micro_batch_size=128
actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.n=5
actor_rollout_ref.ref.log_prob_micro_batch_size=128
actor_rollout_ref.ref.fsdp_config.param_offload=True
algorithm.kl_ctrl.kl_coef=0.001 trainer.critic_warmup=0 trainer.logger=['console','wandb']
trainer.project_name='verl_grpo_example_gsm8k'
trainer.experiment_name='deepseek_llm_7b_function_rm' trainer.n_gpus_per_node=8
trainer.nnodes=1 trainer.save_freq=-1 trainer.total_epochs=15
"""
RLOO = """
algorithm.adv_estimator=rloo data.train_files=$HOME/data/gsm8k/train.parquet
data.val_files=$HOME/data/gsm8k/test.parquet
data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=1024
data.filter_overlong_prompts=True
data.truncation='error' actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct
actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.actor.ppo_mini_batch_size=256
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=80 actor_rollout_ref.actor.use_kl_loss=False
actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.actor.fsdp_config.param_offload=False
actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=160
actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.n=5
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=160
actor_rollout_ref.ref.fsdp_config.param_offload=True
algorithm.use_kl_in_reward=True algorithm.kl_penalty=kl algorithm.kl_ctrl.kl_coef=0.001
trainer.critic_warmup=0
trainer.logger=['console','wandb'] trainer.project_name='verl_rloo_example_gsm8k'
trainer.experiment_name='qwen2_7b_function_rm'
trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=-1 trainer.test_freq=5
trainer.total_epochs=15
"""
REINFORCE = """
algorithm.adv_estimator=reinforce_plus_plus
data.train_files="['/h/data/gsm8k/train.parquet', '/h/data/math/train.parquet']"
data.val_files="['/h/data/gsm8k/test.parquet', '/h/data/math/test.parquet']"
data.train_batch_size=1024 data.max_prompt_length=1024 data.max_response_length=1024
data.filter_overlong_prompts=True
data.truncation='error' actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct
actor_rollout_ref.actor.optim.lr=3e-6
actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.actor.ppo_mini_batch_size=1024
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 actor_rollout_ref.actor.use_kl_loss=True
actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=mse
actor_rollout_ref.actor.entropy_coeff=0
actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.actor.fsdp_config.param_offload=False
actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16
actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.n=8
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16
actor_rollout_ref.ref.fsdp_config.param_offload=True
algorithm.use_kl_in_reward=False trainer.critic_warmup=0 trainer.logger=['console','wandb']
trainer.project_name='verl_grpo_example_gsm8k' trainer.experiment_name='qwen2_7b_function_rm'
trainer.n_gpus_per_node=16
trainer.nnodes=1 trainer.save_freq=-1 trainer.test_freq=5 trainer.total_epochs=15
"""


@pytest.mark.parametrize(
    ("command", "estimator", "n"),
    [(GRPO, "grpo", 5), (RLOO, "rloo", 5), (REINFORCE, "reinforce_plus_plus", 8)],
)
def test_command_composes(command: str, estimator: str, n: int) -> None:
    words = shlex.split(command)
    recipe = compose("ppo_trainer", words)
    config = recipe.config
    assert all("is dropped: " in notice for notice in recipe.notices), recipe.notices
    assert recipe.unused == []
    assert (config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n) == (estimator, n)
    assert config.trainer.logger == ("console", "wandb")
    assert config.actor_rollout_ref.ref.fsdp_config.param_offload is True
    places = {chain[-1].where for chain in recipe.origins.values() if chain[-1].level == 3}
    dropped = {notice.partition("=")[0] for notice in recipe.notices}
    kept = [word for word in words if word.partition("=")[0] not in dropped]
    assert places == {f"override {word}" for word in kept}


def test_first_grpo_command_composes_with_notices() -> None:
    recipe = compose("ppo_trainer", shlex.split(FIRST_GRPO))
    assert recipe.config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 128
    assert recipe.config.actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu == 128
    assert len(recipe.notices) == 5
    assert any("grad_offload=false is dropped" in notice for notice in recipe.notices)


@pytest.mark.parametrize(
    ("override", "instead"),
    [
        ("actor_rollout_ref.rollout.enable_chunked_prefill=False", "engine_kwargs"),
        ("trainer.use_v1=False", "one trainer"),
        ("reward_model.reward_manager=dapo", "reward.functions"),
        ("critic.forward_micro_batch_size_per_gpu=8", "critic.ppo_micro_batch_size_per_gpu"),
        ("data.gen_batch_size=64", "algorithm.filter_groups"),
    ],
)
def test_unsupported_verl_key_has_a_hint(override: str, instead: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose("ppo_trainer", [*shlex.split(GRPO), override])
    [problem] = caught.value.problems
    assert problem.where == f"override {override}"
    assert instead in (problem.hint or "")
