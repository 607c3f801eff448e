"""verl's interactions: simulated users, configured in YAML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlctl import plugins
from rlctl.errors import ConfigError
from rlctl.runtime.agents.environments.protocol import Message, Step
from rlctl.runtime.agents.environments.tool import accepted
from rlctl.runtime.agents.environments.verl.imports import load_class
from rlctl.runtime.agents.environments.verl.tools import entries_of
from rlctl.runtime.agents.environments.wire import checked_number
from rlctl.runtime.sandbox.calls import call


def interactions_of_config(path: str) -> dict[str, Any]:
    """Return the interactions of a YAML file by name, as in verl's `interaction_config_path`.

    Raises ConfigError for a missing file, wrong entries, and classes that cannot be built.
    """
    file = Path(path).expanduser()
    found: dict[str, Any] = {}
    for index, entry in enumerate(entries_of(file, "interaction", "interaction configuration")):
        where = f"{path}: interaction[{index}]"
        class_name = str(entry.get("class_name") or "")
        build = load_class(class_name, where, file.parent)
        name = str(entry.get("name") or _default_name(class_name))
        if name in found:
            raise ConfigError(f"two interactions have the name {name!r}", where=where)
        try:
            found[name] = build(config={**(entry.get("config") or {}), "name": name})
        except Exception as error:
            raise ConfigError(
                f"the interaction {class_name} cannot be built: {type(error).__name__}: {error}",
                where=where,
            ) from error
    if not found:
        raise ConfigError("the interaction configuration is empty", where=path)
    return found


class InteractionSession:
    """A simulated user in one episode.

    As in verl, its scores of turns reach the reward functions; they are no rewards themselves.
    """

    def __init__(self, interaction: Any, instance_id: str, kwargs: Mapping[str, Any]) -> None:
        self._interaction, self._id, self._kwargs = interaction, instance_id, dict(kwargs)

    async def start(self) -> None:
        """Start an instance with `extra_info.interaction_kwargs` of the row."""
        start = self._interaction.start_interaction
        self._id = await call(start, self._id, **self._kwargs) or self._id

    async def step(self, messages: Sequence[Message]) -> Step:
        """Return the user's reply to the conversation so far."""
        generate = self._interaction.generate_response
        found = await call(generate, self._id, list(messages), **self._kwargs)
        is_over, text, score, data = found
        info: dict[str, Any] = {"turn_scores": [checked_number(score, "the score of a turn")]}
        if data:
            info["interaction"] = dict(data)
        if is_over:
            return Step(done=True, info=info)
        return Step([{"role": "user", "content": str(text)}], info=info)

    async def close(self) -> None:
        """Finalize the instance."""
        finalize = self._interaction.finalize_interaction
        await call(finalize, **accepted(finalize, instance_id=self._id))


def chosen(interactions: Mapping[str, Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the interaction that `name` of `kwargs` names, or the only one.

    Raises ValueError for an unknown name, or if there are several and none is named.
    """
    name = str(kwargs.get("name", ""))
    if not name and len(interactions) == 1:
        return next(iter(interactions.values()))
    if name not in interactions:
        hint = plugins.suggestion(name, list(interactions))
        raise ValueError(f"extra_info.interaction_kwargs.name is {name!r}; {hint}")
    return interactions[name]


def _default_name(class_name: str) -> str:
    """Return verl's default name of an interaction: its class without the suffix, in lower case."""
    return class_name.rpartition(".")[2].removesuffix("Interaction").lower()
