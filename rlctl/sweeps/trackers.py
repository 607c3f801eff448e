"""Trackers of a sweep: their modes before its start, where the data of its runs are, and `sync`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from rlctl.errors import NotFoundError, Problem, RlctlError
from rlctl.monitoring.text import plural
from rlctl.recipes import schema
from rlctl.runs.events import read_events
from rlctl.runs.store import RunStore
from rlctl.runs.sync import Sent, sync
from rlctl.sweeps.record import SweepDir
from rlctl.sweeps.results import results
from rlctl.sweeps.selection import whole_sweep
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
    for run in _runs(sweep):
        for name, place in destinations(read_events(sweep.run_folder(run))).items():
            found.setdefault(name, {})[run] = place
    return found


def lines(sweep: SweepDir) -> Iterator[str]:
    """Yield a line for each tracker, with the first run's place, and the commands that follow."""
    for name, by_run in places(sweep).items():
        first, *others = [place for place in by_run.values() if place["off"] is None] or [{}]
        stopped = [run for run, place in by_run.items() if place["off"] is not None]
        if first:
            more = f", and {plural(len(others), 'run')} more" if others else ""
            yield f"{name}  {line(first)}{more}"
            if first.get("look"):
                yield f"next  {commands(first)[0]}"
        if stopped:
            why = by_run[stopped[0]]["off"]
            yield f"{name}  off in {plural(len(stopped), 'run')}: {why}"
        if stopped or first.get("mode") == "offline":
            yield f"next  rlctl runs sync {sweep.record.name} --logger {name}"


def sync_named(
    store: RunStore, selector: str, loggers: Sequence[str], first: int | None
) -> Iterator[Sent]:
    """Send the missing steps of a run, or of all runs of a sweep, and yield each result.

    See `sync`. A run of a sweep that fails does not stop the others: an error with all failures is
    raised at the end. Raises NotFoundError if the sweep has no run.
    """
    sweep = whole_sweep(store, selector)
    if sweep is None:
        run = store.find(selector)
        yield from (sync(run, logger, first) for logger in loggers)
        return
    runs = [store.find(str(sweep.run_folder(name))) for name in _runs(sweep)]
    if not runs:
        raise NotFoundError(f"the sweep {sweep.record.name} has no run yet", where=str(sweep.path))
    problems: list[Problem] = []
    for run, logger in product(runs, loggers):
        try:
            yield sync(run, logger, first)
        except RlctlError as error:
            problems += [
                replace(each, message=f"{run.name}: {each.message}") for each in error.problems
            ]
    if problems:
        raise RlctlError(*problems)


def _runs(sweep: SweepDir) -> list[str]:
    return [run for trial in results(sweep).trials for run in trial.runs]
