"""Checks of router replay, and of settings of routers that the loss does not use."""

from __future__ import annotations

from typing import Any

from rlctl.errors import ConfigError, Problem, raise_problems
from rlctl.recipes import schema
from rlctl.recipes.roles import ACTOR, Role, needed_roles
from rlctl.runtime.algorithms.base import Algorithm, Needs
from rlctl.runtime.algorithms.ppo import PPO
from rlctl.runtime.model.routing import SUPPORTED, routing_shape
from rlctl.runtime.planning.model_size import UnknownSizeError, build_on_meta
from rlctl.runtime.planning.preflight import read_model_config
from rlctl.runtime.rollout.auto import load_engine
from rlctl.runtime.rollout.vllm_engine.engine import VLLMEngine

_SECTION = "actor_rollout_ref.actor"
_KEY = f"{_SECTION}.router_replay.mode"
# Values of config.json with which transformers adds a loss to that of its own training.
_LOSSES: dict[str, tuple[Any, ...]] = {
    "output_router_logits": (False, None),
    "router_aux_loss_coef": (0, None),
    "router_z_loss_coef": (0, None),
    "router_jitter_noise": (0, None),
}


def check_routers(config: schema.Config, device: str | None, algorithm: Algorithm) -> None:
    """Raise ConfigError for router replay that cannot work, and for losses of routers.

    `device` is "cpu", "cuda", or None if it is unknown.
    """
    roles = [role for role in needed_roles(config, algorithm.needs) if role.learns]
    problems = [problem for role in roles for problem in _losses(config, role)]
    mode = config.actor_rollout_ref.actor.router_replay.mode
    if mode != "disabled":
        problems += [
            Problem(message, f"{_KEY}={mode}", hint)
            for message, hint in _reasons(config, device, algorithm)
        ]
    raise_problems(problems)


def _losses(config: schema.Config, role: Role) -> list[Problem]:
    """Return a problem for each value of a role that asks for a loss of its routers."""
    given = role.model(config).override_config
    return [
        Problem(
            f"the loss has no terms of the routers, and {name} is {given[name]}",
            f"{role.model_key}.override_config.{name}",
            "leave it out: an auxiliary loss would change the gradient of the policy",
        )
        for name, none in _LOSSES.items()
        if name in given and given[name] not in none
    ]


def _reasons(
    config: schema.Config, device: str | None, algorithm: Algorithm
) -> list[tuple[str, str]]:
    """Return why router replay cannot work, each with what does."""
    actor, off = config.actor_rollout_ref.actor, f"{_KEY}=disabled"
    found: list[tuple[str, str]] = []
    if Needs.GROUPS not in algorithm.needs:
        found.append((f"{config.algorithm.name} samples no responses to replay", off))
    found += _of_model(config)
    if actor.router_replay.mode == "R2" and actor.fsdp_config.pipeline_model_parallel_size > 1:
        message = "the last stage of a pipeline has no record of the experts in other stages"
        found.append((message, f"{_KEY}=R3, or pipeline_model_parallel_size=1"))
    if actor.use_torch_compile:
        message = "the choice of experts cannot be replaced in compiled layers"
        found.append((message, f"{_SECTION}.use_torch_compile=false"))
    if actor.router_replay.mode == "R3":
        return found + _of_engine(config, device)
    if not isinstance(algorithm, PPO):
        message = f"R2 replays the pass for old log-probs, and {config.algorithm.name} has none"
        found.append((message, f"{_KEY}=R3, or disabled"))
    elif algorithm.correction.bypass:
        message = (
            "R2 replays the pass for old log-probs, which "
            "algorithm.rollout_correction.bypass_mode=true leaves out"
        )
        found.append((message, f"{_KEY}=R3, or bypass_mode=false"))
    return found


def _of_model(config: schema.Config) -> list[tuple[str, str]]:
    """Return why the actor's model has no choices to replay."""
    model = ACTOR.model(config)
    try:
        loaded = read_model_config(model, f"{ACTOR.model_key}.path")
        if routing_shape(build_on_meta(loaded, model, "policy")) is not None:
            return []
    except (ConfigError, UnknownSizeError):
        return []  # reported by the checks of the model
    return [
        (
            f"a model of type {loaded.model_type} has no routers whose choice can be replayed",
            f"{_KEY}=disabled, or a mixture of type {', '.join(SUPPORTED)}",
        )
    ]


def _of_engine(config: schema.Config, device: str | None) -> list[tuple[str, str]]:
    """Return why the rollout engine cannot record its choices."""
    rollout = config.actor_rollout_ref.rollout
    engine = load_engine(rollout.name, device or "cpu")
    section = "actor_rollout_ref.rollout"
    if not getattr(engine, "records_routing", False):
        message = f"the engine {rollout.name} does not return the experts of its tokens"
        return [(message, f"{section}.name=hf|vllm, or {_KEY}=R2")]
    if engine is VLLMEngine and device == "cuda" and rollout.tensor_model_parallel_size > 1:
        message = "vLLM on several GPUs returns the experts of tokens to the first rank only"
        return [(message, f"{section}.tensor_model_parallel_size=1, or {_KEY}=R2")]
    return []
