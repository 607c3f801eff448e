"""verl's keys that repeat another key: they are dropped if both agree, else refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlctl.recipes.slots import lookup

_ROLLOUT = "actor_rollout_ref.rollout"
_PROMPT, _RESPONSE = "data.max_prompt_length", "data.max_response_length"


@dataclass(frozen=True, slots=True)
class Agreement:
    """Pattern of a repeated key, and the expression that its value must agree with.

    `at_least` accepts larger values too: a limit that is never reached.
    """

    keys: str
    expression: str
    value: Callable[[dict[str, Any]], Any]
    at_least: bool = False

    def holds(self, given: Any, container: dict[str, Any]) -> bool:
        """Return True if the value `given` asks for what `container` has."""
        if given is None or (isinstance(given, str) and "${" in given):
            return True  # verl's default, a reference to the key that it repeats
        expected = self.value(container)
        if self.at_least and isinstance(given, int) and isinstance(expected, int):
            return given >= expected
        return given == expected


def _key(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda container: lookup(container, name)


def _context(container: dict[str, Any]) -> int | None:
    lengths = lookup(container, _PROMPT), lookup(container, _RESPONSE)
    return sum(lengths) if all(isinstance(each, int) for each in lengths) else None


AGREEMENTS: tuple[Agreement, ...] = (
    Agreement(f"{_ROLLOUT}.prompt_length", _PROMPT, _key(_PROMPT)),
    Agreement(f"{_ROLLOUT}.response_length", _RESPONSE, _key(_RESPONSE)),
    Agreement(f"{_ROLLOUT}.max_model_len", f"{_PROMPT} + {_RESPONSE}", _context, at_least=True),
    Agreement("{reward,reward_model}.reward_kwargs.max_resp_len", _RESPONSE, _key(_RESPONSE)),
    Agreement(
        "{actor_rollout_ref.actor.rollout_n,actor_rollout_ref.ref.rollout_n,critic.rollout_n,"
        "rollout.n}",
        f"{_ROLLOUT}.n",
        _key(f"{_ROLLOUT}.n"),
    ),
)
