"""State that a run starts from: where it resumes, and the state of the checkpoint it restores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.runtime.algorithms.base import Algorithm
from rlctl.runtime.base.batch import Rollouts, Scored
from rlctl.runtime.base.roles import Roles
from rlctl.runtime.data.row_table import Rows
from rlctl.runtime.training.checkpoint_store import GROUPS, ROLLOUTS, ControllerState
from rlctl.runtime.training.collector import Collector
from rlctl.runtime.training.rollout_source import Collected, StreamState
from rlctl.runtime.training.trainer import TrainerState
from rlctl.runtime.workers.rng import set_rng_state


@dataclass(frozen=True)
class ResumePoint:
    """Run and checkpoint that training starts from.

    `run` is the folder of the resumed run; None for a new run that starts from the state of another
    one. `checkpoint` is None where the resumed run has none: it starts from the beginning.
    """

    run: Path | None
    checkpoint: Path | None
    step: int
    changes: Sequence[str] = ()  # config changes since the run started, for its record
    parent: Mapping[str, Any] | None = None  # of a new run: the run and step that it starts from
    pending: bool = False  # the step is still to be validated and reported
    with_optimizer: bool = True  # load the state of the optimizers
    force: bool = False  # resume although the driver of `run`, on another machine, may be alive

    @property
    def resume_step(self) -> int:
        """Last step that the run has already reported to its trackers; 0 for a new run."""
        return 0 if self.run is None or self.checkpoint is None else self.step - self.pending


def restore(
    start: ResumePoint,
    algorithm: Algorithm,
    collector: Collector,
    roles: Roles,
    on_phase: Callable[[str], None],
) -> TrainerState:
    """Load the checkpoint of `start` into roles, algorithm, collector and random generators.

    Roles missing from the checkpoint start from scratch, except the actor, which every checkpoint
    has.
    """
    if start.checkpoint is None:
        return TrainerState()
    on_phase(f"loading the checkpoint of step {start.step}")
    state = ControllerState.read(start.checkpoint)
    for role, member in roles.learning().items():
        folder = start.checkpoint / role.name
        if role.needed_for is None or folder.is_dir():
            member.load(folder.absolute(), start.with_optimizer)
    algorithm.load_state_dict(state.algorithm)
    collector.load_state_dict(state.loader, state.step)
    if state.reward:
        roles.reward.load_state_dict(state.reward)
    set_rng_state(state.rng)
    ahead, stream = _ahead(start.checkpoint, state, collector.loader.prompts.rows)
    return TrainerState(
        state.step,
        state.skipped_in_a_row,
        ahead,
        stream,
        new_run=start.run is None,
        pending=None if start.run is None else state.pending_metrics,
    )


def _ahead(
    checkpoint: Path, state: ControllerState, rows: Rows
) -> tuple[Collected | None, StreamState | None]:
    """Return the rollouts of later steps, if the checkpoint has some."""
    if state.stream is None and state.ahead is None:
        return None, None
    from rlctl.runtime.training.stored_rollouts import read_rollouts

    ahead: Collected | None = None
    stream: StreamState | None = None
    if state.stream is not None:
        groups: Rollouts | None = None
        if state.stream["finished"]:
            groups = read_rollouts(checkpoint / GROUPS, rows, Rollouts)
        stream = StreamState.from_dict(state.stream, groups)
    if state.ahead is not None:
        rollouts = read_rollouts(checkpoint / ROLLOUTS, rows, Scored)
        ahead = Collected(state.step + 1, scored=rollouts, **state.ahead)
    return ahead, stream
