"""Sections `sweep` and `ray_kwargs`: search space and schedule of a sweep; Ray."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rlctl.recipes.schema.fields import (
    Count,
    NonNegativeInt,
    Not,
    PositiveFloat,
    Section,
    Seed,
    Text,
    UnusedIf,
)

_RUNNING_CLUSTER = UnusedIf({".address": Not(None)})


class Sweep(Section):
    """Settings of `sweep`."""

    params: dict[str, Any] = Field(
        description="values to try per key: a list, or Hydra's sweep grammar such as "
        "'interval(0,1)'"
    )
    sampler: Literal["grid", "random", "tpe", "cmaes"] = Field(
        description="choice of values: grid = all combinations, others = by Optuna"
    )
    trials: Count | None = Field(description="number of trials; null = the complete grid")
    seed: Seed = Field(description="seed of the sampler")
    seeds: Count = Field(
        description="runs per trial with seeds trainer.seed, trainer.seed + 1, …, and data.seed "
        "likewise unless the command line sets it; the value of a trial is their mean"
    )
    metric: Text | None = Field(
        description="metric to optimize; null = the runs' first validation metric, an accuracy "
        "if there is one"
    )
    mode: Literal["max", "min"] = Field(description="direction of the metric")
    pruner: Literal["none", "median", "hyperband"] = Field(
        description="rule that stops trials early, after a validation"
    )
    parallel: Count | None = Field(description="concurrent runs; null = as many as devices allow")
    retries: NonNegativeInt = Field(
        description="restarts of a crashed run from its last checkpoint"
    )
    wait_s: PositiveFloat = Field(
        description="seconds to wait for free devices if no run of the sweep holds any"
    )
    stop_s: PositiveFloat = Field(description="seconds that a stopped run has to save and exit")


class RayInit(Section):
    """Arguments of `ray.init`."""

    address: Text | None = Field(description="address of a running cluster; null = start one here")
    num_cpus: Annotated[Count | None, _RUNNING_CLUSTER] = Field(
        description="cores available to Ray; null = the container's limit"
    )
    num_gpus: Annotated[NonNegativeInt | None, _RUNNING_CLUSTER] = Field(
        description="GPUs available to Ray; null = all found"
    )
    object_store_memory: Annotated[Count | None, _RUNNING_CLUSTER] = Field(
        description="size of Ray's object store in bytes; null = Ray's default"
    )
    include_dashboard: Annotated[bool, _RUNNING_CLUSTER] = Field(
        description="start Ray's dashboard"
    )
    runtime_env: dict[str, Any] = Field(
        description="Ray's runtime environment of the workers, such as "
        "{env_vars: {NCCL_DEBUG: INFO}}"
    )


class RayKwargs(Section):
    """Settings of `ray_kwargs`."""

    ray_init: RayInit
    timeline_json_file: Text | None = Field(
        description="file for Ray's timeline, written at the end; null = not written"
    )
