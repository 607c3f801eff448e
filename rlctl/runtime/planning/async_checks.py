"""Checks of training beside generation."""

from __future__ import annotations

from rlctl.errors import Problem
from rlctl.plugins import load
from rlctl.recipes import schema
from rlctl.runtime.rollout.auto import AutoEngine, select_engine
from rlctl.runtime.rollout.exchange import InFlightEngine

_SECTION = "async_training"


def check_async(config: schema.Config, device: str, rollout_pool: str | None) -> list[Problem]:
    """Return the problems of a schedule that the settings do not support.

    `device` is "cpu" or "cuda"; `rollout_pool` is the pool of the rollout engines, None where the
    actor's processes hold them.
    """
    asynchronous = config.async_training
    if not asynchronous.eager:
        if asynchronous.max_staleness <= 1:
            return []
        return [
            Problem(
                "the schedule fixed generates exactly one step ahead",
                f"{_SECTION}.max_staleness={asynchronous.max_staleness}",
                f"{_SECTION}.max_staleness=1, or {_SECTION}.schedule=eager",
            )
        ]
    where = f"{_SECTION}.schedule=eager"
    problems: list[Problem] = []
    if rollout_pool is None:
        problems.append(
            Problem(
                "engines generate without a pause, but they share the processes of the actor",
                where,
                "trainer.placement.rollout=engines and "
                "trainer.placement.pools={main: 1, engines: 1} give them a pool of their own; "
                f"{_SECTION}.schedule=fixed works without",
            )
        )
    name = config.actor_rollout_ref.rollout.name
    engine = load("engines", name)
    if issubclass(engine, AutoEngine):
        engine = select_engine(device)
    if not issubclass(engine, InFlightEngine):
        problems.append(
            Problem(
                f"the engine {name} cannot load weights in mid-response",
                where,
                f"actor_rollout_ref.rollout.name=hf|vllm, or {_SECTION}.schedule=fixed",
            )
        )
    if config.algorithm.filter_groups.enable:
        problems.append(
            Problem(
                "a step learns from the oldest groups that are finished, and none is dropped, but "
                "algorithm.filter_groups.enable=true drops groups",
                where,
                f"algorithm.filter_groups.enable=false, or {_SECTION}.schedule=fixed",
            )
        )
    return problems
