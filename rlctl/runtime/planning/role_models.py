"""Checks of the models of roles: those beside the trained one, optimizers, adapters, routers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Flag
from typing import Any

from rlctl.data_prep.rows import PromptRow
from rlctl.errors import ConfigError, Problem, ResourceError, raise_problems
from rlctl.recipes import schema
from rlctl.recipes.roles import ACTOR, REFERENCE, REWARD_MODEL, Role, needed_roles
from rlctl.runtime.algorithms.base import Algorithm, Needs
from rlctl.runtime.algorithms.ppo import PPO
from rlctl.runtime.algorithms.references import RoutesRows, routed_models
from rlctl.runtime.batch.images import processor_of
from rlctl.runtime.data.model_folder import is_missing
from rlctl.runtime.data.tokenizer import tokenizer_of
from rlctl.runtime.model.four_bit import check_unsharded, is_4bit
from rlctl.runtime.model.load import compute_dtype, master_dtype
from rlctl.runtime.planning.devices import Devices, pool_sizes
from rlctl.runtime.planning.early import check_extras
from rlctl.runtime.planning.error_collector import ErrorCollector
from rlctl.runtime.planning.model_files import check_architecture, check_tokenizer
from rlctl.runtime.planning.model_size import UnknownSizeError, build_on_meta
from rlctl.runtime.planning.preflight import read_model_config
from rlctl.runtime.rollout.auto import load_engine, reads_images
from rlctl.runtime.workers.optimizers import check_optimizer


def check_role_models(config: schema.Config, algorithm: Algorithm) -> Iterator[Problem]:
    """Yield the problems of all models beside the trained one. Raises `ConfigError`."""
    actor = ACTOR.model(config)
    trained, *others = needed_roles(config, algorithm.needs)
    models = [(role, role.model(config), f"{role.model_key}.path") for role in others]
    if references := routed_models(algorithm):
        models = [model for model in models if model[0] is not REFERENCE]
        models += [
            (REFERENCE, model, f"algorithm.params.teacher_models.{name}.model_path")
            for name, model in references.items()
        ]
    for role, model, key in models:
        if role.kind == "classifier" or model != trained.model(config):
            loaded = read_model_config(model, key)
            yield from check_architecture(model, loaded, role.kind, key, role.fsdp(config))
        if role is REWARD_MODEL and config.reward.reward_model.normalize == "model":
            from rlctl.runtime.rewards.model_reward import scale_of_model

            scale_of_model(model)
        if role.kind == ACTOR.kind and model.path != actor.path:
            yield from check_tokenizer(model, tokenizer_of(actor), key)


def check_optimizers(config: schema.Config, needs: Flag) -> None:
    """Check the optimizers of the roles that learn.

    Raises ConfigError, and MissingExtraError where a package is not installed.
    """
    for role in needed_roles(config, needs):
        if role.learns:
            check_optimizer(role.learner(config).optim, role.fsdp(config), role.section)


def check_routes(algorithm: object, rows: Iterable[PromptRow]) -> None:
    """Raise ConfigError for a row without a reference, if the algorithm chooses one for each."""
    if isinstance(algorithm, RoutesRows) and algorithm.references:
        for row in rows:
            algorithm.reference_of(row)


def check_images(config: schema.Config, devices: Devices | None, needs: Needs) -> None:
    """Raise ConfigError with what cannot be combined with rows that have images."""
    roles, rollout = needed_roles(config, needs), config.actor_rollout_ref.rollout
    found: list[tuple[str, str]] = []
    kind, model = devices.kind if devices else "cpu", config.actor_rollout_ref.model
    if Needs.ENGINE in needs and not reads_images(rollout, model, kind):
        found.append((f"the engine {rollout.name}", "actor_rollout_ref.rollout.name=hf or vllm"))
    if rollout.multi_turn.enable and rollout.agent.program is not None:
        found.append(("an agent program", "actor_rollout_ref.rollout.agent.program=null"))
    for role in roles:
        own = role.model(config)
        if not is_missing(own.path) and processor_of(own.path, own.trust_remote_code) is None:
            what = f"{own.path}, the model of the {role.name}, reads text alone and"
            found.append((what, "a vision-language model with its preprocessor_config.json"))
        fsdp = role.fsdp(config)
        if fsdp is not None and fsdp.ranks_per_row > 1:
            message = f"the {role.name}, whose ranks divide rows or layers,"
            found.append((message, "set the sizes of parallelism to 1; FSDP2 shards all weights"))
    raise_problems(Problem(f"{what} takes no rows with images", hint=hint) for what, hint in found)


def check_adapters(config: schema.Config, devices: Devices | None, needs: Flag) -> None:
    """Check that adapters of the roles can be trained.

    Raises:
        MissingExtraError: peft or bitsandbytes is not installed.
        ConfigError: a role does not support a base in 4 bits, or `devices` do not.
    """
    roles, errors = needed_roles(config, needs), ErrorCollector()
    is_quantized = any(is_4bit(role.model(config)) for role in roles)
    for role in roles:
        errors.run(check_extras, role.model(config))
    errors.raise_all()
    if not is_quantized:
        return
    raise_problems(problem for role in roles for problem in _adapter_problems(config, role))
    if devices is not None:
        fsdp = config.actor_rollout_ref.actor.fsdp_config
        pool = ACTOR.pool(config.trainer.placement) or ""
        num_ranks = pool_sizes(config, devices, needs)[pool]
        compute = compute_dtype(ACTOR.model(config), devices.kind, devices.has_bf16)
        check_unsharded(num_ranks, master_dtype(fsdp), compute)


def _adapter_problems(config: schema.Config, role: Role) -> Iterator[Problem]:
    model, key = role.model(config), f"{role.model_key}.load_in_4bit"
    if is_4bit(model) and role.kind != ACTOR.kind:
        yield Problem(f"{key}=true is for policies", hint=f"set {key}=false")
    elif is_4bit(model) and model.init != "auto":
        message = f"{key}=true needs weights to quantize, and init is {model.init}"
        yield Problem(message, hint=f"set {key}=false")


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


def _losses(config: schema.Config, role: Role) -> Iterator[Problem]:
    """Yield a problem for each value of a role that asks for a loss of its routers."""
    given = role.model(config).override_config
    for name, none in _LOSSES.items():
        if name in given and given[name] not in none:
            yield Problem(
                f"the loss has no terms of the routers, and {name} is {given[name]}",
                f"{role.model_key}.override_config.{name}",
                "leave it out: an auxiliary loss would change the gradient of the policy",
            )


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
    from rlctl.runtime.model.routing import SUPPORTED, routing_shape

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
