"""Checks of a resumed run that need neither torch nor transformers: see `early`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlctl.recipes.compose import Recipe
from rlctl.recipes.recorded_config import changes
from rlctl.runs import folders_elsewhere
from rlctl.runs.idle import check_idle
from rlctl.runs.record import RunRecord
from rlctl.runs.run_dir import RECORD_FILE
from rlctl.runs.trust import recompose_run
from rlctl.runtime.planning.early_checks import check_early
from rlctl.runtime.training.checkpoint_store import CheckpointStore
from rlctl.runtime.training.complete_checkpoints import checkpoint_of
from rlctl.runtime.training.drift import refuse_drift
from rlctl.suggest import hydra_text


def compose_resumed(run: Path, overrides: Sequence[str], fork: str | None) -> Recipe:
    """Compose the configuration of a run with overrides, and with the name of a fork.

    Raises ConfigError for another's run that names code; see `runs.trust`.
    """
    if fork:
        naming = [hydra_text("trainer.experiment_name", fork), "trainer.resume_mode=disable"]
        overrides = [*overrides, *naming]
    return recompose_run(run, overrides)


def check_resume(
    run: Path,
    recipe: Recipe,
    from_step: int | None = None,
    fork: str | None = None,
    force: bool = False,
) -> None:
    """Raise the problems of a resumed run, or of its fork, that files and configuration show.

    Finishes an interrupted change of the checkpoints' folder. Raises ConflictError if another
    process drives the run.
    """
    if not fork:
        check_idle(run, RunRecord.read(run / RECORD_FILE), force)
        folders_elsewhere.complete(run)
    store = CheckpointStore(run / "checkpoints")
    if from_step is not None and not store.path(from_step).is_dir():
        checkpoint_of(store, from_step)  # raises
    check_early(recipe, has_name=not fork)
    if not fork:
        refuse_drift(run, changes(run, recipe.recorded), [], force)
