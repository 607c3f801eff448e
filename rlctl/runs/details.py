"""One run in full, as plain data: what `rlctl show` prints and `rlctl show --json` writes."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from rlctl.errors import NotFoundError, RlctlError
from rlctl.monitoring.run_summary import RunSummary
from rlctl.runs.events import alarms_of, read_events
from rlctl.runs.store import Run
from rlctl.tracking.jsonl import METRICS_FILE, generations_file, read_generations, read_metrics
from rlctl.tracking.tracker import Sample


def overview(run: Run) -> dict[str, Any]:
    """A run as one object of `rlctl runs --json`. What cannot be read is null, and `problem` says why."""
    record = run.record
    headline, problem = run.figures
    return {
        "name": run.name,
        "project": run.project,
        "path": str(run.path),
        "state": run.state,
        "created": run.created.isoformat(timespec="seconds"),
        "id": record.id if record else None,
        "recipe": record.recipe if record else None,
        "ended": record.ended if record else None,
        "exit_code": record.exit_code if record else None,
        "total_steps": record.total_steps if record else None,
        "tags": list(run.labels.tags),
        "note": run.labels.note,
        **dataclasses.asdict(headline or RunSummary.from_rows([])),
        "problem": run.problem or problem,
    }


def details(run: Run) -> dict[str, Any]:
    """All of it: the overview, the record, what differs from the base, and of every metric first, last, least, greatest and how many."""
    return overview(run) | {
        "record": dataclasses.asdict(run.record) if run.record else None,
        "changed": changed_settings(run.path),
        "metrics": {name: _course(values) for name, values in curves(run).items()},
        "alarms": alarms(run),
        "generations": generation_steps(run.path),
        "checkpoints": sorted(folder.name for folder in run.path.glob("checkpoints/step_*")),
    }


def curves(run: Run) -> dict[str, list[float]]:
    """Every metric's values, oldest first, as far as they are finite; nothing where the metrics cannot be read (`Run.figures` says why)."""
    _, problem = run.figures
    path = run.path / METRICS_FILE
    columns: dict[str, list[float]] = {}
    for row in read_metrics(path) if problem is None else []:
        for name, value in row.items():
            if name != "step" and math.isfinite(value):
                columns.setdefault(name, []).append(value)
    return columns


def changed_settings(folder: Path) -> dict[str, dict[str, Any]]:
    """The settings that differ from the base: the value and the base's as written, and where it was set. Empty where this is not known."""
    try:
        origins: dict[str, list[dict[str, Any]]] = json.loads(
            (folder / "origins.json").read_text(encoding="utf-8")
        )
        return {
            key: {
                "value": chain[-1]["value"],
                "base": chain[0]["value"] if chain[0]["level"] == 1 else None,
                "where": chain[-1]["where"],
            }
            for key, chain in origins.items()
            if chain[-1]["level"] > 1
            and (chain[0]["level"] > 1 or chain[-1]["value"] != chain[0]["value"])
        }
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return {}


def _course(values: list[float]) -> dict[str, float | int]:
    return {
        "first": values[0],
        "last": values[-1],
        "min": min(values),
        "max": max(values),
        "count": len(values),
    }


def generation_steps(folder: Path) -> list[int]:
    """The steps whose validation samples the folder of a run holds, in order."""
    return sorted(
        int(path.stem.removeprefix("step_")) for path in folder.glob("generations/step_*.jsonl")
    )


def alarms(run: Run) -> list[dict[str, Any]]:
    """The alarms of the run, as `alarms_of` gives them; none where its events cannot be read."""
    try:
        return alarms_of(read_events(run.path))
    except (RlctlError, OSError):
        return []


def samples(
    run: Run, step: int | None, right: bool | None, text: str | None = None
) -> tuple[int, list[Sample]]:
    """The validation samples of `step` (the last that has any where None): all, or only the right or the wrong ones, or only those that
    hold `text` in the prompt, the answer or the truth, whatever the case.

    Errors: NotFoundError when there are none of that step, ConfigError when the file is damaged.
    """
    steps = generation_steps(run.path)
    if not steps:
        raise NotFoundError(
            "this run has no validation samples",
            where=str(run.path),
            hint="trainer.test_freq=N validates every N steps",
        )
    chosen = steps[-1] if step is None else step
    if chosen not in steps:
        raise NotFoundError(
            f"no validation samples of step {chosen}",
            where=str(run.path),
            hint=f"there are those of {', '.join(map(str, steps))}",
        )
    found = read_generations(generations_file(run.path, chosen))
    return chosen, [
        sample
        for sample in found
        if right in (None, sample.right) and (text is None or _holds(sample, text))
    ]


def _holds(sample: Sample, text: str) -> bool:
    return any(
        text.casefold() in part.casefold()
        for part in (sample.prompt, sample.response, str(sample.ground_truth))
    )
