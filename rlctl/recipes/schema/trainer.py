"""`trainer` and `ray_kwargs`: how long, how often, where, on what."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rlctl.recipes.schema.fields import (
    Count,
    CountOrAll,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    Section,
    Share,
    Text,
    Texts,
)


class KeepBest(Section):
    metric: Text | None = Field(
        description="metric by which the best checkpoints are kept besides the newest; null = none"
    )
    mode: Literal["max", "min"] = Field(description="whether more or less of it is better")
    k: Count = Field(description="how many of the best are kept")


class Placement(Section):
    actor: Text = Field(description="pool of the actor")
    rollout: Text | None = Field(
        description="pool of the rollout engines, of which each of its devices is one; null = in the actor's processes"
    )
    reference: Text = Field(description="pool of the frozen reference")
    critic: Text = Field(description="pool of the critic")
    reward: Text = Field(description="pool of the reward model")
    device_fraction: Share = Field(
        description="share of a GPU, or of a CPU slot where there is none, that each process takes of a Ray cluster"
    )
    pools: dict[str, Count] = Field(
        description="devices a node of each pool, such as {main: 4, judge: 4}; a pool not named here has all"
    )


class Timeouts(Section):
    ray_start_s: PositiveFloat = Field(description="seconds in which Ray must have started")
    worker_start_s: PositiveFloat = Field(
        description="seconds in which the workers must be ready, models loaded"
    )
    rollout_restart_s: PositiveFloat = Field(
        description="seconds in which a rollout engine of a pool of its own must be there again when none is left"
    )
    call_s: PositiveFloat = Field(description="seconds that one call to the workers may take")
    stop_s: PositiveFloat = Field(
        description="seconds in which a run that is told to stop finishes its step and saves"
    )
    mirror_s: PositiveFloat = Field(
        description="seconds in which the last copy to trainer.mirror must be done"
    )


class Alarms(Section):
    """Where warnings about the course of training begin, each null = off."""

    entropy_collapse: Share | None = Field(
        description="alarm where the entropy falls to this share of its start; null = off"
    )
    kl: PositiveFloat | None = Field(
        description="alarm where the KL to the reference, a token, reaches this; null = off"
    )
    update_kl: PositiveFloat | None = Field(
        description="alarm where one step moves the policy by this KL, a token; null = off"
    )
    length_drift: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = Field(
        description="alarm where answers are so many times longer or shorter than at the start; null = off"
    )
    truncation: Share | None = Field(
        description="alarm where this share of answers reaches the longest length; null = off"
    )
    uniform_groups: Share | None = Field(
        description="alarm where this share of groups has equal scores throughout; null = off"
    )
    validation_falls: PositiveFloat | None = Field(
        description="alarm where validation is by this share below its best and the reward above what it was then; null = off"
    )
    skipped_updates: Count | None = Field(
        description="alarm where so many updates of one step are skipped; null = off"
    )


class Mismatch(Section):
    warn: PositiveFloat | None = Field(
        description="alarm where training/rollout_probs_diff_mean reaches this; null = off"
    )
    halt: NonNegativeFloat | None = Field(
        description="stop above this, before anything is learned from the batch, and keep it in the attempt's folder; null = never"
    )


class Tracking(Section):
    modes: dict[str, Text] = Field(
        description="mode of a logger by its name, such as {swanlab: local, wandb: offline}; one not named here goes by its own environment"
    )
    params: dict[str, dict[str, Any]] = Field(
        description="settings of each tracker by its name, such as {wandb: {entity: team}}"
    )
    tags: Texts = Field(description="tags of the run in trackers")
    description: Text | None = Field(description="description of the run in trackers; null = none")
    queue_size: Count = Field(
        description="calls that a slow tracker may lag behind before it is switched off"
    )
    start_s: PositiveFloat = Field(description="seconds in which a tracker must have started")
    call_s: PositiveFloat = Field(
        description="seconds that a tracker may take for one step before it is switched off"
    )
    finish_s: PositiveFloat = Field(
        description="seconds that all trackers together get after the last step"
    )


class Trainer(Section):
    total_epochs: Count = Field(description="passes over the training prompts")
    total_training_steps: Count | None = Field(
        description="stop after so many steps; null = by total_epochs"
    )
    project_name: Text = Field(description="folder under run_dir, and the project in trackers")
    experiment_name: Text | None = Field(
        description="name of the run; null = recipe, date and three letters"
    )
    logger: Texts = Field(
        description="trackers besides the run's own metrics.jsonl: console, swanlab, wandb, …"
    )
    nnodes: Count = Field(description="nodes")
    n_gpus_per_node: NonNegativeInt = Field(
        description="devices a node: GPUs, or processes on a CPU; 0 = all GPUs found, one process on a CPU"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(description="auto = cuda where there is one")
    seed: NonNegativeInt = Field(description="seed of everything that has none of its own")
    deterministic: bool = Field(
        description="use deterministic kernels only: same bits each time, slower"
    )
    num_threads: Count | None = Field(
        description="CPU threads a process; null = cores divided by processes"
    )
    save_freq: CountOrAll = Field(description="steps between checkpoints; -1 = never")
    test_freq: CountOrAll = Field(description="steps between validations; -1 = never")
    val_before_train: bool = Field(description="validate before the first step")
    val_only: bool = Field(description="validate and stop")
    max_ckpt_to_keep: Count | None = Field(
        description="newest checkpoints that are kept; null = all"
    )
    keep_best: KeepBest
    critic_warmup: NonNegativeInt = Field(description="steps in which only the critic learns")
    balance_batch: bool = Field(description="give every rank rows of about equal cost")
    max_skipped_updates: Count = Field(
        description="stop after so many updates in a row were skipped for a non-finite loss or gradient"
    )
    alarms: Alarms
    mismatch: Mismatch
    resume_mode: Literal["disable", "auto", "resume_path"] = Field(
        description="disable = start anew; auto = go on with the run of this project and name if there is one; "
        "resume_path = a new run with the state in resume_from_path"
    )
    resume_from_path: Text | None = Field(
        description="checkpoint folder whose state a new run begins with"
    )
    run_dir: Text = Field(description="root of all run folders")
    default_local_dir: Text | None = Field(
        description="checkpoints go to <this>/<project>/<run>; null = inside the run's folder"
    )
    rollout_data_dir: Text | None = Field(
        description="all training answers as JSONL go to <this>/<project>/<run>; null = not written"
    )
    validation_data_dir: Text | None = Field(
        description="validation answers likewise; null = generations/ in the run's folder"
    )
    mirror: Text | None = Field(
        description="folder on shared storage, such as s3://bucket/runs, that gets a copy of the run as <this>/<project>/<run>; null = none"
    )
    log_val_generations: Annotated[int, Field(ge=0)] = Field(
        description="validation samples sent to the trackers"
    )
    tracking: Tracking
    placement: Placement
    timeouts: Timeouts


class RayInit(Section):
    address: Text | None = Field(description="address of a running cluster; null = start one here")
    num_cpus: Count | None = Field(
        description="cores that Ray may use; null = what the container allows"
    )
    num_gpus: NonNegativeInt | None = Field(description="GPUs that Ray may use; null = all found")
    object_store_memory: Count | None = Field(
        description="bytes of Ray's object store; null = Ray's choice"
    )
    include_dashboard: bool = Field(description="start Ray's dashboard")
    runtime_env: dict[str, Any] = Field(
        description="Ray's runtime environment for the workers, such as {env_vars: {NCCL_DEBUG: INFO}}"
    )


class RayKwargs(Section):
    ray_init: RayInit
    timeline_json_file: Text | None = Field(
        description="write Ray's timeline here at the end; null = not written"
    )
