"""Description of a run for trackers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rlctl.plugins import load
from rlctl.redaction import redact_texts
from rlctl.runs.record import RunRecord
from rlctl.runs.run import build_run
from rlctl.runs.run_dir import RECORD_FILE
from rlctl.tracking.tracker import NUM_SHOWN, RunInfo


def run_info(
    record: RunRecord,
    folder: Path,
    config: Mapping[str, Any],
    total_steps: int,
    resume_step: int = 0,
    shown: Mapping[str, Any] | None = None,
) -> RunInfo:
    """Build the information that trackers receive; `config` is the composed config.

    The trackers record `shown`, the config without secrets; None: `config` has none.
    """
    trainer = config["trainer"]
    tracking = trainer["tracking"]
    tags = tracking["tags"]
    return RunInfo(
        id=record.id,
        project=record.project,
        name=record.name,
        folder=folder,
        total_steps=total_steps,
        config=config if shown is None else shown,
        trackers=record.trackers,
        resume_step=resume_step,
        modes=tracking["modes"],
        tags=redact_texts([tags] if isinstance(tags, str) else tags),
        description=redact_texts(tracking["description"]),
        num_samples=_num_samples(trainer),
        sample_seed=trainer["seed"],
        recipe=record.recipe,
        sweep=record.sweep,
        attempt=record.attempts,
        commit=record.git["commit"] if record.git else None,
        lost=partial(_lost_ids, folder.parent),
    )


def _lost_ids(project: Path, logger: str) -> list[str]:
    """Return the ids that a logger gave to the lost runs in the folder of a project."""
    runs = [build_run(file.parent) for file in project.glob(f"*/{RECORD_FILE}")]
    ids = [run.record.trackers.get(logger) for run in runs if run.record and run.state == "lost"]
    return [found for found in ids if found is not None]


def _num_samples(trainer: Mapping[str, Any]) -> int:
    """Return `trainer.log_val_generations`; by default it depends on the loggers."""
    if (number := trainer["log_val_generations"]) is not None:
        return number
    names = trainer["logger"]
    plugins = [load("loggers", name) for name in ([names] if isinstance(names, str) else names)]
    return NUM_SHOWN if any(getattr(plugin, "shows_samples", False) for plugin in plugins) else 0
