"""Disk space that the checkpoints of a run need."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlctl.files import free_space
from rlctl.recipes.role_table import ACTOR, REWARD_LEARNER
from rlctl.runtime.base.ops import ceil_div
from rlctl.runtime.planning.role_memory import PlannedRole
from rlctl.text import size

if TYPE_CHECKING:
    from rlctl.runtime.planning.plan import Plan

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Disk:
    """Disk space of checkpoints, in bytes.

    A checkpoint holds the exported policy, and weights and two moments of each learning role.
    """

    checkpoint: int | None  # None: the size of a model is unknown
    num_checkpoints: int  # the most that are kept at a time
    free: int


def disk_of(plan: Plan) -> Disk:
    """Return the number and the size of the checkpoints that are on the disk at once."""
    trainer = plan.config.trainer
    root = Path(trainer.default_local_dir or trainer.run_dir).expanduser().absolute()
    learning = [planned for planned in plan.memory.roles if planned.role.learns]
    sizes = [_checkpoint_bytes(planned) for planned in learning]
    known = [size for size in sizes if size is not None]
    checkpoint = sum(known) if len(known) == len(sizes) else None
    count = int(trainer.saves)  # by the clock: at least one
    if trainer.save_freq > 0:
        count = ceil_div(plan.num_steps, trainer.save_freq)  # the last step is saved too
    if trainer.max_ckpt_to_keep is not None:
        count = min(count, trainer.max_ckpt_to_keep + _beside(plan))
    return Disk(checkpoint, count, free_space(root))


def warn_of_full_disk(plan: Plan) -> None:
    """Warn if the checkpoints of the run do not fit on the disk together."""
    disk = disk_of(plan)
    if not disk.checkpoint or disk.checkpoint * disk.num_checkpoints <= disk.free:
        return
    fitting = disk.free // disk.checkpoint - _beside(plan)
    LOG.warning(
        "%d checkpoints of about %s need more than the free disk space, %s: "
        "trainer.max_ckpt_to_keep=%d keeps the newest alone, and trainer.default_local_dir=DIR "
        "puts them on another disk",
        disk.num_checkpoints,
        size(disk.checkpoint),
        size(disk.free),
        max(1, fitting),
    )


def _beside(plan: Plan) -> int:
    """Return how many checkpoints there are beside the newest: the best, and one being written."""
    best = plan.config.trainer.keep_best
    if best.metric is None:
        return 1
    return 1 + best.k


def _checkpoint_bytes(planned: PlannedRole) -> int | None:
    """Return the bytes of weights and moments, and of the exported policy; None if unknown."""
    if planned.memory is None:
        return None
    exported = 0
    if planned.role in (ACTOR, REWARD_LEARNER):
        exported = planned.memory.num_parameters
    return (3 * planned.memory.num_trained + exported) * planned.storage.master
