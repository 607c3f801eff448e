"""verl's keys under their names here, and words of verl that are other words here."""

from __future__ import annotations

from typing import Any

from rlctl.recipes.verl import asynchronous, distillation, megatron
from rlctl.recipes.verl import features as missing
from rlctl.recipes.verl.rules import Feature

_TRAINED = "{actor_rollout_ref.actor,critic}"
_MODEL = "{actor_rollout_ref,critic}.model"
_REWARD = "{reward,reward_model}"
_OVERLONG = "algorithm.overlong_buffer"
_CORRECTION = "algorithm.rollout_correction"

# (pattern, new key with \1 for the first group). The first match wins.
MOVED: tuple[tuple[str, str], ...] = (
    *asynchronous.MOVED,
    ("val_generations_to_log_to_wandb", "trainer.log_val_generations"),
    ("trainer.val_generations_to_log_to_wandb", "trainer.log_val_generations"),
    ("custom_reward_function*", r"reward.custom_reward_function\1"),
    ("reward_model.overlong_buffer.{enable,len,penalty_factor}", rf"{_OVERLONG}.\1"),
    (
        f"{_REWARD}.reward_kwargs.overlong_buffer_cfg.{{enable,len,penalty_factor}}",
        rf"{_OVERLONG}.\2",
    ),
    ("{global_profiler.steps,trainer.profile_steps}", "trainer.profile.steps"),
    (
        "{actor_rollout_ref.actor,actor_rollout_ref.ref,actor_rollout_ref.rollout,critic}"
        ".profiler.ranks",
        "trainer.profile.ranks",
    ),
    (
        "{actor_rollout_ref.actor,actor_rollout_ref.ref,actor_rollout_ref.rollout,critic}"
        ".profiler.tool_config.torch.{with_stack,with_memory,record_shapes}",
        r"trainer.profile.\2",
    ),
    ("{reward.,}reward_model.model.fsdp_config*", r"reward.reward_model.fsdp_config\2"),
    ("{reward.,}reward_model.{model_path,model.model_path}", "reward.reward_model.model.path"),
    (
        "{reward.,}reward_model.micro_batch_size",
        "reward.reward_model.micro_batch_size_per_gpu",
    ),
    (
        "reward_model.{enable,max_length,use_dynamic_bsz,micro_batch_size_per_gpu,"
        "forward_max_token_len_per_gpu,fsdp_config*,model.path,model.trust_remote_code,"
        "model.override_config*}",
        r"reward.reward_model.\1",
    ),
    ("ray_init.timeline_json_file", "ray_kwargs.timeline_json_file"),
    ("ray_init*", r"ray_kwargs.ray_init\1"),
    ("trainer.runtime_env*", r"ray_kwargs.ray_init.runtime_env\1"),
    (f"{_TRAINED}.ppo_micro_batch_size", r"\1.ppo_micro_batch_size_per_gpu"),
    (
        "actor_rollout_ref.{rollout,ref}.log_prob_micro_batch_size",
        r"actor_rollout_ref.\1.log_prob_micro_batch_size_per_gpu",
    ),
    (f"{_TRAINED}.optim.clip_grad", r"\1.grad_clip"),
    (f"{_TRAINED}.optim.{{warmup_style,lr_scheduler}}", r"\1.optim.lr_scheduler_type"),
    (f"{_TRAINED}.optim.warmup_steps_ratio", r"\1.optim.lr_warmup_steps_ratio"),
    ("critic.model.fsdp_config*", r"critic.fsdp_config\1"),
    ("critic.fsdp.*", r"critic.fsdp_config.\1"),
    (
        "{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.ulysses_sequence_parallel_size",
        r"\1.fsdp_config.ulysses_sequence_parallel_size",
    ),
    (f"{_TRAINED}.tensor_parallel_size", r"\1.fsdp_config.tensor_model_parallel_size"),
    (f"{_TRAINED}.context_parallel_size", r"\1.fsdp_config.ulysses_sequence_parallel_size"),
    (
        "{reward.,}reward_model.ulysses_sequence_parallel_size",
        "reward.reward_model.fsdp_config.ulysses_sequence_parallel_size",
    ),
    ("trainer.max_{actor,critic}_ckpt_to_keep", "trainer.max_ckpt_to_keep"),
    ("trainer.resume_path", "trainer.resume_from_path"),
    (f"{_MODEL}.torch_dtype", r"\1.model.dtype"),
    ("data.tokenizer", "actor_rollout_ref.model.tokenizer_path"),
    ("data.trust_remote_code", "actor_rollout_ref.model.trust_remote_code"),
    ("critic.model.tokenizer", "critic.model.tokenizer_path"),
    (
        "actor_rollout_ref.rollout.update_weights_bucket_megabytes",
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes",
    ),
    ("actor_rollout_ref.actor.loss_mode", "actor_rollout_ref.actor.policy_loss.loss_mode"),
    ("actor_rollout_ref.rollout.engine_kwargs.vllm*", r"actor_rollout_ref.rollout.engine_kwargs\1"),
    ("algorithm.{rollout_is,rollout_is_threshold,rollout_rs}", rf"{_CORRECTION}.\1"),
    *megatron.MOVED,
)

# Settings of plug-ins, which verl keeps beside the settings of the section.
PLUGIN_SETTINGS: tuple[tuple[str, str], ...] = (
    ("algorithm.gdpo_{reward_keys,reward_weights}", r"algorithm.adv_estimator_params.\1"),
    (
        "actor_rollout_ref.actor.{tau_pos,tau_neg}",
        r"actor_rollout_ref.actor.policy_loss.params.\1",
    ),
    (
        "actor_rollout_ref.actor{.policy_loss,}."
        "{clip_cov_ratio,clip_cov_lb,clip_cov_ub,kl_cov_ratio,ppo_kl_coef}",
        r"actor_rollout_ref.actor.policy_loss.params.\2",
    ),
    (
        "actor_rollout_ref.actor.policy_loss.dro_beta",
        "actor_rollout_ref.actor.policy_loss.params.beta",
    ),
    ("reward.gsm8k*", r"reward.params.gsm8k\1"),
    ("reward.timeout", "reward.timeout_s"),
    *distillation.MOVED,
)

# Keys of verl's SFT trainer, whose model and optimizer have sections of their own.
SFT_MOVED: tuple[tuple[str, str], ...] = (
    ("data.micro_batch_size{_per_gpu,}", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"),
    ("data.max_token_len_per_gpu", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"),
    ("data.use_dynamic_bsz", "actor_rollout_ref.actor.use_dynamic_bsz"),
    ("model.partial_pretrain", "actor_rollout_ref.model.path"),
    ("model.strategy", "actor_rollout_ref.actor.strategy"),
    ("model.fsdp_config*", r"actor_rollout_ref.actor.fsdp_config\1"),
    ("model.*", r"actor_rollout_ref.model.\1"),
    ("optim.clip_grad", "actor_rollout_ref.actor.grad_clip"),
    ("optim.*", r"actor_rollout_ref.actor.optim.\1"),
    ("engine.*", r"actor_rollout_ref.actor.fsdp_config.\1"),
    (
        "ulysses_sequence_parallel_size",
        "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size",
    ),
    ("use_remove_padding", "actor_rollout_ref.actor.use_remove_padding"),
    ("{trainer.checkpoint,checkpoint}*", r"actor_rollout_ref.actor.checkpoint\2"),
)

# Keys that are appended to the dotted path of another key.
SFT_PATHS = {
    "data.prompt_dict_keys": "data.prompt_key",
    "data.response_dict_keys": "data.response_key",
}

# (pattern of the key here, words of verl, words here)
_DTYPES = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}
_RS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
VALUES: tuple[tuple[str, dict[Any, Any]], ...] = (
    ("{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.fsdp_config.model_dtype", _DTYPES),
    (f"{_MODEL}.dtype", {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}),
    (f"{_CORRECTION}.rollout_rs", _RS),
    (f"{_TRAINED}.optim.optimizer", {"adamw": "AdamW", "adam": "AdamW"}),
    (f"{_TRAINED}.optim.override_optimizer_config", {None: {}}),
    ("trainer.log_val_generations", {-1: 0}),
    distillation.VALUES,
    ("actor_rollout_ref.rollout.checkpoint_engine.backend", {"naive": "auto"}),
)

# (pattern of the key, words that name a feature that rlctl lacks)
_STRATEGIES = dict.fromkeys(
    ("veomni", "torchtitan", "automodel", "mindspeed"), missing.OTHER_BACKEND
)
_MANAGERS = {"batch": missing.REWARD_BATCH}
REFUSED_WORDS: tuple[tuple[str, dict[Any, Feature]], ...] = (
    distillation.REFUSED,
    ("trainer.device", {"npu": missing.NPU}),
    ("actor_rollout_ref.rollout.checkpoint_engine.backend", {"hccl": missing.NPU}),
    ("actor_rollout_ref.rollout.name", {"trtllm": missing.TENSORRT}),
    (
        "actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend",
        {"ascend": missing.NPU},
    ),
    ("{model_engine,engine,optim}", _STRATEGIES),
    ("{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}{.fsdp_config,}.strategy", _STRATEGIES),
    (
        "{reward_model.reward_manager,reward.reward_manager.name,reward_manager.name,"
        "reward_manager}",
        _MANAGERS,
    ),
)
