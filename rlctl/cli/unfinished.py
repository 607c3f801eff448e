"""Point from which an unfinished run is resumed, and the command for it."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from rlctl.cli.stderr import notice
from rlctl.errors import RlctlError
from rlctl.runs.run_dir import RunDir
from rlctl.runs.settings import read_settings
from rlctl.text import plural
from rlctl.tracking.run_summary import Row
from rlctl.tracking.summary import read_summary

if TYPE_CHECKING:
    from rlctl.runtime.training.checkpoint_store import CheckpointStore, ControllerState

_LOAD = "trainer.checkpoint.load_contents"


def resume_commands(run: RunDir, name: str) -> list[str]:
    """Print from which point a run is resumed, and return the command for it, if there is one."""
    last = _last_step(run)
    parent = run.record.parent
    command = f"rlctl resume {name}"
    if steps := _store(run).steps():
        is_pending = _pending(run) is not None
        resumed = f"{'with the validation of' if is_pending else 'after'} step {steps[-1]}"
        if _lacks(run, "model"):
            notice(f"no command resumes the run: step {steps[-1]} is saved without model")
            return []
        loaded = read_settings(run.path).get(_LOAD, ["optimizer"])
        if "optimizer" in loaded and _lacks(run, "optimizer"):
            command += f" {_LOAD}=[model,extra]"
    elif not last:
        return [command]
    elif parent:
        resumed = f"after step {parent['step']} of the run that it was forked from"
    else:
        resumed = f"from the beginning: none of the {plural(last, 'step')} is saved"
    notice(f"`{command}` continues {resumed}")
    return [command]


def unreported_rows(run: RunDir) -> list[Row]:
    """Return the metrics of a saved step whose validation was interrupted, if there is one."""
    state = _pending(run)
    if state is None or state.step <= _last_step(run):
        return []
    return [{"step": state.step, **(state.pending_metrics or {})}]


def _last_step(run: RunDir) -> int:
    figures = read_summary(run.path, writes=False).figures
    return (figures and figures.step) or 0


def _pending(run: RunDir) -> ControllerState | None:
    """Return the state of the newest checkpoint if its step is still to be validated."""
    from rlctl.runtime.training.checkpoint_store import ControllerState

    store = _store(run)
    with suppress(RlctlError):
        if steps := store.steps():
            state = ControllerState.read(store.path(steps[-1]))
            return state if state.pending else None
    return None


def _lacks(run: RunDir, part: str) -> bool:
    """Return True if the newest checkpoint was saved without `part`."""
    from rlctl.runtime.training.complete_checkpoints import saved_parts

    store = _store(run)
    with suppress(RlctlError):
        return part not in saved_parts(store.path(store.steps()[-1]))
    return False


def _store(run: RunDir) -> CheckpointStore:
    from rlctl.runtime.training.checkpoint_store import CheckpointStore

    return CheckpointStore(run.path / "checkpoints")
