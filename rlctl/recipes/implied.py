"""Settings that another setting implies, so that verl's keys keep verl's meaning.

verl defaults to fixed micro-batches and truncated prompts, rlctl to token budgets and filtered
prompts. A key that only has a meaning with verl's default switches to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlctl.recipes.layers import Layers
from rlctl.recipes.slots import lookup

_POLICY = "actor_rollout_ref"
_ACTOR_SWITCH = f"{_POLICY}.actor.use_dynamic_bsz"


@dataclass(frozen=True, slots=True)
class Implied:
    """Key that, once set, sets `switch` to False unless one of `explicit` is set.

    `ignored` are the values of the key that imply nothing.
    """

    key: str
    switch: str
    explicit: tuple[str, ...]
    ignored: tuple[Any, ...] = (None,)
    reason: str = "gives the rows of a micro-batch"


IMPLIED: tuple[Implied, ...] = (
    Implied(f"{_POLICY}.actor.ppo_micro_batch_size_per_gpu", _ACTOR_SWITCH, (_ACTOR_SWITCH,)),
    *(
        Implied(f"{section}.{key}", switch, (switch, _ACTOR_SWITCH))
        for section, key, switch in (
            ("critic", "ppo_micro_batch_size_per_gpu", "critic.use_dynamic_bsz"),
            *(
                (
                    f"{_POLICY}.{role}",
                    "log_prob_micro_batch_size_per_gpu",
                    f"{_POLICY}.{role}.log_prob_use_dynamic_bsz",
                )
                for role in ("rollout", "ref")
            ),
        )
    ),
    Implied(
        "data.truncation",
        "data.filter_overlong_prompts",
        ("data.filter_overlong_prompts",),
        (None, "error"),
        "truncates overlong prompts",
    ),
)


def apply_implied(layers: Layers) -> list[str]:
    """Set the implied switches in `layers` and return one line for the user per switch."""
    found = [
        rule
        for rule in IMPLIED
        if _is_set(rule.key, layers)
        and lookup(layers.tree, rule.key) not in rule.ignored
        and not any(_is_set(key, layers) for key in rule.explicit)
    ]
    for key, parts in layers.verl.paths.items():
        names = [parts] if isinstance(parts, str) else list(parts or ())
        layers.imply(key, ".".join([lookup(layers.tree, key), *map(str, names)]), key)
    for rule in found:
        layers.imply(rule.switch, False, rule.key)
    return [
        f"{rule.key}={lookup(layers.tree, rule.key)} {rule.reason}, as in verl: "
        f"{rule.switch} is now false"
        for rule in found
    ]


def _is_set(key: str, layers: Layers) -> bool:
    """Return True if a recipe or the command line sets the key."""
    chain = layers.origins.get(key, ())
    return bool(chain) and chain[-1].level > 1
