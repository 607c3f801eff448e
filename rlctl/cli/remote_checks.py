"""Checks of a job before it is sent: what the folder of its run decides, if it is on this machine.

A run whose root is not here is checked on the cluster alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlctl.errors import ConfigError
from rlctl.recipes.layers import Recipe
from rlctl.runs.run import Run, read_run
from rlctl.text import plural


def check_resume(
    selector: str,
    overrides: Sequence[str],
    from_step: int | None,
    fork: str | None,
    root: Path,
) -> None:
    """Raise the errors of `rlctl resume` that need neither data nor model.

    They are a missing run or checkpoint, a process that drives it here, a name that is taken, and a
    run without a step left.
    """
    from rlctl.api import find_run_or_sweep
    from rlctl.runtime.planning.early_resume import compose_resumed
    from rlctl.storage import is_url

    if is_url(selector) or not root.is_dir():
        return
    found = find_run_or_sweep(selector, root)
    if isinstance(found, Run):
        _check(found, compose_resumed(found.path, overrides, fork), from_step, fork)


def check_start(recipe: Recipe, name: str) -> None:
    """Raise the errors of `rlctl train` that come from a run of this name."""
    from rlctl.runs.naming import check_free

    trainer = recipe.config.trainer
    root = Path(trainer.run_dir)
    folder = root / trainer.project_name / name
    if not root.is_dir() or not folder.exists():
        return
    if trainer.resume_mode in ("disable", "resume_path"):
        check_free(root, trainer.project_name, name)
    else:
        _check(read_run(folder), recipe, None, None)


def _check(run: Run, recipe: Recipe, from_step: int | None, fork: str | None) -> None:
    from rlctl.runs.idle import check_idle
    from rlctl.runs.naming import check_free
    from rlctl.runtime.resume import CheckpointRef

    record = run.readable_record()
    if fork is not None:
        check_free(run.path.parent.parent, run.project, fork)
    elif record.process.alive(run.path):  # of another host nothing is known here
        check_idle(run.path, record, force=False)
    step = CheckpointRef.find(run.path, record, from_step).step
    steps = recipe.config.trainer.total_training_steps
    is_done = step > 0 and fork is None and from_step is None and record.state == "finished"
    if steps is not None and not recipe.config.trainer.val_only and steps < step + is_done:
        raise ConfigError(
            f"no step is left: the checkpoint is that of step {step}, and the run ends after "
            f"{plural(steps, 'step')}",
            where="trainer.total_training_steps",
            hint=f"it counts from the first step: give more than {step}",
        )
