"""A run as it goes, read from its folder: also one that another shell, or another machine on the same disk, has started."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from rlctl.monitoring.alarms import EVENT, OVER, Alarm
from rlctl.monitoring.panel import Panel
from rlctl.monitoring.run_summary import SECONDS, figure
from rlctl.monitoring.text import duration
from rlctl.runs.events import EVENTS_FILE
from rlctl.runs.follow import POLL_S, Tail, reread
from rlctl.runs.store import ACTIVE, Run
from rlctl.tracking.jsonl import METRICS_FILE

OUTSIDE_A_STEP = (("timing_s/testing",), ("timing_s/save_checkpoint",))


class Watched:
    """Reads what is new of a run into a panel."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.metrics, self.events = Tail(run.path / METRICS_FILE), Tail(run.path / EVENTS_FILE)
        began = time.monotonic() - (datetime.now(UTC) - run.created).total_seconds()
        self.panel = Panel(run.name, began=began, doing=self._doing)
        self.seconds = 0.0  # of training, by the metrics: the clock of steps that were done before anybody watched

    def follow(self) -> Iterator[Alarm | None]:
        """What `read` yields, until the run has ended."""
        while True:
            now = reread(self.run)  # before reading: what was written until then is read
            ended = now.state not in ACTIVE
            self.panel.total_steps = (now.record.total_steps if now.record else None) or 0
            yield from self.read()
            if ended:
                self.run = now
                self.panel.stamps.clear()  # nothing is left to wait for
                self.panel.began = time.monotonic() - (now.seconds or 0.0)
                return
            time.sleep(POLL_S)

    def read(self) -> Iterator[Alarm | None]:
        """Reads on. Yields None after each step, when the panel shows it, and each alarm."""
        for row in _objects(self.metrics):
            step = int(row.pop("step"))
            if (
                self.panel.step is not None and step <= self.panel.step
            ):  # the run went back to a checkpoint
                self.panel.clear()
            values = {name: math.nan if value is None else value for name, value in row.items()}
            self.seconds += sum(
                figure(values, names) or 0.0 for names in (SECONDS, *OUTSIDE_A_STEP)
            )
            self.panel.add(step, values, self.seconds)
            yield None
        for event in _objects(self.events):
            if event.get("kind") in (EVENT, OVER):
                alarm = Alarm(
                    event["name"],
                    event["step"],
                    event["value"],
                    event["limit"],
                    event["message"],
                    event["hint"],
                    event["kind"] == OVER,
                )
                self.panel.alarm(alarm)
                yield alarm
            elif event.get("kind") == "resume":
                self.panel.forget_alarms_after(event["step"])

    def _doing(self) -> str:
        path = self.run.path / METRICS_FILE
        if self.run.state not in ACTIVE:
            return self.run.state
        if not path.exists():
            return "starting"
        return f"last step {duration(max(0.0, time.time() - path.stat().st_mtime))} ago"


def _objects(tail: Tail) -> Iterator[dict[str, Any]]:
    return (json.loads(line) for line in tail.lines() if line)
