"""verl's keys that have no counterpart, with the reason and the values that may be dropped.

Every key of verl's PPO and SFT configurations, versions 0.2 to 0.9, is here, in `renamed`, or a key
of rlctl. What would change the result of a run is refused. The first match wins.
"""

from __future__ import annotations

from rlctl.recipes.verl import features as missing
from rlctl.recipes.verl.rules import Rule, depends, needs, no_effect, only

_POLICY = "actor_rollout_ref"
_ROLES = "{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}"
_FSDP = f"{_ROLES}.fsdp_config"
_MODEL = "{actor_rollout_ref,critic}.model"
_ROLLOUT = "actor_rollout_ref.rollout"
_OFF = (None, False)
_EMPTY = (None, {}, [], "")

_MEMORY = "it saves memory and changes no number"
_SPEED = "it is about speed and changes no number"
_COMPILE = "actor_rollout_ref.actor.use_torch_compile compiles actor, reference and critic"

SHARDING: tuple[Rule, ...] = (
    needs(
        f"{{{_POLICY}.actor,{_POLICY}.ref,critic,{_POLICY}.model,reward_model}}.megatron*",
        missing.MEGATRON,
    ),
    needs(
        "{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}."
        "{veomni,torchtitan,automodel,mindspeed}*",
        missing.OTHER_BACKEND,
    ),
    Rule(
        f"{_ROLES}{{.fsdp_config,}}.strategy",
        "models are always sharded by FSDP2, which gives the same numbers",
        ("fsdp", "fsdp2", "fsdp_turbo", "megatron", None),
    ),
    only("model_engine", ("dp", "fsdp", "megatron"), "models are always sharded by FSDP2"),
    only("engine", ("fsdp", "fsdp2", "megatron"), "models are always sharded by FSDP2"),
    only("optim", ("fsdp", "megatron"), "AdamW is the optimizer"),
    only("model", ("hf_model",), "models are transformers models"),
    no_effect(
        "{actor_rollout_ref.actor,actor_rollout_ref.model,critic.model}.use_remove_padding",
        "rows are always packed without padding, which is exact",
    ),
    no_effect(
        f"{_FSDP}.{{offload_policy,offload_params,cpu_offload}}",
        "fsdp_config.param_offload and fsdp_config.optimizer_offload select host memory",
    ),
    no_effect(f"{_FSDP}.grad_offload", "gradients are freed after each update"),
    no_effect(
        f"{_FSDP}.{{forward_prefetch,use_no_sync_for_gradient_accumulation}}",
        _SPEED,
    ),
    no_effect(f"{_FSDP}.use_torch_compile", _COMPILE),
    no_effect(f"{_FSDP}.{{wrap_policy*,use_orig_params,min_num_params}}", "layers are sharded"),
    no_effect(f"{_FSDP}.forward_only", "only actor and critic have an optimizer"),
    no_effect(f"{_FSDP}.{{pad_to_length,pad_to_length_bucket}}", "rows are packed without padding"),
    only(
        f"{_FSDP}.{{dtype,mixed_precision.param_dtype}}",
        ("bfloat16", "bf16"),
        "the compute dtype is actor_rollout_ref.model.dtype, bfloat16 on GPUs",
        "set actor_rollout_ref.model.dtype",
    ),
    only(
        f"{_FSDP}.mixed_precision.{{reduce_dtype,buffer_dtype}}",
        ("float32", "fp32"),
        "gradients are reduced in float32",
    ),
    only(f"{_FSDP}.mixed_precision", _EMPTY, "the compute dtype is actor_rollout_ref.model.dtype"),
    only(f"{_FSDP}.seed", (42,), "seeds come from trainer.seed", "set trainer.seed"),
    only(
        f"{_FSDP}.full_determinism",
        _OFF,
        "it is off",
        "set trainer.deterministic=true",
    ),
    needs(f"{_ROLES}{{.fsdp_config,}}.qat.enable", missing.QUANTIZATION, _OFF),
    depends(f"{_ROLES}{{.fsdp_config,}}.qat*", "quantized training is off"),
    depends(f"{_FSDP}.turbo_config*", "models are always sharded by FSDP2"),
)

TRAINING: tuple[Rule, ...] = (
    no_effect(
        f"{_ROLES}{{.fsdp_config,}}.entropy_{{checkpointing,from_logits_with_chunking,"
        "from_logits_chunk_size}",
        "the entropy is always computed in chunks that fit into memory",
    ),
    no_effect("{actor_rollout_ref.ref,critic}.use_torch_compile", _COMPILE),
    no_effect(f"{_ROLES}.{{pad_to_length,use_fused_kernels,use_prefix_grouper}}", _SPEED),
    no_effect(
        f"{_ROLES}.{{calculate_entropy,calculate_sum_pi_squared}}",
        "it is computed where the loss or the estimator needs it",
    ),
    needs("actor_rollout_ref.actor.freeze_vision_tower", missing.IMAGES, _OFF),
    only(
        "{actor_rollout_ref.ref,critic}.router_replay.mode",
        (None, "disabled"),
        "reference and critic choose their own experts",
    ),
    only(f"{_ROLES}.router_replay.{{record_file,replay_file}}", _EMPTY, "records are in memory"),
    depends("{actor_rollout_ref.ref,critic}.router_replay*", "they choose their own experts"),
    no_effect(
        f"{_ROLES}.checkpoint.{{save_contents,async_save,strict}}",
        "checkpoints hold model, optimizer and state; `rlctl export` writes a Hugging Face folder",
    ),
    only(
        f"{_ROLES}.checkpoint.load_contents",
        (None, ["model", "optimizer", "extra"], ["model", "optimizer", "extra", "hf_model"]),
        "a resumed run loads the complete state",
    ),
    only(f"{_ROLES}.checkpoint", _EMPTY, "checkpoints hold model, optimizer and state"),
    only(
        f"{_ROLES}.profiler.all_ranks",
        _OFF,
        "trainer.profile.ranks lists the ranks",
        "set trainer.profile.ranks=null",
    ),
    depends(f"{_ROLES}.profiler*", "trainer.profile.steps traces all roles"),
    only(
        "actor_rollout_ref.actor.tis_imp_ratio_cap",
        (None, -1),
        "it is off",
        "set algorithm.rollout_correction.rollout_is=token and "
        "algorithm.rollout_correction.rollout_is_threshold={value}",
    ),
    only(
        "{actor_rollout_ref.actor,critic}.optim.total_training_steps",
        (-1, None),
        "the schedule has the length of the run",
        "set trainer.total_training_steps",
    ),
    only(
        "{actor_rollout_ref.actor,critic}.optim.zero_indexed_step",
        (True,),
        "the first update has the schedule's first value",
    ),
    no_effect(
        "critic.forward_{micro_batch_size,micro_batch_size_per_gpu,max_token_len_per_gpu}",
        "critic.ppo_* limits all passes of the critic",
    ),
    no_effect("critic.enable", "the critic is built if algorithm.adv_estimator needs values"),
    only("critic.loss_scale_factor", (None,), "it is data.max_response_length"),
    no_effect("critic.nccl_timeout", "timeouts are in trainer.timeouts"),
    only("actor_rollout_ref.ref.model", _EMPTY, "null is the actor's initial model"),
)

MODEL: tuple[Rule, ...] = (
    no_effect(f"{_MODEL}.use_shm", _SPEED),
    no_effect(f"{_MODEL}.{{use_liger,use_fused_kernels,fused_kernel_options*}}", _SPEED),
    no_effect(f"{_MODEL}.tiled_mlp*", _MEMORY),
    no_effect(f"{_MODEL}.override_config.attn_implementation", _SPEED),
    only(
        f"{_MODEL}.external_lib",
        _EMPTY,
        "no module is imported",
        "plug-ins are selected as module:Name where they are used",
    ),
    only(
        f"{_MODEL}.chat_template",
        _EMPTY,
        "the template is the tokenizer's",
        f"set {_MODEL}.custom_chat_template",
    ),
    only(f"{_MODEL}.hf_config_path", _EMPTY, "config.json is in the model folder"),
    only(
        f"{_MODEL}.exclude_modules",
        _EMPTY,
        "all target_modules have adapters",
        "list the modules with adapters in target_modules",
    ),
    only(
        f"{_MODEL}.{{lora_adapter_path,lora.adapter_path}}",
        _EMPTY,
        "adapters start from scratch",
        "merge the adapter into the model folder and train new adapters",
    ),
    only(f"{_MODEL}.lora.*", (*_EMPTY, *_OFF), "adapters are peft's LoRA"),
    needs(f"{_MODEL}.mtp.{{enable,enable_train,enable_rollout}}", missing.MTP, _OFF),
    depends(f"{_MODEL}.mtp*", "multi-token prediction is off"),
    only("critic.load_weight", (True,), "weights are always loaded"),
    no_effect("actor_rollout_ref.hybrid_engine", "trainer.placement.rollout sets the placement"),
    no_effect("actor_rollout_ref.nccl_timeout", "timeouts are in trainer.timeouts"),
)
