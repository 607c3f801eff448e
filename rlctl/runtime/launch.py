"""Starts a run and sees to it that it ends: checks first, then the run's folder, then processes; whatever happens, they are closed."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from rlctl.errors import DeviceMemoryError
from rlctl.monitoring.alarms import Alarms, Limits
from rlctl.monitoring.final_summary import print_summary
from rlctl.runs.provenance import data_hashes, installed_versions
from rlctl.runs.record import Last, ending
from rlctl.runs.rewind import rewind
from rlctl.runs.run_dir import RunDir
from rlctl.runs.sync import run_info
from rlctl.runtime.algorithms.base import Algorithm
from rlctl.runtime.build import build_reward, build_roles
from rlctl.runtime.checkpoint.remote_copy import mirrored
from rlctl.runtime.checkpoint.store import CheckpointStore, ControllerState
from rlctl.runtime.cluster.inline import InlinePool, Pool
from rlctl.runtime.planning.plan import Plan
from rlctl.runtime.rank_info import RankInfo, available_cores
from rlctl.runtime.roles import Roles
from rlctl.runtime.training.collector import Collector
from rlctl.runtime.training.trainer import RunContext, Trainer, TrainerState
from rlctl.runtime.training.watchdog import Watchdog
from rlctl.runtime.workers.rng import seed_all, set_rng_state
from rlctl.tracking.async_tracker import TrackerTimeouts
from rlctl.tracking.fanout import Trackers
from rlctl.tracking.jsonl import read_metrics
from rlctl.tracking.tracker import Event

_BEYOND_S = 10.0  # what the watchdog waits longer than a call to workers, which has a deadline of its own and ends the run in order


@dataclass(frozen=True)
class ResumePoint:
    """Where a run begins that does not begin anew: it goes on in `run`, or is a new one (None) that takes up another's state.

    `checkpoint` is None for a run that had none and starts over. `parent` says of a new run whose state it took; `force` that the driver
    of `run`, which cannot be seen from here, is gone.
    """

    run: Path | None
    checkpoint: Path | None
    step: int
    changes: Sequence[str] = ()
    parent: Mapping[str, Any] | None = None
    force: bool = False


def train(plan: Plan, start: ResumePoint | None = None, end_by: float | None = None) -> RunDir:
    """Run the plan to its end, or until another step might not be over and saved at `end_by` (seconds since the epoch): TimeUp.

    Raises what stops it; the run's record says how it ended in any case.
    """
    config = plan.config
    seed_all(config.trainer.seed)
    with ExitStack() as stack:
        run = _open_run(plan, start)
        on_checkpoint = stack.enter_context(mirrored(run, config.trainer))
        tracking = config.trainer.tracking
        patience = TrackerTimeouts(
            tracking.queue_size, tracking.start_s, tracking.call_s, tracking.finish_s
        )
        limits = Limits(
            **config.trainer.alarms.model_dump(), rollout_mismatch=config.trainer.mismatch.warn
        )
        alarms = Alarms(limits, read_metrics(run.metrics))
        trackers = Trackers.load(config.trainer.logger, run.event, patience, alarms)
        stack.enter_context(ending(partial(_close, run, trackers, time.monotonic())))
        stack.enter_context(_memory_noted(run))
        resume_step = (
            start.step
            if start is not None and start.run is not None and start.checkpoint is not None
            else 0
        )
        ids = trackers.start(
            run_info(run.record, run.path, plan.recipe.container, plan.num_steps, resume_step)
        )
        run.update(trackers={**run.record.trackers, **ids})
        watchdog = Watchdog(
            config.trainer.timeouts.call_s + _BEYOND_S,
            run.attempt / "stacks.txt",
            partial(run.finish, "failed", 1),
        )

        def on_phase(name: str) -> None:
            watchdog.begin(name)
            trackers.phase(name)

        reward, close_reward = build_reward(config, plan.tokenizer, available_cores(), run.attempt)
        stack.callback(close_reward)
        pools = stack.enter_context(open_pools(plan, run.attempt, on_phase, run.event))
        stack.enter_context(watchdog)  # what comes before and after has deadlines of its own
        run.event("placed", **{name: pool.nodes for name, pool in pools.items()})
        roles = build_roles(config, plan.algorithm, plan.tokenizer, pools, reward, on_phase)
        collector = Collector.of(plan.loader, plan.algorithm, config.algorithm)
        progress = (
            _take_up(start, plan.algorithm, collector, roles, on_phase)
            if start is not None
            else TrainerState()
        )
        trackers.begin()
        run.update(state="running", total_steps=plan.num_steps)
        parts = RunContext(
            algorithm=plan.algorithm,
            roles=roles,
            collector=collector,
            validator=plan.validator,
            tokenizer=plan.tokenizer,
            trackers=trackers,
            run=run,
            num_steps=plan.num_steps,
            num_devices=sum(plan.pool_sizes.values()),
            num_ranks=plan.pool_sizes[config.trainer.placement.actor],
            max_response_length=config.data.max_response_length,
            on_phase=on_phase,
            on_checkpoint=on_checkpoint,
            end_by=end_by,
        )
        Trainer(parts, config.trainer, progress).run()
        if reward.first_error is not None:
            run.event("reward_error", first=reward.first_error)
    return run


def _close(run: RunDir, trackers: Trackers, began: float, state: Last, code: int) -> None:
    """The record and the trackers of a run are told how it ended; a summary is printed unless it failed."""
    trackers.finish(state, code)
    run.finish(state, code)
    if state != "failed":
        print_summary(
            state,
            run.path,
            read_metrics(run.metrics),
            time.monotonic() - began,
            _next_commands(run, state),
        )


@contextmanager
def _memory_noted(run: RunDir) -> Iterator[None]:
    """Of a run that runs out of memory, the events say what may fit: `--retries` goes on with that."""
    try:
        yield
    except DeviceMemoryError as error:
        run.event("out_of_memory", key=error.key, value=error.value, proposed=error.proposed)
        raise


def _open_run(plan: Plan, start: ResumePoint | None) -> RunDir:
    """Make the run's folder, whole or not at all; or open the one that goes on."""
    if start is not None and start.run is not None:
        run = RunDir.reopen(start.run, start.force)
        _go_back(run, start)
        _describe(run, plan, None)
        return run
    trainer = plan.config.trainer
    run = RunDir.create(
        Path(trainer.run_dir),
        trainer.project_name,
        trainer.experiment_name,
        plan.recipe.name.removesuffix("_trainer"),
    )
    outside = {
        "checkpoints": trainer.default_local_dir,
        "rollouts": trainer.rollout_data_dir,
        "generations": trainer.validation_data_dir,
    }
    try:
        for part, folder in outside.items():
            run.place(part, folder)
        _describe(run, plan, start.parent if start is not None else None)
    except BaseException:
        shutil.rmtree(run.path, ignore_errors=True)
        raise
    return run


def _describe(run: RunDir, plan: Plan, parent: Mapping[str, Any] | None) -> None:
    """Write down the configuration as composed, and what the run is run on."""
    trainer, data = plan.config.trainer, plan.config.data
    run.write_config(
        yaml.safe_dump(plan.recipe.container, sort_keys=False, allow_unicode=True),
        plan.recipe.origins,
    )
    files = [*data.train_files, *(data.val_files or ())]
    run.update(
        seeds={"trainer": trainer.seed, "data": data.seed},
        data=data_hashes(files),
        parent=parent or run.record.parent,
    )


def _go_back(run: RunDir, start: ResumePoint) -> None:
    """Nothing that the run recorded after the step it goes on from may stay in its place."""
    step = start.step if start.checkpoint is not None else None
    lines = rewind(run, step)
    later = CheckpointStore(run.path / "checkpoints").set_aside_after(
        start.step, f"before_attempt_{run.record.attempts}"
    )
    run.update(versions=installed_versions())
    run.event(
        "resume",
        step=start.step,
        changes=list(start.changes),
        taken_back=lines,
        checkpoints_set_aside=later,
    )


def _take_up(
    start: ResumePoint,
    algorithm: Algorithm,
    collector: Collector,
    roles: Roles,
    on_phase: Callable[[str], None],
) -> TrainerState:
    """Give workers, algorithm and collector the state of the checkpoint. A role that the checkpoint knows nothing of begins anew."""
    if start.checkpoint is None:
        return TrainerState()
    on_phase(f"loading the checkpoint of step {start.step}")
    state = ControllerState.read(start.checkpoint)
    roles.actor.load((start.checkpoint / "actor").absolute())
    if roles.critic_role is not None and (start.checkpoint / "critic").is_dir():
        roles.critic.load((start.checkpoint / "critic").absolute())
    algorithm.load_state_dict(state.algorithm)
    collector.load_state_dict(state.loader, state.step)
    set_rng_state(state.rng)
    return TrainerState(state.step, state.skipped_in_a_row, new_run=start.run is None)


@contextmanager
def open_pools(
    plan: Plan, logs: Path, on_phase: Callable[[str], None], event: Event
) -> Iterator[Mapping[str, Pool]]:
    """The processes of a run, or none with `--inline`; closed at the end, and Ray with them."""
    trainer, sizes, num_threads = plan.config.trainer, plan.pool_sizes, plan.num_threads
    num_processes = sum(sizes.values())
    rank_info = RankInfo(
        0,
        1,
        plan.devices.kind,
        num_threads,
        trainer.timeouts.call_s,
        trainer.deterministic,
        None,
        trainer.seed,
    )
    with ExitStack() as stack:
        if plan.inline:
            pool = InlinePool(rank_info)
            stack.callback(pool.close)
            yield dict.fromkeys(sizes, pool)
            return
        from rlctl.runtime.cluster.engine_group import EnginePool
        from rlctl.runtime.cluster.pool import PoolSpec, ResourcePool
        from rlctl.runtime.cluster.session import ray_session

        on_phase("starting Ray")
        ray_kwargs = plan.config.ray_kwargs
        cpus = ray_kwargs.ray_init.num_cpus or max(available_cores(), num_processes)
        session = ray_session(
            ray_kwargs.ray_init,
            cpus,
            num_threads,
            trainer.timeouts.ray_start_s,
            ray_kwargs.timeline_json_file,
        )
        stack.enter_context(session)
        on_phase(f"starting {num_processes} worker process{'es' if num_processes > 1 else ''}")
        pools: dict[str, ResourcePool | EnginePool] = {}
        for name, size in sizes.items():
            spec = PoolSpec(
                name,
                size,
                replace(rank_info, world_size=size, log_path=(logs / f"{name}.log").absolute()),
                trainer.timeouts.worker_start_s,
                trainer.timeouts.call_s,
                trainer.balance_batch,
                trainer.placement.device_fraction,
            )
            pools[name] = (
                EnginePool(spec, trainer.timeouts.rollout_restart_s, event)
                if name == plan.rollout_pool
                else ResourcePool(spec)
            )
            if ray_kwargs.ray_init.address is not None:
                stack.callback(pools[name].close)  # a cluster of our own ends with its session
        yield pools


def _next_commands(run: RunDir, state: str) -> list[str]:
    commands = [
        f"rlctl show {run.record.name}",
        f"rlctl show {run.record.name} --samples",
        f"rlctl report {run.record.name}",
    ]
    if state == "finished" and any(run.path.glob("checkpoints/step_*")):
        commands.append(f"rlctl eval {run.record.name}")
    return commands
