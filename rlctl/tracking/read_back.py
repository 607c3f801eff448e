"""Comparison of a run's record with what a tracker's server has."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, cast

from rlctl.tracking.jsonl import METRICS_FILE, generations_file, metric_rows
from rlctl.tracking.tracker import SAMPLES, ReadsBack, RunInfo

if TYPE_CHECKING:
    from rlctl.tracking.delivery import Call
    from rlctl.tracking.threaded import ThreadedDelivery

log = logging.getLogger(__name__)

# A server may show data some seconds after it has accepted them.
_PAUSES_S = (0.0, 0.5, 1.0, 2.0, 4.0)
Steps = Mapping[str, set[int]]


def without_received(delivery: ThreadedDelivery, calls: Iterator[Call]) -> Iterator[Call]:
    """Yield the calls without what the server has; all of them if it cannot be asked."""
    try:
        known = _received(delivery)
    except Exception as error:
        log.warning("logger %s cannot read back what it has: %s", delivery.name, error)
        known = None
    for call in calls:
        reduced = call
        if known is not None:
            reduced = _without(call, known)
        if reduced is None:
            delivery.undelivered.discard((call.step, call.method))
        else:
            yield reduced


def _without(call: Call, known: Steps) -> Call | None:
    """Return a call of `log` with the missing metrics only; None if nothing is missing.

    Of a step that the server has, alarms are left out: they would be sent as messages once more.
    """
    if call.method == "alarm":
        if any(call.step in steps for steps in known.values()):
            return None
        return call
    step, content = call.arguments
    if call.method == "generations":
        if step in known.get(SAMPLES, ()):
            return None
        return call
    missing = {name: value for name, value in content.items() if step not in known.get(name, ())}
    if not missing:
        return None
    return call._replace(arguments=(step, missing))


def confirm(delivery: ThreadedDelivery) -> bool:
    """Add to `undelivered` what the server lacks of the record; return True if this is known.

    Sets `num_received`. A tracker whose calls return after the data is stored needs no
    confirmation.
    """
    if (None, "finish") in delivery.undelivered:
        return False
    tracker = cast("ReadsBack", delivery.tracker)
    if not tracker.confirms and not delivery.steps:
        return True
    lacking: set[tuple[int | None, str]] = set()
    try:
        for pause in _PAUSES_S:
            time.sleep(pause)
            known = _received(delivery)
            if known is None:
                return True
            lacking = _lacking(delivery.run, known)
            if not lacking:
                break
    except Exception as error:
        delivery.last_error = f"its server does not say what it has: {error}"
        return False
    delivery.undelivered |= lacking
    steps = [int(row["step"]) for row in metric_rows(delivery.run.folder / METRICS_FILE)]
    delivery.num_received = len({*steps} - {step for step, _ in lacking})
    if lacking:
        delivery.last_error = delivery.last_error or "its server lacks steps that it accepted"
    return True


def _received(delivery: ThreadedDelivery) -> Steps | None:
    """Return the steps of each recorded metric, and of the samples, that the server has."""
    rows = metric_rows(delivery.run.folder / METRICS_FILE)
    names = {SAMPLES, *(name for row in rows for name in row)} - {"step"}
    known = cast("ReadsBack", delivery.tracker).received(names)
    if known is None:
        return None
    return {name: {*steps} for name, steps in known.items()}


def _lacking(run: RunInfo, known: Steps) -> set[tuple[int | None, str]]:
    """Return the step and the method of each recorded call of which the server lacks a part."""
    from rlctl.tracking.delivery import log_call

    lacking: set[tuple[int | None, str]] = set()
    for row in metric_rows(run.folder / METRICS_FILE):
        step = int(row.pop("step"))
        if _without(log_call(step, row), known) is not None:
            lacking.add((step, "log"))
        has_samples = run.num_samples > 0 and generations_file(run.folder, step).exists()
        if has_samples and step not in known.get(SAMPLES, ()):
            lacking.add((step, "generations"))
    return lacking
