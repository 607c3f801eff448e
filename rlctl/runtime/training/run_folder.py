"""Folder of a run: created, or rewound."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Mapping
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rlctl import plugins
from rlctl.code_places import plugin_packages
from rlctl.files import write_text
from rlctl.recipes import schema
from rlctl.recipes.compose import Recipe
from rlctl.recipes.recorded import environment_tags
from rlctl.runs.ownership import Place, is_copy
from rlctl.runs.provenance import installed_versions
from rlctl.runs.record import Last, recorded_end
from rlctl.runs.run_dir import RunDir
from rlctl.runtime.training.checkpoint_store import ROWS, CheckpointStore
from rlctl.runtime.training.input_hashes import Hashes

if TYPE_CHECKING:
    from rlctl.runtime.training.restore import ResumePoint

LOG = logging.getLogger(__name__)


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
            _name_copy(run)
            _place_parts(run, config.trainer)
            _rewind(run, start, config.trainer.val_before_train)
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
        _place_parts(run, trainer)
        parent = None if start is None else start.parent
        _write_config(run, recipe, config, parent, inputs)
        _keep_evidence(run, recipe)
    return run


def _keep_evidence(run: RunDir, recipe: Recipe) -> None:
    """Record the packages; if the run uses code of the user, let plug-ins copy it."""
    write_text(run.path / "env.txt", installed_packages())
    has_changes = run.record.git is not None and run.record.git["diff_sha256"] is not None
    has_agents = recipe.config.actor_rollout_ref.rollout.multi_turn.enable
    if has_changes or has_agents or run.record.reward_code or plugin_packages:
        for name in plugins.names("evidence"):
            plugins.load("evidence", name)(run.path, recipe.recorded)


def installed_packages() -> str:
    """Return Python and all installed packages with their versions, as a file for pip."""
    found = {f"{package.name}=={package.version}\n" for package in distributions()}
    return f"# Python {platform.python_version()}\n" + "".join(sorted(found, key=str.lower))


def _name_copy(run: RunDir) -> None:
    """Give the copy of a run that is still elsewhere its name and an id, also for trackers."""
    if not is_copy(Place.of(run.record.id, run.path)):
        return
    LOG.info("%s is a copy: trackers get it as a separate run", run.path.name)
    path = run.path.resolve()
    run.update(id=os.urandom(4).hex(), name=path.name, project=path.parent.name, trackers={})


def _finish_failed(run: RunDir, state: Last, code: int, error: Exception | None) -> None:
    if error is not None:
        run.finish(state, code, error)


def _place_parts(run: RunDir, trainer: schema.Trainer) -> None:
    """Move the parts of the run's folder where the configuration wants them."""
    folders = {
        "checkpoints": trainer.default_local_dir,
        "rollouts": trainer.rollout_data_dir,
        "generations": trainer.validation_data_dir,
    }
    for part, folder in folders.items():
        if folder is None and not (run.path / part).is_symlink():
            continue
        from rlctl.runs.folders_elsewhere import is_foreign, place

        unused = folder is None and part == "rollouts"  # none is written
        if not unused or is_foreign(run.path, run.record, part):
            place(run, part, folder)


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


def _rewind(run: RunDir, start: ResumePoint, validated_first: bool) -> None:
    """Remove what the run recorded after the step that it resumes from.

    The checkpoints go first: one that stayed after an interruption would lack rows before it.
    """
    from rlctl.runs.rewind import Reported, rewind

    later = CheckpointStore(run.path / "checkpoints").set_aside_after(
        start.step, f"before_attempt_{run.record.attempts}"
    )
    if start.checkpoint is None:
        rewound = rewind(run, None)
    else:
        parent = run.record.parent
        spare = start.checkpoint / ROWS
        first = int(not validated_first) if parent is None else parent["step"] + 1
        rows = spare.read_bytes() if spare.is_file() else b""
        rewound = rewind(run, start.step, Reported(first, start.resume_step, rows))
    run.update(versions=installed_versions())
    run.event(
        "resume",
        step=start.step,
        changes=list(start.changes),
        taken_back=rewound.num_removed,
        lost=list(rewound.lost),
        checkpoints_set_aside=later,
    )
