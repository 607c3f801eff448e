"""Sending of a finished run's metrics to a tracker that missed some of them."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from rlctl.errors import ConfigError, ConflictError, NotFoundError, Problem, RlctlError, UsageError
from rlctl.files import read_record
from rlctl.plugins import load
from rlctl.redaction import SECRET
from rlctl.runs.events import read_events
from rlctl.runs.run import ACTIVE, Run
from rlctl.runs.run_dir import CONFIG_FILE, RunDir
from rlctl.runs.store import RunStore
from rlctl.runs.tracked import run_info
from rlctl.sweeps.selection import whole_sweep
from rlctl.sweeps.trackers import run_names
from rlctl.text import plural
from rlctl.tracking.delivery import Call, TrackerTimeouts
from rlctl.tracking.destination import Locates, destinations, relative
from rlctl.tracking.fanout import RECORD
from rlctl.tracking.jsonl import METRICS_FILE, metric_rows
from rlctl.tracking.loggers import make_tracker, preflight, settings_of
from rlctl.tracking.threaded import (
    MISSED,
    SYNCED,
    ThreadedDelivery,
    first_missing_step,
    was_offline,
)
from rlctl.tracking.tracker import ShowsPhases

_FAILURES = {"lost": "its process disappeared", "failed": "the cause was not recorded"}
_END_OF_RUN = {"finished": "finished", "failed": "failed", "lost": "failed", "stopped": "stopped"}


@dataclass(frozen=True)
class Sent:
    """Result of `sync` of a run: its id in the logger, the steps sent (`full_replay`: of all).

    `num_received` of the run's `total` steps were read back; None if the logger cannot tell.
    `offline` is the reason why they are in files and not on a server, and `send` sends the files.
    """

    run: str
    logger: str
    id: str | None
    num_steps: int
    full_replay: bool
    total: int
    num_received: int | None = None
    offline: str | None = None
    send: str = ""

    def __str__(self) -> str:
        known = f" (as {self.id})" if self.id else ""
        sent = f"{self.logger}{known}: {plural(self.num_steps, 'step')} sent"
        if self.offline is not None and not self.num_steps:
            files = f"all {plural(self.total, 'step')} are in offline files and not on the server"
            return f"{self.logger}{known}: {files} ({self.offline}){self._next}"
        if self.offline is not None:
            return f"{sent} to offline files: {self.offline}{self._next}"
        if self.num_received is not None:
            return f"{sent}; its server has {self.num_received} of {plural(self.total, 'step')}"
        if not self.num_steps:
            return f"{self.logger}{known}: nothing is missing"
        return sent

    @property
    def _next(self) -> str:
        if not self.send:
            return ""
        return f"\nnext: {relative(self.send)}"


def sync(run: Run, logger: str, first: int | None = None) -> Sent:
    """Send a finished run's steps to a logger, from the first one that it missed or from `first`.

    Later steps are sent again, in order, which loggers overwrite or hide. A logger that cannot
    continue its history (it never had the run, or is in a local mode) receives all steps. Raises
    ConflictError for an active run, MissingExtraError, errors of the logger's start, and RlctlError
    when the logger does not accept all steps.
    """
    if run.record is None:
        raise NotFoundError(f"the run {run.name} has no readable record", where=str(run.path))
    if run.state in ACTIVE:
        hint = "sync its trackers after it has ended"
        raise ConflictError(f"the run {run.name} is {run.state}", hint=hint)
    config = _stored_config(run.path / CONFIG_FILE)
    steps = _recorded_steps(run)
    if logger == RECORD or issubclass(load("loggers", logger), ShowsPhases):
        hint = "use `rlctl watch` or `rlctl show`"
        raise UsageError(f"{logger} shows the run's record, which is complete", hint=hint)
    from rlctl.recipes.compose import resolved_section  # slow to import

    trainer = resolved_section(config, "trainer")
    tracking = trainer["tracking"]
    params = tracking.get("params", {})
    _refuse_lost_secrets(logger, params)
    mode = preflight(logger, tracking["modes"].get(logger), params)
    if first is None:
        is_new = mode.startswith("online") and was_offline(run.path, logger)
        first = 0 if is_new else first_missing_step(run.path, logger, max(steps) + 1)
    if first > max(steps):
        return _nothing_sent(run, logger, len(steps), mode)
    total = run.record.total_steps or max(steps)
    composed = {"trainer": {**trainer, "logger": logger}}
    info = run_info(run.record, run.path, composed, total, shown=config)
    timeouts = TrackerTimeouts(1, tracking["start_s"], tracking["call_s"], tracking["finish_s"])
    with contextlib.redirect_stdout(sys.stderr):  # SDKs print to stdout, which is for data
        tracker = make_tracker(logger, params)
        delivery = ThreadedDelivery(logger, tracker, timeouts, info, steps, first)
        run_id = delivery.wait_for_start()
        if run.state in _FAILURES:
            failure = run.record.failure or {"message": _FAILURES[run.state]}
            delivery.send(Call("failure", (failure["message"],)))
        delivery.send(Call("finish", (_END_OF_RUN[run.state],)))
        delivery.wait_for_end(math.inf)
    folder = RunDir(run.path)
    if run_id is not None:
        folder.update(trackers={**folder.record.trackers, logger: run_id})
    num_sent = len(delivery.sent - {*delivery.missed_steps})
    offline = delivery.offline
    fields: dict[str, Any] = {"tracker": logger, "num_steps": num_sent}
    if offline is not None:
        fields["offline"] = [logger]
    folder.event(SYNCED, **fields)
    if not delivery.is_complete:
        shortfall = delivery.shortfall()
        folder.event(MISSED, **shortfall)
        why = f"did not accept all steps: {shortfall['why']}"
        raise RlctlError(f"logger {logger} {why}", hint="repeat the command")
    send = tracker.destination().send if isinstance(tracker, Locates) else ""
    given = run.name, logger, run_id, num_sent, delivery.full_replay, len(steps)
    return Sent(*given, delivery.num_received, offline, send)


def _nothing_sent(run: Run, logger: str, total: int, mode: str) -> Sent:
    """Return the result for a logger that lacks no step, in `mode`."""
    known = run.record and run.record.trackers.get(logger)
    sent = Sent(run.name, logger, known, 0, full_replay=False, total=total)
    if not was_offline(run.path, logger):
        return sent
    place = destinations(read_events(run.path)).get(logger, {})
    return replace(sent, offline=mode, send=place.get("send", ""))


def _recorded_steps(run: Run) -> list[int]:
    """Return the steps of a run's metrics. Raises NotFoundError if there are none."""
    metrics = run.path / METRICS_FILE
    steps = [int(row["step"]) for row in metric_rows(metrics)]
    if not steps:
        raise NotFoundError(f"the run {run.name} has no metrics", where=str(metrics))
    return steps


def _refuse_lost_secrets(logger: str, params: Mapping[str, Mapping[str, Any]]) -> None:
    written, settings = settings_of(logger, params)
    if SECRET in str(settings):
        raise ConfigError(
            f"trainer.tracking.params.{written} has a secret, which the run did not store",
            hint="pass such values as '${oc.env:NAME}': they are read from the environment",
        )


def _stored_config(path: Path) -> dict[str, Any]:
    """Read a run's composed configuration. Raises ConfigError if it is missing or damaged."""
    try:
        config = yaml.safe_load(read_record(path))
        config["trainer"]["tracking"]["modes"].get("")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        hint = "restore the file, for example from a remote copy or a checkpoint of the run"
        message = f"the stored configuration is damaged: {reason}"
        raise ConfigError(message, where=str(path), hint=hint) from error
    from rlctl.runs.trust import check

    check(path.parent, section="trainer.tracking.")
    return config


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
    runs = [store.find(str(sweep.run_folder(name))) for name in run_names(sweep)]
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
