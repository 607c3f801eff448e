"""Alarms in the event log of a run, for trackers that receive its steps again."""

from __future__ import annotations

from pathlib import Path

from rlctl.tracking.alarms import EVENT, OVER, Alarm
from rlctl.tracking.json_lines import read_lines

_FIELDS = ("name", "step", "value", "limit", "message", "hint")


def recorded_alarms(folder: Path) -> dict[int, list[Alarm]]:
    """Return the starts and ends of alarms by step; those after a resumed step are left out."""
    found: list[Alarm] = []
    for event in read_lines(folder / "events.jsonl", lambda *_: None):
        kind = event.get("kind")
        step = event.get("step")
        if kind in (EVENT, OVER) and event.keys() >= {*_FIELDS}:
            fields = {name: event[name] for name in _FIELDS}
            found.append(Alarm(**fields, over=kind == OVER))
        elif kind == "resume" and step is not None:
            found = [alarm for alarm in found if alarm.step <= step]
    by_step: dict[int, list[Alarm]] = {}
    for alarm in found:
        by_step.setdefault(alarm.step, []).append(alarm)
    return by_step
