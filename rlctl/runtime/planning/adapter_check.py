"""Checks of LoRA adapters: their libraries, and what a base in 4 bits excludes."""

from __future__ import annotations

from enum import Flag

from rlctl.errors import Problem, raise_problems
from rlctl.recipes import schema
from rlctl.recipes.roles import ACTOR, Role, needed_roles
from rlctl.runtime.model.four_bit import check_bitsandbytes, check_unsharded, is_4bit
from rlctl.runtime.model.load import compute_dtype, master_dtype
from rlctl.runtime.model.lora import check_peft
from rlctl.runtime.planning.devices import Devices, pool_sizes


def check_adapters(config: schema.Config, devices: Devices | None, needs: Flag) -> None:
    """Check that adapters of the roles can be trained.

    Raises:
        MissingExtraError: peft or bitsandbytes is not installed.
        ConfigError: a role does not support a base in 4 bits, or `devices` do not.
    """
    roles = needed_roles(config, needs)
    if any(role.model(config).lora_rank > 0 for role in roles):
        check_peft()
    if not any(is_4bit(role.model(config)) for role in roles):
        return
    check_bitsandbytes()
    raise_problems([each for role in roles for each in _problems(config, role)])
    if devices is not None:
        fsdp = config.actor_rollout_ref.actor.fsdp_config
        pool = ACTOR.pool(config.trainer.placement) or ""
        num_ranks = pool_sizes(config, devices, needs)[pool]
        compute = compute_dtype(ACTOR.model(config), devices.kind)
        check_unsharded(num_ranks, master_dtype(fsdp), compute)


def _problems(config: schema.Config, role: Role) -> list[Problem]:
    model, key = role.model(config), f"{role.model_key}.load_in_4bit"
    if not is_4bit(model):
        return []
    if role.kind != ACTOR.kind:
        return [Problem(f"{key}=true is for policies", hint=f"set {key}=false")]
    if model.init != "auto":
        message = f"{key}=true needs weights to quantize, and init is {model.init}"
        return [Problem(message, hint=f"set {key}=false")]
    return []
