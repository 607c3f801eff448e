"""Table of the config keys that select plug-ins and of the sections with their settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlctl import plugins


@dataclass(frozen=True, slots=True)
class Slot:
    """A key that selects one plug-in of `kind`, or several if its value is a list.

    `params` is the section with the settings. A slot of several plug-ins has one section per name
    below it. `keywords`: a plug-in without declared settings accepts them as keyword arguments.
    `all_if_null`: null selects every installed plug-in. `isolated`: `module:Name` is user code,
    which other processes import.
    """

    kind: str
    key: str
    params: str | None = None
    several: bool = False
    keywords: bool = False
    all_if_null: bool = False
    isolated: bool = False

    def selected(self, container: Mapping[str, Any]) -> list[str]:
        """Return the names of the selected plug-ins."""
        value = lookup(container, self.key)
        if value is None and self.all_if_null:
            return plugins.names(self.kind)
        if isinstance(value, str):
            return [value]
        if isinstance(value, list | tuple):
            return [name for name in value if isinstance(name, str)]
        return []

    def settings(self, container: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Yield name, section and settings of every plug-in with settings in `container`.

        The section of `module:Name` may be called `Name`.
        """
        values = lookup(container, self.params) if self.params else None
        if not isinstance(values, dict) or not values:
            return
        assert self.params is not None
        if not self.several:
            for name in self.selected(container):
                yield name, self.params, values
            return
        selected = () if self.keywords else self.selected(container)
        full_names = {name.rpartition(":")[2]: name for name in selected}
        for name, inner in values.items():
            if isinstance(inner, dict):
                full = str(name if name in selected else full_names.get(name, name))
                yield full, f"{self.params}.{name}", inner

    def is_loaded_here(self, name: str) -> bool:
        """Return False for a plug-in that other processes import."""
        return not (self.isolated and ":" in name)

    def section(self, name: str) -> str | None:
        """Return the section with the settings of the plug-in `name`."""
        if not self.params or not self.several:
            return self.params
        return f"{self.params}.{name.rpartition(':')[2]}"


_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"

SLOTS: tuple[Slot, ...] = (
    Slot("algorithms", "algorithm.name", "algorithm.params"),
    Slot("advantages", "algorithm.adv_estimator", "algorithm.adv_estimator_params"),
    Slot("policy_losses", f"{_ACTOR}.policy_loss.loss_mode", f"{_ACTOR}.policy_loss.params"),
    Slot("kl_estimators", "algorithm.kl_penalty"),
    Slot("kl_estimators", f"{_ACTOR}.kl_loss_type"),
    Slot(
        "rewards",
        "reward.functions",
        "reward.params",
        several=True,
        keywords=True,
        all_if_null=True,
        isolated=True,
    ),
    Slot("engines", f"{_ROLLOUT}.name", f"{_ROLLOUT}.params"),
    Slot("generators", f"{_ROLLOUT}.multi_turn.generator"),
    Slot(
        "environments",
        f"{_ROLLOUT}.agent.environment",
        f"{_ROLLOUT}.agent.params",
        isolated=True,
    ),
    Slot("tool_parsers", f"{_ROLLOUT}.multi_turn.format"),
    Slot("listeners", "trainer.listeners", "trainer.listener_params", several=True),
    Slot("loggers", "trainer.logger", "trainer.tracking.params", several=True),
    Slot("readers", "data.reader", "data.reader_params"),
    Slot("samplers", "data.sampler", "data.sampler_params"),
)


def slot_of(key: str) -> Slot | None:
    """Return the slot that `key` selects a plug-in for, or None."""
    return next((slot for slot in SLOTS if slot.key == key), None)


def slot_with_setting(key: str) -> Slot | None:
    """Return the slot whose settings contain `key`, or None."""
    return next((slot for slot in SLOTS if slot.params and key.startswith(f"{slot.params}.")), None)


def lookup(container: Any, key: str) -> Any:
    """Return the value of a dotted key, or None if it is not set."""
    for part in key.split("."):
        if not isinstance(container, dict):
            return None
        container = container.get(part)
    return container
