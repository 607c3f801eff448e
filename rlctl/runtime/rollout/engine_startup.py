"""Startup of a rollout engine in phases that it reports."""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol, TypeVar, runtime_checkable

from transformers import PreTrainedModel

from rlctl.plugins.result_check import check_result
from rlctl.runtime.rollout.engine import EngineSpec, RolloutEngine

E = TypeVar("E")


@runtime_checkable
class PhasedStartup(Protocol):
    """Engine class with a slow start that reports its phases."""

    @classmethod
    def startup_phases(
        cls, spec: EngineSpec, policy: PreTrainedModel | None
    ) -> Generator[str, None, RolloutEngine]:
        """Build the engine like `from_spec`, yielding a description before each phase."""
        ...


def start_in_phases(
    engine: type[RolloutEngine], spec: EngineSpec, policy: PreTrainedModel | None
) -> Generator[str, None, RolloutEngine]:
    """Build an engine, yielding its startup phases if it reports any."""
    if isinstance(engine, PhasedStartup):
        return (yield from engine.startup_phases(spec, policy))
    built = engine.from_spec(spec, policy)
    check_result(engine.from_spec, hasattr(built, "generate"), built, "an engine")
    return built


def run_startup(phases: Generator[str, None, E]) -> E:
    """Run the startup generator to completion and return the engine."""
    while True:
        try:
            next(phases)
        except StopIteration as finished:
            return finished.value
