"""verl's Megatron sections: FSDP2 runs instead, which gives the same numbers.

Sizes of the mesh, fusions and recomputation change where and how fast a number is computed, so they
are dropped with a notice. What changes the numbers themselves is refused. The keys are those of
verl's `ppo_megatron_trainer` and of Megatron-Core's `TransformerConfig`.
"""

from __future__ import annotations

from rlctl.recipes.verl import features as missing
from rlctl.recipes.verl.rules import Rule, depends, needs, no_effect, only

_TRAINED = "{actor_rollout_ref.actor,critic}"
_SECTION = "{actor_rollout_ref.actor,actor_rollout_ref.ref,critic}.megatron"
_TRANSFORMER = f"{_SECTION}.override_transformer_config"
_OPTIM = f"{_TRAINED}.optim"
_MODEL = "{actor_rollout_ref,critic}.model"
_LORA = f"{_MODEL}.lora"
_OFF = (None, False)

MOVED: tuple[tuple[str, str], ...] = (
    (f"{_SECTION}.{{param_offload,optimizer_offload}}", r"\1.fsdp_config.\2"),
    (f"{_SECTION}.dtype", r"\1.fsdp_config.dtype"),
    (
        f"{_SECTION}.tensor_model_parallel_size",
        r"\1.fsdp_config.tensor_model_parallel_size",
    ),
    (
        f"{_SECTION}.pipeline_model_parallel_size",
        r"\1.fsdp_config.pipeline_model_parallel_size",
    ),
    (
        f"{_SECTION}.context_parallel_size",
        r"\1.fsdp_config.ulysses_sequence_parallel_size",
    ),
    (f"{_OPTIM}.lr_decay_style", r"\1.optim.lr_scheduler_type"),
    (f"{_MODEL}.override_config.model_config.*", r"\1.model.override_config.\2"),
    (f"{_LORA}.rank", r"\1.model.lora_rank"),
    (f"{_LORA}.alpha", r"\1.model.lora_alpha"),
    ("actor_rollout_ref.model.lora.merge", "actor_rollout_ref.rollout.lora_merge"),
)

RULES: tuple[Rule, ...] = (
    no_effect(
        f"{_SECTION}.{{virtual_pipeline_model_parallel_size,expert_tensor_parallel_size,"
        "sequence_parallel}",
        "it changes the speed and not the numbers; each stage is one block of layers",
    ),
    no_effect(
        f"{_SECTION}.expert_model_parallel_size",
        "FSDP2 gathers the experts of a layer for each pass: the numbers are the same; "
        "fsdp_config.expert_model_parallel_size lets tokens travel instead",
    ),
    only(f"{_MODEL}.override_config.{{model_config,moe_config}}", (None, {}), "config.json has it"),
    no_effect(f"{_SECTION}.grad_offload", "gradients are freed after each update"),
    no_effect(
        f"{_SECTION}.{{use_mbridge,vanilla_mbridge,use_dist_checkpointing,"
        "dist_checkpointing_path,dist_checkpointing_prefix,dist_ckpt_optim_fully_reshardable,"
        "distrib_optim_fully_reshardable_mem_efficient,override_ddp_config*,"
        "override_mcore_model_config*}",
        "weights are read from the folder of model.path, in the layout of transformers",
    ),
    no_effect(f"{_SECTION}.seed", "trainer.seed is the seed of all processes"),
    no_effect(f"{_SECTION}.{{use_remove_padding,use_distributed_optimizer}}", "always the case"),
    no_effect(f"{_SECTION}.load_weight", "weights are always loaded"),
    only(f"{_SECTION}.forward_only", _OFF, "the role decides whether it is trained"),
    only(f"{_SECTION}.{{entropy_reg,kl_reg}}", (None, 0, 0.0), "the loss has keys for it"),
    depends(f"{_SECTION}.{{extra,profiler}}*", "Megatron is not used"),
    no_effect(
        f"{_TRANSFORMER}.{{apply_rope_fusion,bias_activation_fusion,bias_dropout_fusion,"
        "gradient_accumulation_fusion,masked_softmax_fusion,persist_layer_norm,"
        "moe_permute_fusion,moe_grouped_gemm,moe_enable_deepep,moe_token_dispatcher_type,"
        "moe_shared_expert_overlap,deallocate_pipeline_outputs,use_flash_attn,"
        "attention_backend,variable_seq_lengths,overlap_moe_expert_parallel_comm,"
        "cross_entropy_loss_fusion,cross_entropy_fusion_impl}",
        "it is about speed and changes no number",
    ),
    no_effect(
        f"{_TRANSFORMER}.{{account_for_embedding_in_pipeline_split,"
        "account_for_loss_in_pipeline_split,num_layers_in_first_pipeline_stage,"
        "num_layers_in_last_pipeline_stage,pipeline_model_parallel_layout,"
        "context_parallel_size,sequence_parallel,tensor_model_parallel_size}",
        "FSDP2 shards the model over all ranks instead: the numbers are the same",
    ),
    no_effect(
        f"{_TRANSFORMER}.recompute_{{granularity,method,num_layers,modules}}",
        "model.enable_gradient_checkpointing recomputes all layers; the numbers are the same",
    ),
    only(
        f"{_TRANSFORMER}.{{moe_router_dtype,attention_softmax_in_fp32}}",
        (None, "fp32", True),
        "softmax is computed in float32",
    ),
    only(
        f"{_TRANSFORMER}.{{moe_aux_loss_coeff,moe_z_loss_coeff,moe_router_bias_update_rate}}",
        (None, 0, 0.0),
        "the loss has no terms of the router",
    ),
    only(
        f"{_TRANSFORMER}.moe_router_load_balancing_type",
        (None, "none"),
        "the loss has no terms of the router",
    ),
    only(
        f"{_TRANSFORMER}.{{attention_dropout,hidden_dropout}}",
        (None, 0, 0.0),
        "there is no dropout",
    ),
    needs(f"{_TRANSFORMER}.fp8*", missing.QUANTIZATION, _OFF),
    needs(f"{_OPTIM}.override_optimizer_config.fp8*", missing.QUANTIZATION, _OFF),
    only(f"{_TRANSFORMER}", (None, {}), "the model's config.json describes it"),
    no_effect(
        f"{_OPTIM}.override_optimizer_config.{{optimizer_cpu_offload,optimizer_offload_fraction,"
        "overlap_cpu_optimizer_d2h_h2d,use_precision_aware_optimizer,use_distributed_optimizer}",
        "fsdp_config.optimizer_offload=true keeps the optimizer's state in host memory",
    ),
    only(f"{_OPTIM}.{{lr_warmup_init,min_lr}}", (None, 0, 0.0), "it is 0", "set min_lr_ratio"),
    only(f"{_OPTIM}.weight_decay_incr_style", (None, "constant"), "weight decay is constant"),
    only(
        f"{_OPTIM}.{{lr_decay_steps,lr_wsd_decay_style,lr_wsd_decay_steps}}",
        (None,),
        "the schedule has the length of the run",
    ),
    only(
        f"{_OPTIM}.use_checkpoint_opt_param_scheduler",
        _OFF,
        "a resumed run follows its configuration",
    ),
    only(
        f"{_LORA}.{{type,lora_B_init_method,lora_A_init_method,dropout,merge,exclude_modules}}",
        (None, "lora", "zero", "kaiming", 0, 0.0, False, []),
        "adapters are peft's LoRA without dropout, on all of target_modules",
    ),
    only(
        f"{_LORA}.target_modules",
        (None, []),
        "Megatron's modules have other names",
        "set model.target_modules=all-linear",
    ),
)
