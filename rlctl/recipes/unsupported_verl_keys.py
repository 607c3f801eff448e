"""Keys of verl's tree that rlctl has not, each with what there is instead: hints for the error, nothing is accepted here."""

from __future__ import annotations

import re

_INSTEAD: tuple[tuple[str, str], ...] = (
    (r"trainer\.(use_v1|v1|use_legacy_worker_impl)(\..*)?", "there is one trainer; leave this out"),
    (
        r"data\.(gen_batch_size)",
        "data.train_batch_size; dynamic sampling is algorithm.filter_groups",
    ),
    (
        r"data\.(return_raw_chat|return_raw_input_ids|return_full_prompt|dataloader_num_workers|filter_overlong_prompts_workers|use_shm)",
        "not needed; leave this out",
    ),
    (
        r"data\.custom_cls(\..*)?",
        "data.sampler takes a plug-in; prepare other formats with `rlctl prep`",
    ),
    (
        r"actor_rollout_ref\.(hybrid_engine|nccl_timeout)",
        "the engine is always hybrid; deadlines are trainer.timeouts",
    ),
    (
        r"actor_rollout_ref\.rollout\.(dtype|load_format|layered_summon|swap_space|skip_tokenizer_init|disable_log_stats|calculate_log_probs)",
        "not needed; leave this out",
    ),
    (
        r"actor_rollout_ref\.rollout\.enable_(chunked_prefill|prefix_caching)",
        "actor_rollout_ref.rollout.engine_kwargs passes it to the engine",
    ),
    (
        r"actor_rollout_ref\.rollout\.(log_prob_use_dynamic_bsz)",
        "actor_rollout_ref.actor.use_dynamic_bsz decides for all passes",
    ),
    (
        r"actor_rollout_ref\.ref\.(log_prob_use_dynamic_bsz)",
        "actor_rollout_ref.actor.use_dynamic_bsz decides for all passes",
    ),
    (
        r"actor_rollout_ref\.rollout\.ignore_eos",
        "actor_rollout_ref.rollout.engine_kwargs passes it to the engine",
    ),
    (
        r"actor_rollout_ref\.rollout\.(prompt|response)_length",
        "data.max_prompt_length and data.max_response_length",
    ),
    (r"actor_rollout_ref\.rollout\.agent(\..*)?", "actor_rollout_ref.rollout.multi_turn"),
    (
        r"actor_rollout_ref\.rollout\.max_model_len",
        "data.max_prompt_length + data.max_response_length is the engine's context",
    ),
    (
        r"actor_rollout_ref\.model\.(override_config|external_lib|use_shm|use_fused_kernels|use_liger)(\..*)?",
        "not supported; leave this out",
    ),
    (
        r"actor_rollout_ref\.actor\.(megatron|checkpoint|profiler|use_torch_compile|entropy_.*)(\..*)?",
        "not supported; leave this out",
    ),
    (
        r"critic\.(forward_micro_batch_size.*|forward_max_token_len_per_gpu)",
        "critic.ppo_micro_batch_size_per_gpu or critic.ppo_max_token_len_per_gpu",
    ),
    (
        r"critic\.enable",
        "the critic is built when algorithm.adv_estimator needs values; leave this out",
    ),
    (
        r"reward_manager|reward_model\.reward_manager|reward\.reward_manager(\..*)?",
        "reward.functions and algorithm.overlong_buffer",
    ),
    (r"reward_model\..*", "reward.reward_model.enable and reward.reward_model.path"),
    (
        r"trainer\.(del_local_ckpt_after_load|esi_redundant_time|ray_wait_register_center_timeout)",
        "not needed; leave this out",
    ),
    (r"algorithm\.use_pf_ppo|algorithm\.pf_ppo(\..*)?", "not supported; leave this out"),
    (r"global_profiler(\..*)?|transfer_queue(\..*)?", "not supported; leave this out"),
)
_COMPILED = tuple((re.compile(pattern + r"\Z"), instead) for pattern, instead in _INSTEAD)


def replacement_for(key: str) -> str | None:
    """What rlctl has in place of a key of verl's, or None for a key that is none of verl's."""
    return next((instead for pattern, instead in _COMPILED if pattern.match(key)), None)
