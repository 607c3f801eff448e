"""Sections `trainer` and `async_training`: duration, placement, timeouts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rlctl.plugins import names
from rlctl.recipes.schema.fields import (
    NO_ENGINE_POOL,
    NO_REWARD_MODEL,
    NO_VALIDATION,
    Count,
    CountOrAll,
    Counts,
    Duration,
    NonNegativeFloat,
    NonNegativeInt,
    NonNegativeInts,
    Not,
    OneOrMany,
    PositiveFloat,
    Section,
    Seed,
    Share,
    Text,
    Texts,
    UnusedIf,
)

_NO_CHECKPOINTS = UnusedIf({"trainer.save_freq": -1, "trainer.save_every": None})
_ALL_KEPT = UnusedIf({"trainer.max_ckpt_to_keep": None})
_NOT_BEST = UnusedIf({".metric": None})
_BYPASS = UnusedIf({"algorithm.rollout_correction.bypass_mode": True})
_STALE = UnusedIf({"async_training.max_staleness": Not(0)})
_UNNAMED = UnusedIf({".resume_mode": "auto", ".experiment_name": None})


Contents = Annotated[
    tuple[Literal["model", "optimizer", "extra", "hf_model"], ...], OneOrMany, Field(min_length=1)
]
Event = Literal["finished", "failed", "alarm", "lost", "preempted"]


class KeepBest(Section):
    """Checkpoints kept for their metric."""

    metric: Annotated[Text | None, _NO_CHECKPOINTS, _ALL_KEPT] = Field(
        description="metric by which best checkpoints are kept besides the newest; null = none"
    )
    mode: Annotated[Literal["max", "min"], _NOT_BEST, _ALL_KEPT] = Field(
        description="direction of the metric"
    )
    k: Annotated[Count, _NOT_BEST, _ALL_KEPT] = Field(
        description="number of best checkpoints to keep"
    )


class Checkpoint(Section):
    """Contents of checkpoints, of all roles that learn."""

    save_contents: Annotated[Contents, _NO_CHECKPOINTS] = Field(
        description="parts of checkpoints: model and optimizer to resume, hf_model for "
        "transformers, vLLM and `rlctl eval`; extra, as the random state, is always saved"
    )
    load_contents: Contents = Field(
        description="parts that a resumed run loads; without optimizer, it starts a new one"
    )
    max_optimizers_to_keep: Annotated[Count | None, _NO_CHECKPOINTS] = Field(
        description="newest checkpoints that keep the optimizer; null = all"
    )


class Placement(Section):
    """Pools of the roles."""

    actor: Text = Field(description="pool of the actor")
    rollout: Text | None = Field(
        description="pool of the rollout engines, one per device; null = in the actor's processes"
    )
    reference: Text = Field(description="pool of the frozen reference")
    critic: Text = Field(description="pool of the critic")
    reward: Annotated[Text, NO_REWARD_MODEL] = Field(description="pool of the reward model")
    device_fraction: Share = Field(
        description="fraction of a GPU, or of a CPU slot without GPUs, that each process reserves "
        "of a Ray cluster"
    )
    pools: dict[str, Count] = Field(
        description="devices per node of each pool, such as {main: 4, critic: 4}; other pools "
        "use all devices"
    )


class Timeouts(Section):
    """Timeouts of processes, in seconds."""

    ray_start_s: PositiveFloat = Field(
        description="timeout of Ray's start, in seconds; a busy machine has up to ten times as many"
    )
    worker_start_s: PositiveFloat | None = Field(
        description="timeout of the workers' start including model loading, in seconds; null = "
        "300 on CPUs, and 1,200 on GPUs, where engines compile"
    )
    rollout_restart_s: Annotated[PositiveFloat, NO_ENGINE_POOL] = Field(
        description="timeout of an engine restart if a rollout pool has none left, in seconds"
    )
    call_s: float = Field(ge=3, description="timeout of one call to the workers, in seconds")
    stop_s: PositiveFloat = Field(
        description="seconds in which interrupted work of a stopped run must end; an update and a "
        "checkpoint are finished without a limit"
    )
    mirror_s: Annotated[PositiveFloat, UnusedIf({"trainer.mirror": None})] = Field(
        description="timeout of the last copy to trainer.mirror, in seconds"
    )

    def worker_start(self, device: str) -> float:
        """Return the timeout of the start of workers on a "cpu" or "cuda" device, in seconds."""
        return self.worker_start_s or (1200.0 if device == "cuda" else 300.0)


class Alarms(Section):
    """Thresholds of warnings about training; null = off."""

    entropy_collapse: Share | None = Field(
        description="alarm if entropy falls to this fraction of its initial value; null = off"
    )
    kl: PositiveFloat | None = Field(
        description="alarm if the KL to the reference per token reaches this; null = off"
    )
    update_kl: PositiveFloat | None = Field(
        description="alarm if the KL of one step's update per token reaches this; null = off"
    )
    length_drift: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = Field(
        description="alarm if responses become this factor longer or shorter than initially; "
        "null = off"
    )
    truncation: Share | None = Field(
        description="alarm if this fraction of responses reaches the maximum length; null = off"
    )
    uniform_groups: Share | None = Field(
        description="alarm if this fraction of groups has equal scores; null = off"
    )
    validation_falls: Annotated[PositiveFloat | None, NO_VALIDATION] = Field(
        description="alarm if validation is this fraction below its best while the reward is "
        "higher than it was then; null = off"
    )
    reward_collapse: PositiveFloat | None = Field(
        description="alarm if the reward is this fraction below its best; null = off"
    )
    reward_components: Share | None = Field(
        description="alarm if one component of the reward has risen by this fraction while another "
        "has fallen by it; null = off"
    )
    memory_growth: PositiveFloat | None = Field(
        description="alarm if a process takes this fraction more host memory than in its first "
        "ten steps, and at least a GiB more; null = off"
    )
    skipped_updates: Count | None = Field(
        description="alarm at this many skipped updates in one step; null = off"
    )
    zero_advantages: Count | None = Field(
        description="alarm after this many steps in a row whose advantages are all 0; null = off"
    )
    failed_rewards: Count | None = Field(
        description="alarm at this many failed rewards in one step; null = off"
    )
    zero_scores: Count | None = Field(
        description="alarm after this many steps in a row whose responses all score 0; null = off"
    )
    slow_reward: Share | None = Field(
        description="alarm if waiting for the reward takes this fraction of a step, and at least a "
        "second; null = off"
    )


class Mismatch(Section):
    """Thresholds of the difference between engine and trainer probabilities."""

    warn: Annotated[PositiveFloat | None, _STALE] = Field(
        description="alarm if training/rollout_probs_diff_mean reaches this; null = off"
    )
    halt: Annotated[NonNegativeFloat | None, _BYPASS, _STALE] = Field(
        description="stop above this before the update and save the batch in the attempt's "
        "folder; null = never"
    )


class Profile(Section):
    """Traces of steps by torch's profiler."""

    steps: Counts | None = Field(
        description="steps to trace, into profiles/ of the run; null = none"
    )
    ranks: NonNegativeInts | None = Field(
        description="ranks to trace in each pool of workers; null = all"
    )
    with_stack: bool = Field(description="record Python stacks: larger traces, slower steps")
    with_memory: bool = Field(description="record allocations")
    record_shapes: bool = Field(description="record the shapes of inputs")


class Tracking(Section):
    """Settings of all trackers."""

    modes: dict[str, Text] = Field(
        description="mode per logger, such as {swanlab: local, wandb: offline}; others follow "
        "their environment variables"
    )
    params: dict[str, dict[str, Any]] = Field(
        description="settings per logger, such as {wandb: {entity: team}}"
    )
    tags: Texts = Field(description="tags of the run in trackers")
    description: Text | None = Field(description="description of the run in trackers; null = none")
    system_s: PositiveFloat | None = Field(
        description="seconds between samples of CPU, memory and GPUs of every node, which trackers "
        "receive with each step as system/node<i>/…; null = none"
    )
    queue_size: Count = Field(
        description="calls that a slow tracker may lag behind before it is disabled"
    )
    start_s: PositiveFloat = Field(description="timeout of a tracker's start, in seconds")
    call_s: PositiveFloat = Field(
        description="seconds that a tracker may take per step before it is disabled"
    )
    finish_s: PositiveFloat = Field(
        description="seconds that all trackers together have after the last step"
    )


class Trainer(Section):
    """Settings of `trainer`."""

    total_epochs: Annotated[Count, UnusedIf({".total_training_steps": Not(None)})] = Field(
        description="passes over the training prompts"
    )
    total_training_steps: Count | None = Field(
        description="number of steps; null = by total_epochs"
    )
    project_name: Text = Field(description="folder under run_dir, and the project in trackers")
    experiment_name: Text | None = Field(
        description="name of the run; null = recipe, date and three letters"
    )
    logger: Texts = Field(
        description="trackers besides the run's metrics.jsonl: console, swanlab, wandb, …"
    )
    nnodes: Count = Field(description="number of nodes")
    n_gpus_per_node: NonNegativeInt = Field(
        description="devices per node: GPUs, or processes on a CPU; 0 = all GPUs, or one process "
        "on a CPU"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(description="device; auto = cuda if available")
    seed: Seed = Field(description="seed of everything without another seed")
    deterministic: bool = Field(
        description="use deterministic kernels only: reproducible bits, slower"
    )
    num_threads: Count | None = Field(
        description="CPU threads per process; null = OMP_NUM_THREADS, else cores divided by "
        "processes"
    )
    save_freq: CountOrAll = Field(description="steps between checkpoints; -1 = never")
    save_every: Duration | None = Field(
        description="time between checkpoints, such as 30m: the first step that ends later is "
        "saved, and the last one; null = not by the clock"
    )
    test_freq: Annotated[CountOrAll, NO_VALIDATION] = Field(
        description="steps between validations; -1 = never"
    )
    val_before_train: bool = Field(description="validate before the first step")
    val_only: bool = Field(description="validate and exit")
    max_ckpt_to_keep: Annotated[Count | None, _NO_CHECKPOINTS] = Field(
        description="newest checkpoints to keep; null = all"
    )
    keep_best: KeepBest
    checkpoint: Checkpoint
    critic_warmup: NonNegativeInt = Field(description="initial steps that train only the critic")
    balance_batch: bool = Field(description="balance rows over ranks by cost")
    max_skipped_updates: Count = Field(
        description="stop after this many consecutive updates skipped for a non-finite loss or "
        "gradient"
    )
    alarms: Alarms
    mismatch: Mismatch
    profile: Profile
    resume_mode: Annotated[Literal["disable", "auto", "resume_path"], _UNNAMED] = Field(
        description="disable = start from scratch; auto = resume the run of this project and name "
        "if it exists; resume_path = start a run with the state in resume_from_path"
    )
    resume_from_path: Annotated[Text | None, UnusedIf({".resume_mode": Not("resume_path")})] = (
        Field(description="checkpoint folder with the initial state of a new run")
    )
    run_dir: Text = Field(description="root of all run folders")
    run_dir_access: Literal["owner", "group", "all"] = Field(
        description="users that can read the folders of runs"
    )
    default_local_dir: Text | None = Field(
        description="root of checkpoints: <this>/<project>/<run>; null = in the run's folder"
    )
    rollout_data_dir: Text | None = Field(
        description="root of training responses as JSONL: <this>/<project>/<run>; null = not saved"
    )
    validation_data_dir: Text | None = Field(
        description="root of validation responses as JSONL: <this>/<project>/<run>; "
        "null = generations/ in the run's folder"
    )
    mirror: Text | None = Field(
        description="remote copy of the run on shared storage, such as s3://bucket/runs, at "
        "<this>/<project>/<run>; null = none"
    )
    stop_when: Texts = Field(
        description="rules of which the first that holds ends the run, such as "
        "no_gain(val-core/…, 5), best(val-core/…) > 0.95, alarm(kl) or hours(8); [] = none"
    )
    notify: Texts = Field(
        description="receivers of notices: environment variables with an address such as "
        "https://hooks.slack.com/…, and shell commands; [] = none"
    )
    notify_on: Annotated[tuple[Event, ...], OneOrMany, UnusedIf({".notify": ()})] = Field(
        description="events that are notified: finished, failed, alarm, lost, preempted"
    )
    energy: bool = Field(
        description="count the energy of GPUs and processors, where the machine has counters"
    )
    price_per_hour: NonNegativeFloat | None = Field(
        description="price of an hour of the run's machines, for its cost; null = unknown"
    )
    listeners: Texts = Field(description="other plug-ins that follow the run: module:Name")
    listener_params: dict[str, dict[str, Any]] = Field(description="settings per listener")
    log_val_generations: Annotated[NonNegativeInt | None, NO_VALIDATION] = Field(
        description="validation samples sent to the trackers; null = 8 if one of them shows "
        "samples, else 0"
    )
    log_train_generations: Annotated[int, Field(ge=0)] = Field(
        description="prompts of each step whose responses are kept for `rlctl show --samples "
        "--train`, of the newest 1,000 steps; 0 = none"
    )
    tracking: Tracking
    placement: Placement
    timeouts: Timeouts

    @property
    def listening(self) -> list[str]:
        """Names of the listeners that are on: keys of this section, and other plug-ins."""
        return [
            *(name for name in names("listeners") if getattr(self, name, None)),
            *self.listeners,
        ]

    @property
    def saves(self) -> bool:
        """True if checkpoints are written by steps or by the clock."""
        return self.save_freq > 0 or self.save_every is not None

    @property
    def save_every_s(self) -> float | None:
        """Seconds of `save_every`."""
        if self.save_every is None:
            return None
        from rlctl.recipes.durations import parse_duration

        every = parse_duration(self.save_every)
        assert every is not None, "the schema has checked it"
        return every.total_seconds()


class AsyncTraining(Section):
    """Section `async_training`: training beside generation."""

    max_staleness: NonNegativeInt = Field(
        description="steps that rollouts may be generated ahead of learning; 0 = in the same step"
    )
    schedule: Literal["fixed", "eager"] = Field(
        description="fixed = one step ahead, and repeatable; eager = engines never wait, load "
        "weights in mid-response, and a step takes the oldest groups that are finished"
    )

    @property
    def eager(self) -> bool:
        """True if engines generate without a pause."""
        return self.schedule == "eager" and self.max_staleness > 0
