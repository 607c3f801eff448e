"""Steps that learn nothing: skipped updates, and engines that differ from the trainer.

The rows are written as safetensors and JSON into `broken_updates/` of the run's folder.
"""

from __future__ import annotations

import base64
import json
import logging
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rlctl.errors import RlctlError
from rlctl.files import apply_umask, replacing, step_name
from rlctl.recipes.role_table import ACTOR
from rlctl.runs.run_dir import RunDir
from rlctl.runs.subfolders import own_subfolder
from rlctl.runtime.algorithms.mismatch import RolloutMismatch
from rlctl.runtime.algorithms.sampled_tokens import PROBS_DIFF
from rlctl.runtime.base.roles import Roles
from rlctl.runtime.base.stored_fields import fetched
from rlctl.runtime.training.stored_rollouts import write_rollouts
from rlctl.runtime.workers.broken_update import MOST, BrokenUpdate

BUNDLES = "broken_updates"
FACTS = "facts.json"
ROWS = "rows"
WEIGHTS = "weights.safetensors"
LOG = logging.getLogger(__name__)


def record(run: RunDir, step: int, roles: Roles, in_a_row: int, most: int) -> None:
    """Save what broke the updates of a step. Raises RlctlError after `most` steps in a row."""
    written: list[Path] = []
    for role, member in roles.learning().items():
        worker: Any = member
        written += _write(run, step, role.name, worker.pop_broken_updates())
    run.event(
        "skipped_update", step=step, bundles=[str(path.relative_to(run.path)) for path in written]
    )
    if in_a_row >= most:
        raise RlctlError(
            f"the gradient was not finite in {in_a_row} steps in a row, the last being step {step}",
            where=str(run.path / BUNDLES),
            hint=f"`rlctl debug {run.path.name} --replay` shows where it broke; lower the learning "
            "rate; trainer.max_skipped_updates sets the limit",
        )


def record_mismatch(error: RolloutMismatch, step: int, run: RunDir, roles: Roles) -> RlctlError:
    """Write the batch to the attempt's folder and an event; return the error that ends the run."""
    dump = run.attempt / f"mismatch_step_{step:06d}.pt"
    torch.save(
        {"batch": fetched(error.batch), "log_probs": fetched(error.log_probs).log_probs}, dump
    )
    run.event(
        "mismatch_halt",
        step=step,
        metric=PROBS_DIFF,
        value=error.value,
        limit=error.limit,
        batch=str(dump),
    )
    if math.isnan(error.value):
        rows = fetched(error.batch).without_local()
        actor: Any = roles.actor
        _write(run, step, ACTOR.name, actor.pop_broken_updates(rows))
        return RlctlError(
            f"{PROBS_DIFF} is nan in step {step}: the policy computes values that are not finite",
            where=str(run.path / BUNDLES),
            hint=f"`rlctl debug {run.path.name} --replay` shows the first of them; lower the "
            "learning rate",
        )
    return RlctlError(
        f"{PROBS_DIFF} is {error.value:.3g} in step {step}, above "
        f"trainer.mismatch.halt={error.limit:g}: the rollout engine has other weights than the "
        "trainer, or computes other probabilities with them",
        where=str(dump),
        hint="inspect the batch with torch.load(…, weights_only=False): `batch.rollout_log_probs` "
        "are the engine's, `log_probs` the trainer's; compare with rollout.name=hf, or set "
        "trainer.mismatch.halt=null to continue regardless",
    )


def _write(run: RunDir, step: int, role: str, found: Iterable[BrokenUpdate]) -> list[Path]:
    """Write what ranks found, one folder for each update, at most `MOST` in a run."""
    updates: dict[int, BrokenUpdate] = {}
    for each in found:
        number = each.facts["number"]
        kept = updates.get(number)
        if kept is None or (kept.facts["first"] is None and each.facts["first"] is not None):
            updates[number] = each
    written: list[Path] = []
    try:
        folder = own_subfolder(run.path, BUNDLES)
        for number, update in updates.items():
            target = folder / f"{step_name(step)}-{role}-{number}"
            if len(list(folder.glob("step_*"))) >= MOST or target.exists():
                continue
            with replacing(target) as aside:
                aside.mkdir()
                _fill(aside, update, {"step": step, "role": role, "run": run.record.id})
            written.append(target)
            LOG.warning(
                "step %d: `rlctl debug %s --replay` shows what broke the update: %s",
                *(step, target, _line(update)),
            )
    except (OSError, RlctlError) as error:
        LOG.warning("step %d: the broken update is not written: %s", step, error)
    return written


def _fill(folder: Path, update: BrokenUpdate, facts: dict[str, int | str]) -> None:
    images = [[base64.b64encode(each).decode() for each in row] for row in update.batch.images]
    text = json.dumps(facts | update.facts | {"images": images}, indent=1, allow_nan=False)
    (folder / FACTS).write_text(text + "\n", encoding="utf-8")
    write_rollouts(folder / ROWS, replace(update.batch.without_local(), images=[]), [])
    if update.weights:
        save_file(dict(update.weights), folder / WEIGHTS)
        apply_umask(folder / WEIGHTS)


def _line(update: BrokenUpdate) -> str:
    first = update.facts["first"]
    if first is None:
        return "the norm of the gradient"
    return f"{first['where']}: {first['name']}"
