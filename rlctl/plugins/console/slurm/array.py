"""Arrays of SLURM: a job per run of a sweep whose trials do not depend on earlier results.

Their tasks only run the runs. The job after them resumes the sweep: it alone writes the study.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence

from rlctl.plugins.console.queue.orders import Search
from rlctl.plugins.console.slurm.job import ON_SLURM
from rlctl.plugins.console.slurm.sbatch import Job, run, send, write_order
from rlctl.process import DriverProcess
from rlctl.recipes import schema
from rlctl.recipes.axes import axes_of, check_fixed, check_repeated, split_axes, with_first_values
from rlctl.recipes.compose import compose
from rlctl.sweeps.child import Child
from rlctl.sweeps.study import Study, check_axes
from rlctl.sweeps.sweep_launch import create
from rlctl.sweeps.sweep_plan import SweepPlan
from rlctl.sweeps.sweep_record import SweepDir, TrialTable


def why_one_job(settings: schema.Sweep) -> str | None:
    """Return why the trials of a sweep are not known before it runs; None if they are."""
    if settings.sampler not in ("grid", "random"):
        return f"the sampler {settings.sampler} needs the results of earlier trials"
    if settings.pruner != "none":
        return f"the pruner {settings.pruner} compares trials while they run"
    return None


def submit_array(job: Job, search: Search, options: Mapping[str, str]) -> None:
    """Create the sweep, submit the array of its runs, and the job that resumes it after them."""
    plan = _plan(search)
    sweep = create(plan)
    sweep.update(process=DriverProcess(0, 0.0, ON_SLURM, ""))
    ids: list[str] = []
    try:
        tasks = [_task(sweep, child) for child in _children(sweep, plan)]
        resume = ["resume", str(job.run)]
        order = {"words": resume, "again": resume, "run": str(job.run), "is_last": True}
        write_order(job, {**order, "tasks": tasks})
        array = {"array": f"0-{len(tasks) - 1}", "output": f"{job.folder}/slurm-%a.out"}
        if plan.settings.parallel:
            array["array"] += f"%{plan.settings.parallel}"
        ids.append(send(job, "tasks.sh", {**options, **array}, '"$SLURM_ARRAY_TASK_ID"'))
        after = {"dependency": f"afterany:{ids[0]}"}
        ids.insert(0, send(job, "job.sh", {**options, **after}))
    except BaseException:
        if ids:
            run("scancel", *ids)
        shutil.rmtree(sweep.path)
        raise
    (job.folder / "id").write_text(" ".join(ids), encoding="utf-8")


def _plan(search: Search) -> SweepPlan:
    """Plan a sweep, whose runs check devices, data and model themselves."""
    verb, source, overrides = search
    check_repeated(overrides)
    fixed, axes = split_axes(overrides, source)
    given = {axis.key for axis in axes}
    params = compose(source, with_first_values(fixed, axes)).config.sweep.params
    of_recipe = [axis for axis in axes_of(params, source) if axis.key not in given]
    check_fixed(fixed, of_recipe)
    axes = of_recipe + axes
    recipe = compose(source, with_first_values(fixed, axes))
    check_axes(axes, recipe.config.sweep)
    return SweepPlan(verb, source, fixed, axes, recipe, total_steps=0, needs=())


def _children(sweep: SweepDir, plan: SweepPlan) -> list[Child]:
    """Draw all trials, and return their runs."""
    study = Study(sweep.storage, plan.axes, plan.settings, plan.total_steps)
    trials = [trial for _ in range(study.num_trials) if (trial := study.ask())]
    sweep.write_table(TrialTable(study.outcomes(), {}))
    first = sweep.record.first_seed
    count = plan.settings.seeds
    return [
        Child(trial, seed, name, sweep.run_folder(name).absolute(), {})
        for trial in trials
        for seed in range(first, first + count)
        for name in [sweep.run_name(trial.number, seed)]
    ]


def _task(sweep: SweepDir, child: Child) -> Mapping[str, str | Sequence[str]]:
    return {
        "words": child.first_words(sweep.record),
        "again": ["resume", str(child.folder)],
        "run": str(child.folder),
        "log": str(sweep.log(child.name).absolute()),
        "sweep": sweep.record.name,
    }
