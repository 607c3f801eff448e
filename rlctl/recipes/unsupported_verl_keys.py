"""Keys of verl that rlctl does not support, each with the reason or the key to use instead.

A key of `UNSUPPORTED` is accepted with the values that change nothing and refused with others. A
key of `_REPLACEMENTS` is refused as unknown, with a hint.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class UnsupportedKey:
    """Pattern of an unsupported key with the values that are accepted.

    `accepted` holds the values that ask for what rlctl does anyway; None accepts every value, since
    the key depends on another unsupported one. `ignored` reports the key as a key without effect.
    """

    pattern: str
    reason: str
    accepted: tuple[Any, ...] | None = None
    alternative: str | None = None

    @property
    def ignored(self) -> bool:
        return self.accepted is None

    def accepts(self, value: Any) -> bool:
        """Return True if the setting may be dropped. `1` is not `True` here."""
        return self.accepted is None or any(
            value == each and type(value) is type(each) for each in self.accepted
        )

    def hint(self, value: Any) -> str:
        """Return the reason for the refusal and what works."""
        if self.alternative is not None:
            return self.alternative.format(value=value)
        return f"{self.reason}; remove it"


_TRAINED = r"(actor_rollout_ref\.actor|critic)"
_ROLLOUT = r"actor_rollout_ref\.rollout"

UNSUPPORTED: tuple[UnsupportedKey, ...] = (
    UnsupportedKey(
        r"(actor_rollout_ref\.(actor|ref)|critic)\.strategy",
        "models are always sharded by FSDP2",
        ("fsdp2",),
    ),
    UnsupportedKey(
        r"(actor_rollout_ref|critic)\.model\.use_remove_padding",
        "rows are always packed without padding",
        (True,),
    ),
    UnsupportedKey(
        rf"{_TRAINED}\.tensor_parallel_size", "training has no tensor parallelism", (1,)
    ),
    UnsupportedKey(
        rf"{_TRAINED}\.(context_parallel_size|ulysses_sequence_parallel_size)",
        "training has no context parallelism",
        (1,),
    ),
    UnsupportedKey(
        r"(actor_rollout_ref\.(actor|ref)|critic|critic\.model)\.fsdp_config\.optimizer_offload",
        "the optimizer state stays on the device",
        (False,),
    ),
    UnsupportedKey(
        r"(actor_rollout_ref\.(actor|ref)|critic|critic\.model)\.fsdp_config\.grad_offload",
        "gradients are freed after each update",
        (True, False),
    ),
    UnsupportedKey(rf"{_ROLLOUT}\.multi_turn\.enable", "responses have a single turn", (False,)),
    UnsupportedKey(rf"{_ROLLOUT}\.multi_turn(\..*)?", "responses have a single turn"),
    UnsupportedKey(
        r"(reward\.)?reward_model\.enable",
        "rewards come from functions, not from a model",
        (False,),
    ),
    UnsupportedKey(
        r"(reward\.)?reward_model\.(path|model\.path)",
        "rewards come from functions, not from a model",
    ),
    UnsupportedKey(r"trainer\.placement\.reward", "rewards come from functions, not from a model"),
    UnsupportedKey(
        r"trainer\.default_hdfs_dir",
        "it is not needed",
        (None,),
        "write trainer.default_local_dir={value}: it accepts any fsspec address",
    ),
)
_UNSUPPORTED = tuple((re.compile(each.pattern + r"\Z"), each) for each in UNSUPPORTED)

_NOT_NEEDED = "not needed; remove it"
_NOT_SUPPORTED = "not supported; remove it"
_REPLACEMENTS: tuple[tuple[str, str], ...] = (
    (r"trainer\.(use_v1|v1|use_legacy_worker_impl)(\..*)?", "rlctl has one trainer; remove it"),
    (
        r"data\.gen_batch_size",
        "use data.train_batch_size; dynamic sampling is algorithm.filter_groups",
    ),
    (
        r"data\.(return_raw_chat|return_raw_input_ids|return_full_prompt|dataloader_num_workers"
        r"|filter_overlong_prompts_workers|use_shm)",
        _NOT_NEEDED,
    ),
    (
        r"data\.custom_cls(\..*)?",
        "data.sampler accepts a plug-in; `rlctl prep` converts other formats",
    ),
    (
        r"actor_rollout_ref\.(hybrid_engine|nccl_timeout)",
        "the engine is always hybrid; timeouts are in trainer.timeouts",
    ),
    (
        rf"{_ROLLOUT}\.(dtype|load_format|layered_summon|swap_space|skip_tokenizer_init"
        r"|disable_log_stats|calculate_log_probs)",
        _NOT_NEEDED,
    ),
    (
        rf"{_ROLLOUT}\.(enable_chunked_prefill|enable_prefix_caching|ignore_eos)",
        "pass it to the engine in actor_rollout_ref.rollout.engine_kwargs",
    ),
    (
        r"actor_rollout_ref\.(rollout|ref)\.log_prob_use_dynamic_bsz",
        "actor_rollout_ref.actor.use_dynamic_bsz applies to all passes",
    ),
    (
        rf"{_ROLLOUT}\.(prompt|response)_length",
        "use data.max_prompt_length and data.max_response_length",
    ),
    (rf"{_ROLLOUT}\.agent(\..*)?", _NOT_SUPPORTED),
    (
        rf"{_ROLLOUT}\.max_model_len",
        "the engine's context is data.max_prompt_length + data.max_response_length",
    ),
    (
        r"actor_rollout_ref\.model\.(override_config|external_lib|use_shm|use_fused_kernels"
        r"|use_liger)(\..*)?",
        _NOT_SUPPORTED,
    ),
    (
        r"actor_rollout_ref\.actor\.(megatron|checkpoint|profiler|use_torch_compile|entropy_.*)"
        r"(\..*)?",
        _NOT_SUPPORTED,
    ),
    (
        r"critic\.(forward_micro_batch_size.*|forward_max_token_len_per_gpu)",
        "use critic.ppo_micro_batch_size_per_gpu or critic.ppo_max_token_len_per_gpu",
    ),
    (
        r"critic\.enable",
        "the critic is built if algorithm.adv_estimator needs values; remove it",
    ),
    (
        r"reward_manager|reward_model\.reward_manager|reward\.reward_manager(\..*)?",
        "use reward.functions and algorithm.overlong_buffer",
    ),
    (r"(reward\.)?reward_model(\..*)?", "use reward.functions"),
    (
        r"trainer\.(del_local_ckpt_after_load|esi_redundant_time"
        r"|ray_wait_register_center_timeout)",
        _NOT_NEEDED,
    ),
    (r"algorithm\.use_pf_ppo|algorithm\.pf_ppo(\..*)?", _NOT_SUPPORTED),
    (r"global_profiler(\..*)?|transfer_queue(\..*)?", _NOT_SUPPORTED),
)
_COMPILED = tuple((re.compile(pattern + r"\Z"), hint) for pattern, hint in _REPLACEMENTS)


def find_unsupported(key: str) -> UnsupportedKey | None:
    """Return the entry of an unsupported key that is accepted with some values, or None."""
    return next((each for pattern, each in _UNSUPPORTED if pattern.match(key)), None)


def replacement_for(key: str) -> str | None:
    """Return a hint for a key of verl that rlctl refuses as unknown, or None for other keys."""
    return next((hint for pattern, hint in _COMPILED if pattern.match(key)), None)
