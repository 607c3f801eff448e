"""Launch of a run: its folder and trackers, processes, roles, training; all closed at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlctl.debugging import call_limit
from rlctl.errors import DeviceMemoryError
from rlctl.owner import is_command
from rlctl.process import relaxed_umask
from rlctl.recipes import schema
from rlctl.recipes.role_table import trained_role
from rlctl.runs.record import Last, message_of, recorded_end
from rlctl.runs.run_dir import RunDir
from rlctl.runs.tracked import run_info
from rlctl.runtime.algorithms.base import Needs, sampling_seed
from rlctl.runtime.algorithms.stats import rollout_metrics
from rlctl.runtime.build import build_reward, build_roles
from rlctl.runtime.cluster.pools import InlinePool, Pools
from rlctl.runtime.data import bundled
from rlctl.runtime.generators import Generation, with_generator
from rlctl.runtime.planning.capacity import describe
from rlctl.runtime.planning.plan import Plan
from rlctl.runtime.rewards.role import RuleReward
from rlctl.runtime.training.collector import Collector
from rlctl.runtime.training.input_hashes import input_hashes
from rlctl.runtime.training.profile import StepProfiler
from rlctl.runtime.training.run_folder import open_run
from rlctl.runtime.training.stopping import Watchdog, deferred_signals, restored_process
from rlctl.runtime.training.trainer import RunContext, Trainer, TrainerState
from rlctl.runtime.workers.rng import seed_all
from rlctl.tracking.alarms import Alarms
from rlctl.tracking.delivery import TrackerTimeouts
from rlctl.tracking.fanout import Trackers
from rlctl.tracking.jsonl import metric_rows
from rlctl.tracking.tracker import Event

if TYPE_CHECKING:
    from rlctl.runtime.base.roles import Roles
    from rlctl.runtime.cluster.health import OnLost
    from rlctl.runtime.generation.policy_engines import Engines
    from rlctl.runtime.training.listeners import Listeners
    from rlctl.runtime.training.restore import ResumePoint

OnEnd = Callable[[RunDir, Last, float], object]  # run, final state, seconds of wall-clock time

_WATCHDOG_MARGIN_S = 10.0  # a call to workers times out first, and then the run ends in order


@restored_process()
def train(
    plan: Plan,
    start: ResumePoint | None = None,
    end_by: float | None = None,
    on_end: OnEnd | None = None,
) -> RunDir:
    """Run the plan to its end and return the run.

    `end_by`, a time of `time.monotonic`, stops the run (`TimeUp`) before a step that could not be
    saved in time. `on_end` is called once the record is closed, however the run ends.
    """
    config = plan.config
    seed_all(config.trainer.seed)
    with ExitStack() as stack:
        stack.enter_context(relaxed_umask(config.trainer.run_dir_access))
        run, listeners = _open_run(plan, start, on_end, stack)
        trackers = _load_trackers(config, run, stack)
        _start_trackers(trackers, run, plan, start)
        watchdog = _watchdog(config.trainer, run)
        on_phase = partial(_begin_phase, watchdog, trackers)
        on_lost = partial(run.finish, "failed", 1)
        pools = stack.enter_context(open_pools(plan, run.attempt, on_phase, run.event, on_lost))
        reward = stack.enter_context(_reward(plan, run, pools))
        stack.enter_context(watchdog)  # starting and closing the pools has other timeouts
        reward.on_first_error = lambda first: run.event("reward_error", first=first)
        roles, engines = build_roles(
            config, plan.algorithm, plan.tokenizer, pools, reward, on_phase
        )
        generation = _generation(plan, engines, run, trackers, reward)
        roles, stream = stack.enter_context(with_generator(roles, generation))
        collector = Collector.from_config(plan.loader, plan.algorithm, config, reward)
        state = _first_state(start, plan, collector, roles, on_phase)
        _begin_trackers(trackers, plan, pools, stack)
        run.update(state="running", total_steps=plan.num_steps)
        context = RunContext(
            algorithm=plan.algorithm,
            roles=roles,
            collector=collector,
            max_staleness=_max_staleness(plan),
            stream=stream,
            sampling_seed=sampling_seed(config),
            engines_apart=plan.rollout_pool is not None,
            validator=plan.validator,
            tokenizer=plan.tokenizer,
            trackers=trackers,
            run=run,
            num_steps=plan.num_steps,
            num_devices=sum(plan.pool_sizes.values()),
            num_ranks=_num_ranks(plan),
            measure=partial(rollout_metrics, plan.algorithm, config.data.max_response_length),
            on_phase=on_phase,
            profiler=StepProfiler(config.trainer.profile, pools, run, on_phase),
            listeners=listeners,
            end_by=end_by,
            interrupt_workers=pools.interrupt,
            reward=reward,
        )
        Trainer(context, config.trainer, state).run()
        reward.check_run()
    return run


def _first_state(
    start: ResumePoint | None,
    plan: Plan,
    collector: Collector,
    roles: Roles,
    on_phase: Callable[[str], None],
) -> TrainerState:
    """Return the state that training starts from; load the checkpoint of `start`, if any."""
    if start is None:
        return TrainerState()
    from rlctl.runtime.training.restore import restore

    return restore(start, plan.algorithm, collector, roles, on_phase)


def _generation(
    plan: Plan, engines: Engines | None, run: RunDir, trackers: Trackers, reward: RuleReward
) -> Generation | None:
    """Return the configured generation, if the run has engines."""
    if engines is None:
        return None
    return Generation(
        plan.config,
        plan.tokenizer,
        engines,
        plan.first_rank,
        run.attempt,
        trackers.episodes,
        reward,
    )


def _begin_phase(watchdog: Watchdog, trackers: Trackers, name: str) -> None:
    watchdog.begin(name)
    trackers.phase(name)


def _reward(plan: Plan, run: RunDir, pools: Pools) -> AbstractContextManager[RuleReward]:
    sources = plan.data_sources
    return build_reward(plan.config, plan.tokenizer, sources, run.attempt, run.path, pools.judge)


def _num_ranks(plan: Plan) -> int:
    """Return the ranks of the trained role that have different rows."""
    trained = trained_role(plan.config, plan.algorithm.needs)
    return next(iter(plan.pool_sizes.values())) // trained.ranks_per_row(plan.config)


def _max_staleness(plan: Plan) -> int:
    """Return the steps that rollouts may be ahead; 0 for an algorithm that generates none."""
    generates = Needs.GROUPS in plan.algorithm.needs
    return plan.config.async_training.max_staleness if generates else 0


def _open_run(
    plan: Plan, start: ResumePoint | None, on_end: OnEnd | None, stack: ExitStack
) -> tuple[RunDir, Listeners | None]:
    """Open the run's folder; return the run and its listeners, if one is on.

    `stack` records the end of the run, and then reports it to them.
    """
    bundled.write_data(plan.config)
    inputs = input_hashes(plan.config)
    with deferred_signals():  # else a stop here would leave a folder without an end
        run = open_run(plan.recipe, plan.config, start, inputs)
        if run.record.attempts == 1 and not is_command():
            from rlctl.runtime.planning.equivalent_command import equivalent_command

            run.update(command=equivalent_command(plan, start))
        elif run.record.attempts == 1 and plan.inline and "--inline" not in run.record.command:
            run.update(command=[*run.record.command, "--inline"])  # like the run that it continues
        listeners = None
        if plan.config.trainer.listening:
            from rlctl.runtime.training.listeners import Listeners

            listeners = stack.enter_context(Listeners(run, plan.config))
        stack.enter_context(recorded_end(partial(_close, run, time.monotonic(), on_end)))
    stack.enter_context(_oom_event(run, plan))
    if plan.loader.prompts.skipped:
        run.update(skipped_rows=plan.loader.prompts.skipped)
    return run, listeners


@contextmanager
def open_pools(
    plan: Plan,
    logs: Path,
    on_phase: Callable[[str], None],
    event: Event,
    on_lost: OnLost = lambda _: None,
) -> Iterator[Pools]:
    """Start the pools of a run by name, or one pool in this process with `--inline`.

    Their processes log to files in `logs`, and their nodes are the event `placed`. Closes them at
    the end, and Ray if the run started it.
    `on_lost` is called with the error before the process exits because Ray has.
    """
    with ExitStack() as stack:
        if plan.inline:
            pool = InlinePool(plan.first_rank)
            stack.callback(pool.close)
            pools = Pools(dict.fromkeys(plan.pool_sizes, pool), judge=pool)
        else:
            from rlctl.runtime.planning.ray_pools import open_ray_pools

            pools = open_ray_pools(plan, logs, on_phase, event, on_lost, stack)
        event("placed", **pools.nodes())
        yield pools


def _load_trackers(config: schema.Config, run: RunDir, stack: ExitStack) -> Trackers:
    """Return the trackers of a run; `stack` reports its end to them."""
    trainer = config.trainer
    tracking = config.trainer.tracking
    timeouts = TrackerTimeouts(
        tracking.queue_size, tracking.start_s, tracking.call_s, tracking.finish_s
    )
    alarms = Alarms(config.alarm_limits, metric_rows(run.metrics))
    trackers = Trackers.load(trainer.logger, run.event, timeouts, alarms, tracking.params)
    stack.enter_context(
        recorded_end(lambda state, code, error: trackers.finish(state, code, message_of(error)))
    )
    return trackers


def _start_trackers(trackers: Trackers, run: RunDir, plan: Plan, start: ResumePoint | None) -> None:
    """Start the trackers and record the ids that they give the run."""
    resume_step = 0 if start is None else start.resume_step
    container = plan.recipe.container
    shown = plan.recipe.recorded
    info = run_info(run.record, run.path, container, plan.num_steps, resume_step, shown)
    run.update(trackers={**run.record.trackers, **trackers.start(info)})


def _begin_trackers(trackers: Trackers, plan: Plan, pools: Pools, stack: ExitStack) -> None:
    """Begin the tracking of steps; trackers of other programs also get the use of all machines."""
    trackers.begin()
    seconds = plan.config.trainer.tracking.system_s
    if seconds is None or not trackers.threaded:
        return
    from rlctl.runtime.cluster.system import Sampler, sample_machine

    others: dict[str, Callable[[], dict[str, float]]] = {}
    if not plan.inline:
        from rlctl.runtime.cluster.system_probes import other_machines

        nodes = {node.split()[0] for names in pools.nodes().values() for node in names}
        others = stack.enter_context(other_machines(sorted(nodes)))
    sampler = stack.enter_context(Sampler(seconds, [sample_machine, *others.values()]))
    trackers.event("system_nodes", nodes=["controller", *others])
    trackers.system = sampler.read


def _watchdog(trainer: schema.Trainer, run: RunDir) -> Watchdog:
    return Watchdog(
        call_limit(trainer.timeouts.call_s) + _WATCHDOG_MARGIN_S,
        run.attempt / "stacks.txt",
        partial(run.finish, "failed", 1),
    )


def _close(
    run: RunDir,
    started: float,
    on_end: OnEnd | None,
    state: Last,
    code: int,
    error: Exception | None,
) -> None:
    """Record the final state, and report it to `on_end`."""
    run.finish(state, code, error)
    if on_end is not None:
        on_end(run, state, time.monotonic() - started)


@contextmanager
def _oom_event(run: RunDir, plan: Plan) -> Iterator[None]:
    """Record a proposed limit when memory runs out; `--retries` resumes with it.

    The error that is raised then has the figures of the plan.
    """
    try:
        yield
    except DeviceMemoryError as error:
        run.event("out_of_memory", key=error.key, value=error.value, proposed=error.proposed)
        raise error.with_plan(describe(plan.memory, plan.devices, plan.pool_sizes)) from error
