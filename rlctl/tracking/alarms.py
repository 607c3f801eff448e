"""Alarms for training that degrades without an error, detected from the metrics.

Each rule derives one reading from the history of a run. Its alarm starts after `patience`
consecutive readings that violate the limit, so that one outlier raises no alarm. It ends after as
many consecutive readings that are back within the limit by a margin, so that an alarm does not
flicker near the limit. Alarms depend on the rows of `metrics.jsonl` alone: a resumed run replays
them and continues in the same state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import InitVar, dataclass, field
from typing import Protocol, runtime_checkable

from rlctl.tracking.alarm_rules import RULES, History, Rule
from rlctl.tracking.run_summary import Row

EVENT = "alarm"  # kind of an event in events.jsonl
OVER = "alarm_over"


@dataclass(frozen=True)
class Alarm:
    """Start (or, with `over`, end) of an alarm at `step`; `value` is the reading."""

    name: str
    step: int
    value: float
    limit: float
    message: str
    hint: str
    over: bool

    def __str__(self) -> str:
        return f"step {self.step}: {self.message}" + ("" if self.over else f" ({self.hint})")


@runtime_checkable
class ShowsAlarms(Protocol):
    """Tracker that shows the start and end of alarms."""

    def alarm(self, alarm: Alarm) -> None:
        """Show the alarm."""
        ...


@dataclass
class AlarmState:
    """State of one rule: active or not, and the number of consecutive readings against that."""

    active: bool = False
    streak: int = 0


@dataclass
class Alarms:
    """All alarms of one run, by rule: `limits` without a number disable one.

    The keys of `trainer.alarms` document the numbers; `rollout_mismatch` is
    `trainer.mismatch.warn`. `earlier` are the rows of the run's previous attempts, `details` texts
    that no row has.
    """

    limits: Mapping[str, float | None]
    earlier: InitVar[Iterable[Row]] = ()
    details: dict[str, str] = field(default_factory=dict[str, str])  # end of a rule's message
    history: History = field(default_factory=History)
    states: dict[str, AlarmState] = field(
        default_factory=lambda: {rule.name: AlarmState() for rule in RULES}
    )

    def __post_init__(self, earlier: Iterable[Row]) -> None:
        for row in earlier:
            self.add(row)

    def add(self, row: Row) -> list[Alarm]:
        """Add the next row; return the alarms that start or end with it."""
        self.history.add(row)
        changes = [self._check(rule, int(row["step"])) for rule in RULES]
        return [change for change in changes if change is not None]

    def _check(self, rule: Rule, step: int) -> Alarm | None:
        limit = self.limits.get(rule.name)
        value = rule.read(self.history)
        series = self.history[rule.series]
        if limit is None or value is None or not series or series[-1][0] != step:
            return None
        state = self.states[rule.name]
        change = rule.violated
        if state.active:
            change = rule.recovered
        state.streak += 1
        if not change(value, limit):
            state.streak = 0
        if state.streak < rule.patience:
            return None
        state.active = not state.active
        state.streak = 0
        message = rule.message
        if not state.active:
            message = rule.over_message
        text = message.format(value=value, limit=limit, **self.history.words)
        if state.active and rule.name in self.details:
            text += f"; the first error: {self.details[rule.name]}"
        return Alarm(rule.name, step, value, limit, text, rule.hint, over=not state.active)
