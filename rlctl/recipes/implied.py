"""Settings that another setting implies, so that verl's keys keep verl's meaning.

verl defaults to fixed micro-batches and truncated prompts, rlctl to token budgets and filtered
prompts. A key that only has a meaning with verl's default switches to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from rlctl.recipes.layers import Layers
from rlctl.recipes.role_table import ACTOR, CRITIC, REFERENCE, REWARD_MODEL, ROLLOUT
from rlctl.recipes.slots import lookup

_ACTOR = ACTOR.section
_ROLLOUT = ROLLOUT.section
_REF = REFERENCE.section
_SWITCH = f"{_ACTOR}.use_dynamic_bsz"


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
    Implied(f"{_ACTOR}.ppo_micro_batch_size_per_gpu", _SWITCH, (_SWITCH,)),
    *(
        Implied(f"{section}.{passes}_micro_batch_size_per_gpu", switch, (switch, _SWITCH))
        for section, passes, switch in (
            (CRITIC.section, "ppo", f"{CRITIC.section}.use_dynamic_bsz"),
            (_ROLLOUT, "log_prob", f"{_ROLLOUT}.log_prob_use_dynamic_bsz"),
            (_REF, "log_prob", f"{_REF}.log_prob_use_dynamic_bsz"),
        )
    ),
    Implied(
        f"{REWARD_MODEL.max_rows_key}",
        f"{REWARD_MODEL.dynamic_bsz_key}",
        (f"{REWARD_MODEL.dynamic_bsz_key}", _SWITCH),
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
    for translator in layers.translators:
        for key, parts in translator.paths.items():
            if isinstance(parts, str):
                parts = [parts]
            names = map(str, parts or ())
            _imply(key, ".".join([lookup(layers.tree, key), *names]), key, layers)
    for rule in found:
        _imply(rule.switch, False, rule.key, layers)
    for translator in layers.translators:
        is_set = partial(_is_set, layers=layers)
        combined = translator.combined(partial(lookup, layers.tree), is_set)
        for key, (value, where) in combined.items():
            layers.imply(key, value, where, 3 if where.startswith("override ") else 2)
    return [
        f"{rule.key}={lookup(layers.tree, rule.key)} {rule.reason}, as in verl: "
        f"{rule.switch} is now false"
        for rule in found
    ]


def _imply(name: str, value: Any, cause: str, layers: Layers) -> None:
    """Set `name` at the place of the key `cause`."""
    origin = layers.origins[cause][-1]
    layers.imply(name, value, origin.where, origin.level)


def _is_set(key: str, layers: Layers) -> bool:
    """Return True if a recipe or the command line sets the key."""
    chain = layers.origins.get(key, ())
    return bool(chain) and chain[-1].level > 1
