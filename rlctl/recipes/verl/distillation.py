"""verl's section `distillation`: names here, and what differs from verl.

verl adds the divergence to the policy loss unless `use_task_rewards` is false, and its default
estimator is k3. Both are refused, also where a default asks for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlctl.errors import Problem
from rlctl.recipes.slots import lookup
from rlctl.recipes.verl import features as missing
from rlctl.recipes.verl.rules import Feature, Rule, depends, needs, no_effect, only

SECTION = "distillation"
_LOSS = f"{SECTION}.distillation_loss"
_PARAMS = "algorithm.params"
_MODE = f"{_PARAMS}.loss_mode"
_ALGORITHM = "algorithm.name=distill"

MOVED: tuple[tuple[str, str], ...] = (
    (f"{SECTION}.teacher_models.*.{{key,model_path}}", rf"{_PARAMS}.teacher_models.\1.\2"),
    (f"{SECTION}.teacher_model.model_path", f"{_PARAMS}.teacher_models.teacher_model.model_path"),
    (f"{SECTION}.teacher_key", f"{_PARAMS}.teacher_key"),
    (f"{_LOSS}.{{loss_mode,topk,loss_max_clamp,log_prob_min_clamp}}", rf"{_PARAMS}.\1"),
    (f"{SECTION}.teacher_fsdp_config*", r"actor_rollout_ref.ref.fsdp_config\1"),
)
_WORDS = dict.fromkeys(["k1", "kl"], "reverse_kl")
VALUES: tuple[str, dict[Any, Any]] = (f"{_LOSS}.loss_mode", _WORDS)
_MODES = [
    "k2",
    "k3",
    "mse",
    "abs",
    "low_var_kl",
    "reverse_kl_topk",
    "forward_kl_topk_tail",
    "jsd",
    "nitrobrew",
]
REFUSED: tuple[str, dict[Any, Feature]] = (
    f"{_LOSS}.loss_mode",
    dict.fromkeys(_MODES, missing.DISTILLATION_LOSS),
)

RULES: tuple[Rule, ...] = (
    no_effect(f"{SECTION}.enabled", "the algorithm is the switch"),
    only(
        f"{_LOSS}.use_task_rewards",
        (False,),
        "the divergence is the only loss",
        f"{_LOSS}.use_task_rewards=false: the divergence is the only loss",
    ),
    depends(f"{_LOSS}.distillation_loss_coef", "the divergence is the only loss"),
    no_effect(f"{_LOSS}.use_policy_gradient", f"{_MODE} decides it"),
    only(
        f"{_LOSS}.{{clip_ratio,clip_ratio_low,clip_ratio_high}}",
        (0.2,),
        f"{_PARAMS}.is_threshold bounds the importance weight",
        f"{_PARAMS}.is_threshold bounds the importance weight",
    ),
    no_effect(f"{_LOSS}.policy_loss_mode", "verl has one for distillation, too"),
    only(f"{_LOSS}.kd_temperature", (1, 1.0), "teacher and policy have the same temperature"),
    depends(f"{_LOSS}.{{jsd_beta,tail_mass_eps}}", "it belongs to another loss_mode"),
    no_effect(
        f"{SECTION}.{{enable_resource_pool,n_gpus_per_node,nnodes,teacher_backend,"
        "teacher_chunk_size,teacher_models.*,teacher_model.*}",
        "teachers are sharded by FSDP2 in the pool of trainer.placement.reference",
    ),
    needs(f"{SECTION}.*", missing.DISTILLATION),
    needs("{teacher,actor_rollout_ref.teacher}.*", missing.DISTILLATION),
)


def is_on(given: Mapping[str, Any], container: dict[str, Any]) -> bool:
    """Return True if verl's settings `given` or the configuration select distillation."""
    return given.get(f"{SECTION}.enabled") is True or _selected(container)


def problems(given: Mapping[str, Any], where: str, container: dict[str, Any]) -> list[Problem]:
    """Return what the settings `given` of the section, at `where`, mean in verl and not here."""
    if given.get(f"{SECTION}.enabled") is not True:
        return []
    found: list[Problem] = []
    if not _selected(container):
        name = lookup(container, "algorithm.name")
        found.append(
            Problem(
                f"{SECTION}.enabled=true, but algorithm.name is {name}",
                where,
                f"`rlctl train distill`, or {_ALGORITHM} with rollout.n=4",
            )
        )
    for key, works, default in (
        ("use_task_rewards", "use_task_rewards=false", "true, which adds the policy loss"),
        ("loss_mode", "loss_mode=k1 or forward_kl_topk", "k3, which rlctl lacks"),
    ):
        if f"{_LOSS}.{key}" not in given:
            message = f"{_LOSS}.{key} is not set; verl's default is {default}"
            found.append(Problem(message, where, f"+{_LOSS}.{works}"))
    gradient = given.get(f"{_LOSS}.use_policy_gradient")
    mode = given.get(f"{_LOSS}.loss_mode")
    if gradient is not None and mode is not None and gradient is not (mode in _WORDS):
        message = f"{_LOSS}.use_policy_gradient={str(gradient).lower()} with loss_mode={mode}"
        hint = "true belongs to loss_mode=k1, false to forward_kl_topk"
        found.append(Problem(f"{message} is not supported", where, hint))
    return found


def _selected(container: dict[str, Any]) -> bool:
    return f"algorithm.name={lookup(container, 'algorithm.name')}" == _ALGORITHM
