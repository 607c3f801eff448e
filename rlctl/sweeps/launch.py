"""Starts a sweep, or goes on with one: checks first, then the sweep's folder, then one Ray cluster for all of its runs."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlctl.errors import ConflictError, Problem, ResourceError, RlctlError, raise_problems
from rlctl.recipes import schema
from rlctl.recipes.axes import Axis, axes_of, split_axes
from rlctl.recipes.compose import Recipe, compose
from rlctl.recipes.sources import level_of
from rlctl.runs.process import DriverProcess
from rlctl.runs.record import ending, now
from rlctl.runs.run_dir import check_free, fresh_name
from rlctl.runtime.build import load_algorithm
from rlctl.runtime.planning.plan import make_plan, pool_sizes
from rlctl.runtime.planning.preflight import Devices
from rlctl.runtime.rank_info import available_cores, process_resources
from rlctl.sweeps.child import Child
from rlctl.sweeps.record import SweepDir, SweepRecord
from rlctl.sweeps.scheduler import Scheduler, raise_if_none_finished
from rlctl.sweeps.study import Study, Trial, check_axes, num_trials, points

# How long a run looks for a cluster that is gone. One that this process started does not come back, and Ray would look for a minute.
_RECONNECT_S = "RAY_gcs_rpc_server_reconnect_timeout_s"

View = Callable[[Study, list[Child]], None]


@dataclass(frozen=True)
class SweepPlan:
    """A sweep that has passed every check and has touched nothing yet. `recipe` is composed with the first value of every axis."""

    verb: str
    source: str
    fixed: Sequence[str]
    axes: Sequence[Axis]
    recipe: Recipe
    total_steps: int
    needs: Sequence[
        tuple[Sequence[str], Mapping[str, float]]
    ]  # of each trial of a grid, or of the values of each axis: overrides, what a run takes

    @property
    def settings(self) -> schema.Sweep:
        return self.recipe.config.sweep

    @property
    def num_runs(self) -> int:
        return num_trials(self.axes, self.settings) * self.settings.seeds


def make_sweep_plan(verb: str, source: str, overrides: Sequence[str]) -> SweepPlan:
    """Everything that can be judged before a process is started: the axes, every value of them, the data and the model of the first trial.

    Raises what is wrong, all at once.
    """
    fixed, axes = split_axes(overrides, source)
    base = compose(source, fixed)
    named = {axis.key for axis in axes}
    axes = [
        axis for axis in axes_of(base.config.sweep.params, source) if axis.key not in named
    ] + axes
    settings = base.config.sweep
    check_axes(axes, settings)
    first = {axis.key: _first(axis) for axis in axes}
    recipe = compose(source, [*fixed, *_overrides(first)])
    plan = make_plan(recipe, inline=False)
    trainer = recipe.config.trainer
    check_free(Path(trainer.run_dir), trainer.project_name, trainer.experiment_name)
    if trainer.test_freq < 1 and not trainer.val_only:
        raise_problems(
            [
                Problem(
                    "the trials would never be validated, so nothing could be judged",
                    "trainer.test_freq",
                    "trainer.test_freq=N",
                )
            ]
        )
    return SweepPlan(
        verb,
        source,
        fixed,
        axes,
        recipe,
        plan.num_steps,
        _needs(source, fixed, axes, settings, first),
    )


def start(plan: SweepPlan, view: View, say: Callable[[str], None]) -> SweepDir:
    """Run a sweep to its end. Raises what stops it; its record says how it ended in any case."""
    trainer = plan.recipe.config.trainer
    fixed = [
        text for text in plan.fixed if not text.lstrip("+").startswith("trainer.experiment_name=")
    ]
    record = SweepRecord(
        name=trainer.experiment_name
        or fresh_name(f"{plan.recipe.name.removesuffix('_trainer')}-sweep"),
        project=trainer.project_name,
        verb=plan.verb,
        recipe=plan.source,
        base=next(
            path.stem
            for path, package in reversed(plan.recipe.layers)
            if not package and level_of(path) == 1
        ),
        fixed=fixed,
        axes=[axis.text for axis in plan.axes],
        settings=plan.settings.model_dump(),
        config_sha256=_digest(compose(plan.source, fixed)),
        total_steps=plan.total_steps,
        first_seed=trainer.seed,
        command=["rlctl", *sys.argv[1:]],
        cwd=str(Path.cwd()),
        created=now(),
        process=DriverProcess.current(),
    )
    sweep = SweepDir.create(Path(trainer.run_dir), record)
    return _run(sweep, plan.recipe.config, plan.axes, view, say)


def resume(sweep: SweepDir, view: View, say: Callable[[str], None]) -> SweepDir:
    """Go on with a sweep: ended trials stay, the others' runs resume from their checkpoints.

    Raises ConflictError when it runs still, or when its recipe has changed since.
    """
    record = sweep.record
    if sweep.state == "running":
        raise ConflictError(
            f"the sweep {record.name} is running",
            hint=f"process {record.process.pid} on {record.process.host}",
        )
    recipe = compose(record.recipe, record.fixed)
    if _digest(recipe) != record.config_sha256:
        hint = "undo the change, or start a new sweep: trials of two recipes cannot be compared"
        raise ConflictError(
            f"the recipe {record.recipe} has changed since the sweep began",
            where=str(recipe.path),
            hint=hint,
        )
    _, axes = split_axes(record.axes, record.recipe)
    sweep.update(state="running", process=DriverProcess.current(), exit_code=None, ended=None)
    return _run(sweep, recipe.config, axes, view, say)


def _run(
    sweep: SweepDir,
    config: schema.Config,
    axes: Sequence[Axis],
    view: View,
    say: Callable[[str], None],
) -> SweepDir:
    from rlctl.runtime.cluster.session import ray_session

    settings = schema.Sweep.model_validate(sweep.record.settings)
    study = Study(sweep.storage, axes, settings, sweep.record.total_steps)
    processes = _processes(config)
    cpus = config.ray_kwargs.ray_init.num_cpus or max(available_cores(), processes)
    if config.ray_kwargs.ray_init.address is None and "RAY_ADDRESS" not in os.environ:
        os.environ.setdefault(_RECONNECT_S, "10")
    with (
        ending(sweep.finish),
        ray_session(config.ray_kwargs.ray_init, cpus, 1, config.trainer.timeouts.ray_start_s, None),
    ):
        cluster = RayCluster(sweep.record, config)
        say(cluster.split(settings))
        scheduler = Scheduler(
            sweep, settings, study, cluster, lambda children: view(study, children), say
        )
        try:
            scheduler.run()
        except BaseException:
            say("stopping all runs")
            scheduler.stop()
            raise
        raise_if_none_finished(study)
    return sweep


class RayCluster:
    """Implements `Cluster` on the Ray session of this process."""

    def __init__(self, record: SweepRecord, config: schema.Config) -> None:
        from rlctl.runtime.cluster import resources

        self.resources = resources
        self.record = record
        self.config = config
        self.threads: int | None = None

    def split(self, settings: schema.Sweep) -> str:
        """How many runs there is room for, and the CPU threads that each process gets: the cores shared out among them."""
        first = need_of(self.config)
        total = self.resources.total()
        room = max(
            1, min(int(total[name] / amount + 1e-6) for name, amount in first.items() if amount)
        )
        parallel = min(room, settings.parallel or room, settings.seeds * (settings.trials or room))
        processes = parallel * _processes(self.config)
        self.threads = self.config.trainer.num_threads or max(1, available_cores() // processes)
        return (
            f"cluster: {self.resources.format_resources(total)}; a run takes {self.resources.format_resources(first)}: {parallel} at once, "
            f"{self.threads} CPU thread{'s' if self.threads > 1 else ''} a process"
        )

    def need(self, trial: Trial) -> Mapping[str, float]:
        need = need_of(compose(self.record.recipe, [*self.record.fixed, *trial.overrides]).config)
        total = self.resources.total()
        if self.resources.exceeds(need, total):
            raise ResourceError(
                f"trial {trial.number} needs {self.resources.format_resources(need)}; the whole cluster has {self.resources.format_resources(total)}",
                where=" ".join(trial.overrides),
                hint="a larger cluster, fewer trainer.n_gpus_per_node, or a smaller trainer.placement.device_fraction",
            )
        return need

    def lacks(self, need: Mapping[str, float], pending: list[Mapping[str, float]]) -> str | None:
        free = self.resources.free()
        left = {
            name: amount - sum(each.get(name, 0.0) for each in pending)
            for name, amount in free.items()
        }
        return (
            f"needs {self.resources.format_resources(need)}, free {self.resources.format_resources(left)}"
            if self.resources.exceeds(need, left)
            else None
        )

    def overrides(self) -> list[str]:
        return [
            f"ray_kwargs.ray_init.address={self.resources.address()}",
            f"trainer.num_threads={self.threads}",
        ]


def need_of(config: schema.Config) -> dict[str, float]:
    """What one run takes of a cluster: a share of a device for each process, in CPUs or in GPUs with a CPU each."""
    share = process_resources(
        Devices.of(config.trainer).kind, config.trainer.placement.device_fraction
    )
    return {name: _processes(config) * amount for name, amount in share.items()}


def _processes(config: schema.Config) -> int:
    return sum(
        pool_sizes(
            config.trainer.placement, Devices.of(config.trainer), load_algorithm(config, 1).needs
        ).values()
    )


def _needs(
    source: str,
    fixed: Sequence[str],
    axes: Sequence[Axis],
    settings: schema.Sweep,
    first: Mapping[str, str],
) -> list[tuple[Sequence[str], Mapping[str, float]]]:
    """What runs take, by composing each point of a small grid, or else each value of each axis with the first of the others."""
    grid = points(axes, settings)
    if grid is None or len(grid) > 32:
        grid = [
            {**first, axis.key: value} for axis in axes for value in (axis.values or _ends(axis))
        ]
    tried = [list(each) for each in dict.fromkeys(tuple(_overrides(point)) for point in grid)]
    found: list[tuple[Sequence[str], Mapping[str, float]]] = []
    problems: list[Problem] = []
    for overrides in tried:
        try:
            found.append((overrides, need_of(compose(source, [*fixed, *overrides]).config)))
        except RlctlError as error:
            problems += [
                Problem(
                    each.message,
                    f"trial {shlex.join(overrides)}: {each.where or ''}".rstrip(": "),
                    each.hint,
                )
                for each in error.problems
            ]
    raise_problems(problems)
    return found


def _overrides(point: Mapping[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in point.items()]


def _first(axis: Axis) -> str:
    return axis.values[0] if axis.values else _ends(axis)[0]


def _ends(axis: Axis) -> tuple[str, str]:
    assert axis.interval is not None, "an axis has values or an interval"
    return str(axis.interval.low), str(axis.interval.high)


def _digest(recipe: Recipe) -> str:
    """Of everything that a trial shares with the others; how they are scheduled may change."""
    container = {
        name: section
        for name, section in recipe.container.items()
        if name not in ("sweep", "ray_kwargs")
    }
    return hashlib.sha256(json.dumps(container, sort_keys=True, default=str).encode()).hexdigest()
