"""Live view of a run, read from its folder; the run may be driven from another shell or host."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

from rlctl.runs.events import EVENTS_FILE
from rlctl.runs.logs import POLL_S, Tail, reread
from rlctl.runs.run import ACTIVE, Run
from rlctl.text import duration
from rlctl.tracking.alarms import EVENT, OVER, Alarm
from rlctl.tracking.json_lines import METRICS_FILE, json_object
from rlctl.tracking.live_panel import LivePanel
from rlctl.tracking.run_summary import OUTSIDE_A_STEP, SECONDS, figure


class RunWatcher:
    """Reader that adds the new metrics and alarms of a run to a panel."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.metrics = Tail(run.path / METRICS_FILE)
        self.events = Tail(run.path / EVENTS_FILE)
        began = time.monotonic() - (run.seconds or 0.0)
        self.panel = LivePanel(run.name, began=began, doing=self._status)
        # Training time according to the metrics: a clock for steps done before the watching began.
        self.seconds = 0.0
        self.ended = False

    def follow(self) -> Iterator[Alarm | None]:
        """Yield what `read` yields until the run has ended."""
        while True:
            yield from self.look()
            if self.ended:
                return
            time.sleep(POLL_S)

    def look(self) -> Iterator[Alarm | None]:
        """Yield what `read` yields once, and set `ended`."""
        now = reread(self.run)  # before reading, so that nothing written until the end is lost
        self.panel.total_steps = (now.record and now.record.total_steps) or 0
        yield from self.read()
        self.ended = now.state not in ACTIVE
        if self.ended:
            self.run = now
            self.panel.stamps.clear()  # no ETA
            self.panel.began = time.monotonic() - (now.seconds or 0.0)

    def line(self, alarm: Alarm | None) -> str:
        """Return what `read` has yielded as one line."""
        if alarm is None:
            return self.panel.line()
        if alarm.over:
            return f"alarm over: {alarm}"
        return f"alarm: {alarm}"

    def read(self) -> Iterator[Alarm | None]:
        """Read what is new; yield None after each step added to the panel, and each alarm."""
        # A run writes an alarm after the metrics of its step. Events are therefore read first, so
        # that the step of each of them is shown before it.
        events = list(_objects(self.events))
        for row in _objects(self.metrics):
            self._add_step(row)
            yield None
        for event in events:
            if event.get("kind") in (EVENT, OVER):
                if (alarm := _alarm(event)) is None:
                    continue
                self.panel.alarm(alarm)
                yield alarm
            elif event.get("kind") == "resume":
                self.panel.forget_alarms_after(event["step"])

    def _add_step(self, row: dict[str, Any]) -> None:
        step = int(row.pop("step"))
        if self.panel.step is not None and step <= self.panel.step:  # resumed from a checkpoint
            self.panel.clear()
        values = {name: math.nan if value is None else value for name, value in row.items()}
        self.seconds += sum(figure(values, names) or 0.0 for names in (SECONDS, *OUTSIDE_A_STEP))
        self.panel.add(step, values, self.seconds)

    def _status(self) -> str:
        path = self.run.path / METRICS_FILE
        if self.run.state not in ACTIVE:
            return self.run.state
        if not path.exists():
            return "starting"
        return f"last step {duration(max(0.0, time.time() - path.stat().st_mtime))} ago"


def _alarm(event: Mapping[str, Any]) -> Alarm | None:
    """Return the alarm of an event, or None if the event lacks a field."""
    fields = ("name", "step", "value", "limit", "message", "hint")
    if any(name not in event for name in fields):
        return None
    return Alarm(*(event[name] for name in fields), over=event["kind"] == OVER)


def _objects(tail: Tail) -> Iterator[dict[str, Any]]:
    return (row for line in tail.lines() if (row := json_object(line)) is not None)
