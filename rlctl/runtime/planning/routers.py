"""Reasons why router replay cannot work."""

from __future__ import annotations

from collections.abc import Iterator

from rlctl.errors import ConfigError, Problem, ResourceError
from rlctl.recipes import schema
from rlctl.recipes.role_table import ACTOR
from rlctl.runtime.algorithms.base import Algorithm, Needs
from rlctl.runtime.algorithms.ppo import PPO
from rlctl.runtime.model.routing import SUPPORTED, routing_shape
from rlctl.runtime.planning.model_size import UnknownSizeError, build_on_meta
from rlctl.runtime.planning.preflight import read_model_config
from rlctl.runtime.rollout.auto import load_engine

_SECTION = "actor_rollout_ref.actor"
_KEY = f"{_SECTION}.router_replay.mode"


def replay_problems(
    config: schema.Config, device: str | None, algorithm: Algorithm
) -> Iterator[Problem]:
    """Yield the problems of router replay on `device`, "cpu", "cuda", or None if it is unknown."""
    mode = config.actor_rollout_ref.actor.router_replay.mode
    for message, hint in _reasons(config, device, algorithm):
        yield Problem(message, f"{_KEY}={mode}", hint)


def _reasons(
    config: schema.Config, device: str | None, algorithm: Algorithm
) -> Iterator[tuple[str, str]]:
    """Yield why router replay cannot work, each with what does."""
    actor = config.actor_rollout_ref.actor
    if Needs.GROUPS not in algorithm.needs:
        yield f"{config.algorithm.name} samples no responses to replay", f"{_KEY}=disabled"
    yield from _of_model(config)
    if actor.router_replay.mode == "R2" and actor.fsdp_config.pipeline_model_parallel_size > 1:
        message = "the last stage of a pipeline has no record of the experts in other stages"
        yield message, f"{_KEY}=R3, or pipeline_model_parallel_size=1"
    if actor.use_torch_compile:
        message = "the choice of experts cannot be replaced in compiled layers"
        yield message, f"{_SECTION}.use_torch_compile=false"
    if actor.router_replay.mode == "R3":
        yield from _of_engine(config, device)
    elif not isinstance(algorithm, PPO):
        message = f"R2 replays the pass for old log-probs, and {config.algorithm.name} has none"
        yield message, f"{_KEY}=R3, or disabled"
    elif algorithm.correction.bypass:
        message = (
            "R2 replays the pass for old log-probs, which "
            "algorithm.rollout_correction.bypass_mode=true leaves out"
        )
        yield message, f"{_KEY}=R3, or bypass_mode=false"


def _of_model(config: schema.Config) -> Iterator[tuple[str, str]]:
    """Yield why the actor's model has no choices to replay."""
    model = ACTOR.model(config)
    try:
        loaded = read_model_config(model, f"{ACTOR.model_key}.path")
        shape = routing_shape(build_on_meta(loaded, model, "policy"))
    except (ConfigError, ResourceError, UnknownSizeError):
        return  # reported by the checks of the model
    if shape is None:
        yield (
            f"a model of type {loaded.model_type} has no routers whose choice can be replayed",
            f"{_KEY}=disabled, or a mixture of type {', '.join(SUPPORTED)}",
        )


def _of_engine(config: schema.Config, device: str | None) -> Iterator[tuple[str, str]]:
    """Yield why the rollout engine cannot record its choices."""
    rollout = config.actor_rollout_ref.rollout
    engine = load_engine(rollout.name, device or "cpu")
    section = "actor_rollout_ref.rollout"
    if not getattr(engine, "records_routing", False):
        message = f"the engine {rollout.name} does not return the experts of its tokens"
        yield message, f"{section}.name=hf|vllm, or {_KEY}=R2"
        return
    devices = getattr(engine, "one_rank_routes", ())
    if device in devices and rollout.tensor_model_parallel_size > 1:
        yield (
            f"the engine {rollout.name} on several GPUs returns the experts of tokens to the first "
            "rank only",
            f"{section}.tensor_model_parallel_size=1, or {_KEY}=R2",
        )
