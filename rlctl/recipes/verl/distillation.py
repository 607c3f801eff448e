"""verl's section `distillation`: names here, and what differs from verl.

verl adds the divergence to the policy loss unless `use_task_rewards` is false, and its default
estimator is k3. Both are refused, also where a default asks for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlctl.errors import Problem
from rlctl.recipes.slots import lookup

SECTION = "distillation"
_LOSS = f"{SECTION}.distillation_loss"
_ALGORITHM = "algorithm.name=distill"


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
    if gradient is not None and mode is not None and gradient is not (mode in ("k1", "kl")):
        message = f"{_LOSS}.use_policy_gradient={str(gradient).lower()} with loss_mode={mode}"
        hint = "true belongs to loss_mode=k1, false to forward_kl_topk"
        found.append(Problem(f"{message} is not supported", where, hint))
    return found


def _selected(container: dict[str, Any]) -> bool:
    return f"algorithm.name={lookup(container, 'algorithm.name')}" == _ALGORITHM
