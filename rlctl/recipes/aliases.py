"""verl's keys: moved keys are renamed, unsupported keys are dropped or refused."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from rlctl.errors import Problem
from rlctl.recipes.unsupported_verl_keys import find_unsupported

_TRAINED = r"(actor_rollout_ref\.actor|critic)"
_POLICY_LOSS = r"actor_rollout_ref\.actor\.policy_loss"

# (pattern of the old key, new key). The first match wins.
_MOVED: tuple[tuple[str, str], ...] = (
    (r"(?:trainer\.)?val_generations_to_log_to_wandb", "trainer.log_val_generations"),
    (r"custom_reward_function(\..*)?", r"reward.custom_reward_function\1"),
    (r"reward_model\.overlong_buffer(\..*)?", r"algorithm.overlong_buffer\1"),
    (r"ray_init\.timeline_json_file", "ray_kwargs.timeline_json_file"),
    (r"ray_init(\..*)?", r"ray_kwargs.ray_init\1"),
    (rf"{_TRAINED}\.ppo_micro_batch_size", r"\1.ppo_micro_batch_size_per_gpu"),
    (
        r"(actor_rollout_ref\.(?:rollout|ref))\.log_prob_micro_batch_size",
        r"\1.log_prob_micro_batch_size_per_gpu",
    ),
    (rf"{_TRAINED}\.optim\.clip_grad", r"\1.grad_clip"),
    (rf"{_TRAINED}\.optim\.warmup_style", r"\1.optim.lr_scheduler_type"),
    (r"critic\.model\.fsdp_config(\..*)?", r"critic.fsdp_config\1"),
    (r"trainer\.max_(?:actor|critic)_ckpt_to_keep", "trainer.max_ckpt_to_keep"),
)
# Settings of plug-ins, which verl keeps beside the settings of the section.
_PLUGIN_SETTINGS: tuple[tuple[str, str], ...] = (
    (r"algorithm\.gdpo_(reward_keys|reward_weights)", r"algorithm.adv_estimator_params.\1"),
    (
        r"actor_rollout_ref\.actor\.(tau_pos|tau_neg)",
        r"actor_rollout_ref.actor.policy_loss.params.\1",
    ),
    (
        rf"({_POLICY_LOSS})\.(clip_cov_ratio|clip_cov_lb|clip_cov_ub|kl_cov_ratio|ppo_kl_coef)",
        r"\1.params.\2",
    ),
    (rf"({_POLICY_LOSS})\.dro_beta", r"\1.params.beta"),
    (r"reward\.gsm8k(\..*)?", r"reward.params.gsm8k\1"),
)
_COMPILED = tuple(
    (re.compile(old + r"\Z"), new, is_setting)
    for table, is_setting in ((_MOVED, False), (_PLUGIN_SETTINGS, True))
    for old, new in table
)


@dataclass(frozen=True, slots=True)
class Translation:
    """Present form of one setting.

    `key` is its name (None = dropped) and `notice` a line for the user. `unused` is the reason why
    a dropped setting had no effect, `problem` the reason why it is refused. `flat` marks a setting
    of a plug-in that was given under verl's key.
    """

    key: str | None
    notice: str | None = None
    unused: str | None = None
    problem: Problem | None = None
    flat: bool = False


def translate(key: str, value: Any, where: str) -> Translation:
    """Return the setting `key`=`value`, found at `where`, under its present name."""
    unsupported = find_unsupported(key)
    if unsupported is not None:
        given = f"{key}={_written(value)}"
        if not unsupported.accepts(value):
            problem = Problem(f"{given} is not supported", where, unsupported.hint(value))
            return Translation(None, problem=problem)
        if unsupported.ignored:
            return Translation(None, unused=unsupported.reason)
        return Translation(None, f"{given} is dropped: {unsupported.reason}")
    for pattern, new, is_setting in _COMPILED:
        if match := pattern.match(key):
            moved = match.expand(new)
            return Translation(moved, f"{key} is now {moved}", flat=is_setting)
    return Translation(key)


def _written(value: Any) -> str:
    """Return a value as an override writes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
