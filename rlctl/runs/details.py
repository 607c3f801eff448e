"""Details of one run as plain data, for `rlctl show` and `rlctl show --json`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from rlctl import plugins
from rlctl.errors import NotFoundError
from rlctl.files import by_step, read_record, step_name
from rlctl.log import warn_once
from rlctl.runs.events import alarms_of, read_events
from rlctl.runs.listing import overview
from rlctl.runs.run import Run
from rlctl.tracking.destination import destinations
from rlctl.tracking.jsonl import TRAINED, VALIDATED, generations_file, read_generations
from rlctl.tracking.summary import SERIES
from rlctl.tracking.tracker import Sample

_NO_SAMPLES = "E-NO-SAMPLES"


def details(run: Run) -> dict[str, Any]:
    """Return the overview, record, changed settings, metrics, alarms, samples and checkpoints."""
    from rlctl.runs.prune import checkpoint_sizes

    return overview(run) | {
        "record": dataclasses.asdict(run.record) if run.record else None,
        "changed": changed_settings(run.path),
        "metrics": {
            name: dict(zip(SERIES, values, strict=True))
            for name, values in run.metrics.metrics.items()
        },
        "alarms": alarms(run),
        "ended_early": ended_early(run),
        **plugin_fields(run),
        "trackers": trackers(run),
        "generations": generation_steps(run.path),
        "profiles": profiles(run.path),
        "broken_updates": broken_updates(run.path),
        "bytes": run.num_bytes,
        "checkpoint_bytes": {
            step_name(step): size for step, size in checkpoint_sizes(run.path).items()
        },
        "checkpoints": [path.name for path in by_step(run.path / "checkpoints").values()],
    }


def changed_settings(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the settings that differ from the base config: `value`, `base` and `where` it was set.

    Empty if there are no origins; logs a warning if they cannot be read.
    """
    file = folder / "origins.json"
    if not file.is_file():
        return {}
    try:
        origins: dict[str, list[dict[str, Any]]] = json.loads(read_record(file))
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
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        warn_once(f"no origins of the settings: {file} cannot be read: {error}")
        return {}


def generation_steps(folder: Path, kind: str = VALIDATED) -> list[int]:
    """Return the steps with samples of a kind in the folder of a run, sorted."""
    return list(by_step(folder / kind, ".jsonl"))


def profiles(folder: Path) -> list[str]:
    """Return the traces in the folder of a run, relative to it, by step and rank."""
    found = folder.glob("profiles/step_*/*.json")
    return sorted(str(path.relative_to(folder)) for path in found)


def broken_updates(folder: Path) -> list[str]:
    """Return the folders of skipped updates in the folder of a run, relative to it, by step."""
    return sorted(str(path.relative_to(folder)) for path in folder.glob("broken_updates/step_*"))


def alarms(run: Run) -> list[dict[str, Any]]:
    """Return the alarms of the run (`alarms_of`); empty if its events cannot be read."""
    try:
        return alarms_of(read_events(run.path))
    except OSError:
        return []


def ended_early(run: Run) -> dict[str, Any] | None:
    """Return `step` and `reason` of a run whose listener has ended it; None for other runs."""
    try:
        events = read_events(run.path)
    except OSError:
        return None
    ends = (event for event in reversed(events) if event["kind"] in ("ended_early", "attempt"))
    last = next(ends, None)
    if last is None or last["kind"] != "ended_early":
        return None
    return {"step": last["step"], "reason": last["reason"]}


def plugin_fields(run: Run) -> dict[str, Any]:
    """Return the fields of a run that plug-ins compute, such as its cost, if they have a value."""
    fields = {name: plugins.load("run_fields", name)(run) for name in plugins.names("run_fields")}
    return {name: value for name, value in fields.items() if value is not None}


def facts_of_plugins(run: Run) -> list[tuple[str, str]]:
    """Return label and text of an early end, if there is one, and of `plugin_fields`."""
    found = ended_early(run)
    facts = [(name, str(value)) for name, value in plugin_fields(run).items()]
    if found:
        facts.insert(0, ("ended early", "step {step}: {reason}".format_map(found)))
    return facts


def trackers(run: Run) -> dict[str, dict[str, Any]]:
    """Return where the trackers of the latest attempts have their data, by logger."""
    try:
        return destinations(read_events(run.path))
    except OSError:
        return {}


def samples(
    run: Run,
    step: int | None,
    right: bool | None,
    text: str | None = None,
    kind: str = VALIDATED,
) -> tuple[int, list[Sample]]:
    """Return a step and its samples of a `kind`; None selects the last step that has any.

    `right` keeps only correct (True) or wrong (False) samples; `text` those whose prompt, response
    or ground truth contains it, ignoring case. Raises NotFoundError without samples of the step,
    ConfigError for a damaged file.
    """
    steps = generation_steps(run.path, kind)
    what = "validation samples"
    hint = "trainer.test_freq=N validates every N steps"
    if kind == TRAINED:
        what = "training samples"
        hint = "trainer.log_train_generations=2 keeps the responses to two prompts of each step"
    if not steps:
        message = f"this run has no {what}"
        raise NotFoundError(message, where=str(run.path), hint=hint, code=_NO_SAMPLES)
    chosen = step
    if chosen is None:
        chosen = steps[-1]
    if chosen not in steps:
        raise NotFoundError(
            f"no {what} of step {chosen}",
            where=str(run.path),
            hint=f"steps with samples: {', '.join(map(str, steps))}",
            code=_NO_SAMPLES,
        )
    found = read_generations(generations_file(run.path, chosen, kind))
    return chosen, [
        sample
        for sample in found
        if right in (None, sample.right) and (text is None or contains(sample, text))
    ]


def contains(sample: Sample, text: str) -> bool:
    """Return True if prompt, response, truth or a turn has the text, ignoring case."""
    parts = [sample.prompt, sample.response, str(sample.ground_truth)]
    if sample.episode:
        parts += [
            sample.episode.error or "",
            *(message.text for message in sample.episode.messages),
        ]
    return any(text.casefold() in part.casefold() for part in parts)
