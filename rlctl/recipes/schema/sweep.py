"""`sweep`: what `rlctl sweep` searches, and how."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rlctl.recipes.schema.fields import Count, NonNegativeInt, PositiveFloat, Section, Text


class Sweep(Section):
    params: dict[str, Any] = Field(
        description="key to what is tried for it: a list, or Hydra's sweep grammar such as 'interval(0,1)'"
    )
    sampler: Literal["grid", "random", "tpe", "cmaes"] = Field(
        description="how values are chosen: every combination, or by Optuna"
    )
    trials: Count | None = Field(description="how many trials; null = all of a grid")
    seed: NonNegativeInt = Field(description="seed of the sampler")
    seeds: Count = Field(
        description="runs of each trial, with seeds trainer.seed, trainer.seed + 1, …; a trial's value is their mean"
    )
    metric: Text | None = Field(
        description="what a trial is judged by; null = the first validation metric of the runs, an accuracy if there is one"
    )
    mode: Literal["max", "min"] = Field(description="whether more or less of it is better")
    pruner: Literal["none", "median", "hyperband"] = Field(
        description="which rule stops trials early, after a validation"
    )
    parallel: Count | None = Field(
        description="runs at once; null = as many as the cluster has room for"
    )
    retries: NonNegativeInt = Field(
        description="how often a crashed run is started again from its last checkpoint"
    )
    wait_s: PositiveFloat = Field(
        description="seconds to wait for free devices while no run of the sweep holds any"
    )
    stop_s: PositiveFloat = Field(
        description="seconds in which a run that is told to stop must have saved and ended"
    )
