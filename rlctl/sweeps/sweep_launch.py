"""Start and resume of a sweep: its folder, its study, and one Ray cluster for all of its runs."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rlctl.cores import available_cores
from rlctl.errors import ConflictError
from rlctl.owner import is_command
from rlctl.process import DriverProcess, lock_folder
from rlctl.recipes import schema
from rlctl.recipes.axes import Axis, split_axes, with_first_values
from rlctl.recipes.compose import compose
from rlctl.recipes.search_path import level_of
from rlctl.runs.naming import fresh_name
from rlctl.runs.record import now, recorded_end
from rlctl.runtime.cluster.address import address_of
from rlctl.runtime.planning.run_resources import num_processes
from rlctl.suggest import overridden_keys
from rlctl.sweeps.child import Child
from rlctl.sweeps.cluster import RayCluster
from rlctl.sweeps.scheduler import Scheduler, raise_if_none_finished
from rlctl.sweeps.study import Study
from rlctl.sweeps.sweep_plan import SweepPlan, config_digest
from rlctl.sweeps.sweep_record import SweepDir, SweepRecord

# Seconds that a run searches for a lost cluster. This process started it, so it does not come back,
# and Ray's default is a minute.
_RECONNECT_S = "RAY_gcs_rpc_server_reconnect_timeout_s"

View = Callable[[Study, list[Child]], None]

log = logging.getLogger(__name__)


def start(plan: SweepPlan, view: View) -> SweepDir:
    """Create the sweep's folder and run all trials; errors propagate, `sweep.json` has the state.

    `view` is called with the study and all runs after each change.
    """
    return _run(create(plan), plan.recipe.config, plan.axes, view)


def create(plan: SweepPlan) -> SweepDir:
    """Create the sweep's folder with its record."""
    trainer = plan.recipe.config.trainer
    fixed = [text for text in plan.fixed if overridden_keys([text]) != {"trainer.experiment_name"}]
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
        config_sha256=config_digest(compose(plan.source, with_first_values(fixed, plan.axes))),
        total_steps=plan.total_steps,
        first_seed=trainer.seed,
        first_data_seed=_first_data_seed(plan),
        command=_command(plan),
        cwd=str(Path.cwd()),
        created=now(),
        process=DriverProcess.current(),
    )
    return SweepDir.create(Path(trainer.run_dir), record, trainer.run_dir_access)


def _command(plan: SweepPlan) -> list[str]:
    """Return the command line, or the equivalent one for a call of the Python API."""
    if is_command():
        return ["rlctl", *sys.argv[1:]]
    axes = [axis.text for axis in plan.axes]
    return ["rlctl", "sweep", plan.verb, "--recipe", plan.source, *plan.fixed, *axes]


def _first_data_seed(plan: SweepPlan) -> int | None:
    """Return the first seed of the data order, None if runs of a trial do not differ in it.

    An override of `data.seed` keeps the order.
    """
    data = plan.recipe.config.data
    differs = plan.settings.seeds > 1 and data.shuffle
    if not differs or "data.seed" in overridden_keys(plan.fixed):
        return None
    return data.seed


def resume(sweep: SweepDir, view: View) -> SweepDir:
    """Resume a sweep: keep completed trials, and resume the runs of the others from checkpoints.

    Raises ConflictError if the sweep is running or its recipe has changed, and ConfigError for the
    sweep of another user without trust in its folder.
    """
    from rlctl.runs.ownership import register
    from rlctl.sweeps.received import require_trust

    record = sweep.record
    if sweep.state == "running":
        raise ConflictError(
            f"the sweep {record.name} is running",
            hint=f"process {record.process.pid} on {record.process.host}",
        )
    require_trust(sweep)
    _, axes = split_axes(record.axes, record.recipe)
    recipe = compose(record.recipe, with_first_values(record.fixed, axes))
    if config_digest(recipe) != record.config_sha256:
        raise ConflictError(
            f"the recipe {record.recipe} has changed since the sweep started",
            where=str(recipe.path),
            hint="undo the change, or start a new sweep: trials of two recipes are not comparable",
        )
    register(sweep.place, sweep.digest, record.cwd)
    sweep.update(state="running", process=DriverProcess.current(), exit_code=None, ended=None)
    return _run(sweep, recipe.config, axes, view)


def _run(sweep: SweepDir, config: schema.Config, axes: Sequence[Axis], view: View) -> SweepDir:
    from rlctl.runtime.cluster.session import ray_session
    from rlctl.sweeps.trackers import announce

    settings = schema.Sweep.model_validate(sweep.record.settings)
    study = Study(sweep.storage, axes, settings, sweep.record.total_steps)
    cpus = config.ray_kwargs.ray_init.num_cpus or max(available_cores(), num_processes(config))
    if address_of(config.ray_kwargs.ray_init) is None:
        os.environ.setdefault(_RECONNECT_S, "10")
    lock = lock_folder(sweep.path)
    if lock is None:
        raise ConflictError(f"another process is resuming the sweep {sweep.record.name}")
    with (
        lock,
        recorded_end(lambda state, code, _: sweep.finish(state, code)),
        ray_session(config.ray_kwargs.ray_init, cpus, 1, config.trainer.timeouts.ray_start_s),
    ):
        announce(config)
        cluster = RayCluster(sweep.record, config)
        log.info("%s", cluster.split_cores(settings))
        scheduler = Scheduler(
            sweep, settings, study, cluster, on_change=lambda children: view(study, children)
        )
        try:
            scheduler.run()
        except BaseException:
            log.info("stopping all runs")
            scheduler.stop()
            log.info("`rlctl resume %s` continues its unfinished trials", sweep.record.name)
            raise
        raise_if_none_finished(study)
    return sweep
