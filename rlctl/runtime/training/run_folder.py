"""Folder of a run: created for a new run, rewound to the checkpoint for a resumed one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from rlctl.data_prep.sources import TRAIN, VALIDATION
from rlctl.recipes import schema
from rlctl.recipes.compose import Recipe
from rlctl.recipes.recorded import environment_tags
from rlctl.recipes.roles import ROLES
from rlctl.runs.folders_elsewhere import place
from rlctl.runs.provenance import data_hashes, installed_versions
from rlctl.runs.record import Last, recorded_end
from rlctl.runs.rewind import rewind
from rlctl.runs.run_dir import RunDir
from rlctl.runtime.checkpoint.store import CheckpointStore
from rlctl.runtime.model.digest import model_hashes
from rlctl.runtime.rewards.code import code_hashes
from rlctl.runtime.training.restore import ResumePoint

Hashes = Mapping[str, Mapping[str, str]]


def open_run(
    recipe: Recipe, config: schema.Config, start: ResumePoint | None, inputs: Hashes
) -> RunDir:
    """Create the folder of a new run, or reopen and rewind that of a resumed one.

    A new folder appears complete or not at all. `config` is the recipe's with the
    quickstart resolved, `inputs` are its `input_hashes`.
    """
    if start is not None and start.run is not None:
        run = RunDir.reopen(start.run, start.force)
        with recorded_end(partial(_finish_failed, run)):
            for part, folder in _folders_elsewhere(config.trainer).items():
                if folder is not None or part != "rollouts":  # else they are not written
                    place(run, part, folder)
            _rewind(run, start)
            _write_config(run, recipe, config, None, inputs)
        return run
    trainer = config.trainer
    with RunDir.creating(
        Path(trainer.run_dir),
        trainer.project_name,
        trainer.experiment_name,
        recipe.name.removesuffix("_trainer"),
        trainer.run_dir_access,
    ) as run:
        for part, folder in _folders_elsewhere(trainer).items():
            place(run, part, folder)
        _write_config(run, recipe, config, start.parent if start is not None else None, inputs)
    return run


def _finish_failed(run: RunDir, state: Last, code: int, error: Exception | None) -> None:
    if error is not None:
        run.finish(state, code, error)


def _folders_elsewhere(trainer: schema.Trainer) -> dict[str, str | None]:
    """Return the folders that replace parts of the run's folder, None for those that stay."""
    return {
        "checkpoints": trainer.default_local_dir,
        "rollouts": trainer.rollout_data_dir,
        "generations": trainer.validation_data_dir,
    }


def _write_config(
    run: RunDir,
    recipe: Recipe,
    config: schema.Config,
    parent: Mapping[str, Any] | None,
    inputs: Hashes,
) -> None:
    """Write the configuration; record seeds, hashes of what it names, and the parent run."""
    run.write_config(
        yaml.safe_dump(recipe.recorded, sort_keys=False, allow_unicode=True), recipe.origins
    )
    run.update(
        seeds={"trainer": config.trainer.seed, "data": config.data.seed},
        environment=environment_tags(recipe.container, recipe.recorded, run.record.id),
        parent=parent or run.record.parent,
        **inputs,
    )


def input_hashes(config: schema.Config) -> Hashes:
    """Return the hashes of the files that a run reads, by field of its record."""
    data = config.data
    return {
        "data": data_hashes(data.train_paths, TRAIN)
        | data_hashes(data.val_files or (), VALIDATION),
        "reward_code": code_hashes(config.reward),
        "models": model_hashes(role.model(config) for role in ROLES),
    }


def _rewind(run: RunDir, start: ResumePoint) -> None:
    """Remove what the run recorded after the step that it resumes from.

    The checkpoints go first: one that stayed after an interruption would lack rows before it.
    """
    later = CheckpointStore(run.path / "checkpoints").set_aside_after(
        start.step, f"before_attempt_{run.record.attempts}"
    )
    rewound = rewind(run, start.step if start.checkpoint is not None else None)
    run.update(versions=installed_versions())
    run.event(
        "resume",
        step=start.step,
        changes=list(start.changes),
        taken_back=rewound.num_removed,
        lost=list(rewound.lost),
        checkpoints_set_aside=later,
    )
