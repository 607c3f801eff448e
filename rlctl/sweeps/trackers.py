"""Trackers of a sweep: their modes before its start, and where the data of its runs are."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from rlctl.recipes import schema
from rlctl.runs.events import read_events
from rlctl.sweeps.results import results
from rlctl.sweeps.sweep_record import SweepDir
from rlctl.text import plural
from rlctl.tracking.destination import commands, destinations, line
from rlctl.tracking.loggers import preflight

log = logging.getLogger(__name__)


def announce(config: schema.Config) -> None:
    """Log the mode that each tracker of the runs would use."""
    tracking = config.trainer.tracking
    for name in config.trainer.logger:
        mode = preflight(name, tracking.modes.get(name), tracking.params)
        if mode:
            log.info("%s: %s", name, mode)


def places(sweep: SweepDir) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the destinations of the runs of all trials, by tracker and run."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for run in run_names(sweep):
        for name, place in destinations(read_events(sweep.run_folder(run))).items():
            found.setdefault(name, {})[run] = place
    return found


def lines(sweep: SweepDir) -> Iterator[str]:
    """Yield a line for each tracker, with the first run's place, and the commands that follow."""
    for name, by_run in places(sweep).items():
        first, *others = [place for place in by_run.values() if place["off"] is None] or [{}]
        stopped = [run for run, place in by_run.items() if place["off"] is not None]
        if first:
            text = f"{name}  {line(first)}"
            if others:
                text += f", and {plural(len(others), 'run')} more"
            yield text
            if first.get("look"):
                yield f"next  {commands(first)[0]}"
        if stopped:
            why = by_run[stopped[0]]["off"]
            yield f"{name}  off in {plural(len(stopped), 'run')}: {why}"
        if stopped or first.get("mode") == "offline":
            yield f"next  rlctl runs sync {sweep.record.name} --logger {name}"


def run_names(sweep: SweepDir) -> list[str]:
    """Return the names of the runs of all trials."""
    return [run for trial in results(sweep).trials for run in trial.runs]
