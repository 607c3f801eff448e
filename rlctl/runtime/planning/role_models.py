"""Checks of the models of roles: those beside the trained one, optimizers, adapters, routers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Flag
from typing import Any

from rlctl.data_prep.rows import PromptRow
from rlctl.errors import Problem, raise_problems
from rlctl.recipes import schema
from rlctl.recipes.role_table import ACTOR, REFERENCE, Role, needed_roles
from rlctl.runtime.algorithms.base import Algorithm, RoutesRows, routed_models
from rlctl.runtime.build import role_plugin
from rlctl.runtime.data.tokenizer import tokenizer_of
from rlctl.runtime.model.load import compute_dtype, master_dtype
from rlctl.runtime.planning.devices import Devices, pool_sizes
from rlctl.runtime.planning.early_checks import check_extras
from rlctl.runtime.planning.error_collector import ErrorCollector
from rlctl.runtime.planning.model_files import check_architecture, check_tokenizer
from rlctl.runtime.planning.preflight import read_model_config
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
        if role.is_plugin:
            role_plugin(role.name).check(config)
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


def check_adapters(config: schema.Config, devices: Devices | None, needs: Flag) -> None:
    """Check that adapters of the roles can be trained.

    Raises:
        MissingExtraError: peft or bitsandbytes is not installed.
        ConfigError: a role does not support a base in 4 bits, or `devices` do not.
    """
    roles = needed_roles(config, needs)
    errors = ErrorCollector()
    is_quantized = any(role.model(config).is_4bit for role in roles)
    for role in roles:
        errors.run(check_extras, role.model(config))
    errors.raise_all()
    if not is_quantized:
        return
    raise_problems(problem for role in roles for problem in _adapter_problems(config, role))
    if devices is not None:
        from rlctl.runtime.model.four_bit import check_unsharded

        fsdp = config.actor_rollout_ref.actor.fsdp_config
        pool = ACTOR.pool(config.trainer.placement) or ""
        num_ranks = pool_sizes(config, devices, needs)[pool]
        compute = compute_dtype(ACTOR.model(config), devices.kind, devices.has_bf16)
        check_unsharded(num_ranks, master_dtype(fsdp), compute)


def _adapter_problems(config: schema.Config, role: Role) -> Iterator[Problem]:
    model = role.model(config)
    key = f"{role.model_key}.load_in_4bit"
    if model.is_4bit and role.kind != ACTOR.kind:
        yield Problem(f"{key}=true is for policies", hint=f"set {key}=false")
    elif model.is_4bit and model.init != "auto":
        message = f"{key}=true needs weights to quantize, and init is {model.init}"
        yield Problem(message, hint=f"set {key}=false")


# Values of config.json with which transformers adds a loss when it trains.
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
        from rlctl.runtime.planning.routers import replay_problems

        problems += replay_problems(config, device, algorithm)
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
