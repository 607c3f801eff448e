"""Reading of a run's `events.jsonl`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlctl.tracking.alarm_rules import FAILED_REWARDS
from rlctl.tracking.alarms import EVENT, OVER
from rlctl.tracking.json_lines import read_lines

EVENTS_FILE = "events.jsonl"


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Return the events of the run in `folder`, oldest first: `time`, `kind` and other fields."""
    return list(read_lines(folder / EVENTS_FILE, valid=lambda event: "kind" in event))


def alarms_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the alarms, those of failed rewards before all others, oldest first.

    Each has `name`, `step`, `message`, `hint` and `over`.

    `over` is the step at which the alarm ended, None while it is active. Alarms after the resumed
    step are ignored.
    """
    found: list[dict[str, Any]] = []
    for event in events:
        kind = event.get("kind")
        step = event.get("step")
        if kind == EVENT:
            found.append(
                {name: event.get(name) for name in ("name", "step", "message", "hint")}
                | {"over": None}
            )
        elif kind == OVER:
            for alarm in found:
                if alarm["name"] == event.get("name") and alarm["over"] is None:
                    alarm["over"] = step
        elif kind == "resume" and step is not None:
            found = [alarm for alarm in found if alarm["step"] <= step]
            for alarm in found:
                if (alarm["over"] or 0) > step:
                    alarm["over"] = None
    return sorted(found, key=lambda alarm: alarm["name"] != FAILED_REWARDS)
