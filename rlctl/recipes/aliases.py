"""Old and moved keys of verl, each accepted with a notice, and keys of verl that rlctl has not, each with what there is instead."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from rlctl.errors import Problem

# (pattern of the old key, new key). The first that matches wins; `\1` carries a group over.
_MOVED: tuple[tuple[str, str], ...] = (
    (r"(?:trainer\.)?val_generations_to_log_to_wandb", "trainer.log_val_generations"),
    (r"custom_reward_function(\..*)?", r"reward.custom_reward_function\1"),
    (r"reward_model\.overlong_buffer(\..*)?", r"algorithm.overlong_buffer\1"),
    (r"reward_model(\.(?:enable|path))?", r"reward.reward_model\1"),
    (r"reward_model\.model\.path", r"reward.reward_model.path"),
    (r"ray_init\.timeline_json_file", "ray_kwargs.timeline_json_file"),
    (r"ray_init(\..*)?", r"ray_kwargs.ray_init\1"),
    (
        r"(actor_rollout_ref\.actor|critic)\.ppo_micro_batch_size",
        r"\1.ppo_micro_batch_size_per_gpu",
    ),
    (
        r"(actor_rollout_ref\.(?:rollout|ref))\.log_prob_micro_batch_size",
        r"\1.log_prob_micro_batch_size_per_gpu",
    ),
    (r"(actor_rollout_ref\.actor|critic)\.optim\.clip_grad", r"\1.grad_clip"),
    (r"(actor_rollout_ref\.actor|critic)\.optim\.warmup_style", r"\1.optim.lr_scheduler_type"),
    (
        r"(actor_rollout_ref\.actor|critic)\.ulysses_sequence_parallel_size",
        r"\1.context_parallel_size",
    ),
    (r"critic\.model\.fsdp_config(\..*)?", r"critic.fsdp_config\1"),
    (r"trainer\.max_(?:actor|critic)_ckpt_to_keep", "trainer.max_ckpt_to_keep"),
)
_MOVED_COMPILED = tuple((re.compile(old + r"\Z"), new) for old, new in _MOVED)

# Keys that say nothing here: accepted and dropped, with the reason.
_DROPPED: tuple[tuple[str, str], ...] = (
    (
        r"(?:actor_rollout_ref\.(?:actor|ref)|critic|critic\.model)\.fsdp_config\.grad_offload",
        "gradients are freed after each update",
    ),
)
_DROPPED_COMPILED = tuple((re.compile(old + r"\Z"), reason) for old, reason in _DROPPED)


@dataclass(frozen=True)
class Translation:
    """What became of a key: its new name (None = dropped), a notice for the user, or a problem."""

    key: str | None
    notice: str | None = None
    problem: Problem | None = None


def translate(key: str, value: Any, where: str) -> Translation:
    """The key under its present name. `value` matters to keys that are dropped only where they are null."""
    if key == "trainer.default_hdfs_dir":
        if value is None:
            return Translation(None, "trainer.default_hdfs_dir is not needed: dropped")
        hint = f"write trainer.default_local_dir={value}: any fsspec path is taken there"
        return Translation(
            None, problem=Problem("trainer.default_hdfs_dir does not exist here", where, hint)
        )
    for pattern, reason in _DROPPED_COMPILED:
        if pattern.match(key):
            return Translation(None, f"{key} is dropped: {reason}")
    for pattern, new in _MOVED_COMPILED:
        if match := pattern.match(key):
            moved = match.expand(new)
            return Translation(moved, f"{key} is now {moved}")
    return Translation(key)
