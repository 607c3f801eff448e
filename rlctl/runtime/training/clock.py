"""Where the time of a step goes: role calls are timed by wrapping the roles, so that no algorithm has to."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from rlctl.runtime.roles import Roles

R = TypeVar("R")

_PHASES = {
    "actor": {
        "update_weights": "update_weights",
        "generate_sequences": "gen",
        "compute_log_probs": "old_log_prob",
        "update": "update_actor",
    },
    "reward": {"compute_scores": "reward"},
    "critic": {"compute_values": "values", "update": "update_critic"},
    "reference": {"compute_log_probs": "ref"},
}
# What a call would do by itself is asked for before it, so that its time is told apart.
_BEFORE = {"generate_sequences": "update_weights"}


@dataclass
class Clock:
    """Seconds by phase since the last `take`. `on_phase` is told what begins."""

    on_phase: Callable[[str], None]
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what happens inside, exclusive of the phases that begin inside it: all phases of a step add up to the step."""
        self.on_phase(name)
        inside = sum(self.seconds.values())
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += (
                time.perf_counter() - begin - (sum(self.seconds.values()) - inside)
            )

    def take(self) -> dict[str, float]:
        """What was measured, and start again from nothing."""
        taken = dict(self.seconds)
        self.seconds.clear()
        return taken


class _Timed:
    """A role whose calls are timed under the names of their phases; the rest passes through."""

    def __init__(self, role: Any, phases: dict[str, str], clock: Clock) -> None:
        self._role = role
        self._phases = phases
        self._clock = clock

    def __getattr__(self, method: str) -> Any:
        call = getattr(self._role, method)
        if method not in self._phases:
            return call

        def timed(*args: Any, **kwargs: Any) -> Any:
            if method in _BEFORE:
                getattr(self, _BEFORE[method])()
            with self._clock.phase(self._phases[method]):
                return call(*args, **kwargs)

        return timed


def timed_roles(roles: Roles, clock: Clock) -> Roles:
    """The same roles; each call counts as a phase on `clock`."""

    def timed(role: R, name: str) -> R:
        return cast(R, _Timed(role, _PHASES[name], clock)) if role is not None else role

    return Roles(
        actor=timed(roles.actor, "actor"),
        reward=timed(roles.reward, "reward"),
        critic_role=timed(roles.critic_role, "critic"),
        reference_role=timed(roles.reference_role, "reference"),
    )
