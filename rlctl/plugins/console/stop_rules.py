"""Rules of `trainer.stop_when`, which end a run before its last step.

    alarm(NAME)               the alarm is on
    no_gain(METRIC, N[, D])   N values in a row are not better than the best before, by more than D
    hours(X)                  the run has trained for X hours, in all attempts together
    best(METRIC) > 0.95       an expression of `rlctl runs --where` about metrics

The rules, but for `hours`, depend on the rows of `metrics.jsonl` alone. A resumed run reads them
again, so it ends with the same step as one that was not interrupted.
"""

from __future__ import annotations

import difflib
import logging
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rlctl.errors import ConfigError, Problem, UsageError, raise_problems
from rlctl.recipes import schema
from rlctl.runs.query import Query, Term
from rlctl.runs.run_dir import RunDir
from rlctl.runtime.training.listeners import Listener
from rlctl.suggest import closest
from rlctl.tracking.alarm_rules import RULES
from rlctl.tracking.alarms import Alarms
from rlctl.tracking.jsonl import metric_rows
from rlctl.tracking.run_summary import Row, lower_is_better

LOG = logging.getLogger(__name__)

KEY = "trainer.stop_when"
FORMS = (
    "alarm(NAME), no_gain(METRIC, N), hours(X), or an expression such as best(METRIC) > 0.95; see "
    "docs/resume.md#stop-rules"
)
_CALL = re.compile(r"\s*(alarm|no_gain|hours)\s*\((.*)\)\s*", re.DOTALL)
_GROUPS = ("val-core/", "val-aux/")


@dataclass
class History:
    """Rows of a run: seconds of training, active alarms, and the values of each metric."""

    alarms: Alarms
    seconds: float = 0.0
    values: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    step: int = -1  # of the last row

    def add(self, step: int, row: Row) -> None:
        """Add the row of the next step."""
        self.step = step
        self.alarms.add({**row, "step": step})
        for name, value in row.items():
            if value is not None and math.isfinite(value):
                self.values.setdefault(name, []).append(value)

    def value(self, term: Term) -> float | None:
        """Return the value of a metric, None if no row has it."""
        values = self.values.get(term.name)
        if not values:
            return None
        if term.aspect == "first":
            return values[0]
        if term.aspect == "last":
            return values[-1]
        smallest = term.aspect == "min" or (term.aspect == "best" and lower_is_better(term.name))
        return min(values) if smallest else max(values)


class Rule(Protocol):
    """A rule; `metrics` are those that it reads."""

    @property
    def metrics(self) -> Collection[str]: ...

    def reason(self, history: History) -> str | None:
        """Return why the run ends, None if it continues."""
        ...


@dataclass(frozen=True)
class AlarmRule:
    """Rule `alarm(NAME)`."""

    name: str
    metrics: Collection[str] = ()

    def reason(self, history: History) -> str | None:
        if history.alarms.states[self.name].active:
            return "the alarm is on"
        return None


@dataclass(frozen=True)
class HoursRule:
    """Rule `hours(X)`."""

    hours: float
    metrics: Collection[str] = ()

    def reason(self, history: History) -> str | None:
        trained = history.seconds / 3600
        if trained < self.hours:
            return None
        return f"{trained:.3g} h are over"


@dataclass(frozen=True)
class NoGain:
    """Rule `no_gain(METRIC, N, D)`."""

    metric: str
    patience: int
    margin: float

    @property
    def metrics(self) -> Collection[str]:
        return (self.metric,)

    def reason(self, history: History) -> str | None:
        values = history.values.get(self.metric, [])
        sign = -1.0 if lower_is_better(self.metric) else 1.0
        best = -math.inf
        since = 0
        for value in values:
            since += 1
            if sign * value > best + self.margin:
                best = sign * value
                since = 0
        if since < self.patience:
            return None
        latest = "the last value is" if since == 1 else f"the last {since} values are"
        return f"{latest} not better than {sign * best:.4g}"


@dataclass(frozen=True)
class Expression:
    """Expression about metrics."""

    query: Query

    @property
    def metrics(self) -> Collection[str]:
        return [term.name for term in self.query.terms]

    def reason(self, history: History) -> str | None:
        if self.query.evaluate(history.value) is not True:
            return None
        values = ((term.name, history.value(term)) for term in self.query.terms)
        return ", ".join(f"{name} is {value:.4g}" for name, value in values if value is not None)


def parse(text: str) -> Rule:
    """Return the rule that `text` describes. Raises ConfigError if it is none."""
    call = _CALL.fullmatch(text)
    if call is None:
        return _expression(text)
    name = call[1]
    words = [word.strip() for word in call[2].split(",")]
    if name == "alarm" and len(words) == 1:
        return _alarm(text, words[0])
    if name == "hours" and len(words) == 1:
        return HoursRule(_number(text, words[0], "hours(X) needs a number above 0"))
    if name == "no_gain" and len(words) in (2, 3) and "/" in words[0]:
        patience = _number(text, words[1], "no_gain(METRIC, N) needs a whole number N above 0")
        margin = 0.0
        if len(words) == 3:
            margin = _number(text, words[2], "D of no_gain(METRIC, N, D) is a number", least=0)
        if patience == int(patience):
            return NoGain(words[0], int(patience), margin)
    raise _wrong(text, f"{name} has other arguments")


def _expression(text: str) -> Expression:
    try:
        query = Query(text)
    except UsageError as error:
        raise _wrong(text, error.problems[0].message) from error
    others = [term.name for term in query.terms if not term.is_metric]
    if others:
        raise _wrong(text, f"{others[0]!r} is no metric: it has no slash")
    if not query.terms:
        raise _wrong(text, "it names no metric")
    return Expression(query)


def _alarm(text: str, name: str) -> AlarmRule:
    known = [rule.name for rule in RULES]
    if name in known:
        return AlarmRule(name)
    near = closest(name, known)
    hint = f"did you mean {near!r}? " if near else ""
    raise _wrong(text, f"there is no alarm {name!r}", f"{hint}alarms: {', '.join(sorted(known))}")


def _number(text: str, word: str, message: str, least: float | None = None) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if math.isfinite(value) and (value > 0 if least is None else value >= least):
        return value
    raise _wrong(text, f"{message}, not {word!r}")


def _wrong(text: str, message: str, hint: str = FORMS) -> ConfigError:
    return ConfigError(f"the rule {text!r} is wrong: {message}", where=KEY, hint=hint)


class StopRules(Listener):
    """Listener that ends the run with the first step after which a rule holds."""

    def __init__(self, run: RunDir, config: schema.Config) -> None:
        super().__init__(run, config)
        self.rules = {text: parse(text) for text in config.trainer.stop_when}
        self.history = History(Alarms(config.alarm_limits))
        self._unknown = {name for rule in self.rules.values() for name in rule.metrics}
        for row in metric_rows(run.metrics):
            self._add(int(row["step"]), {key: row[key] for key in row if key != "step"})

    @classmethod
    def check(cls, config: schema.Config, run: Path | None, sources: Collection[str]) -> None:
        problems: list[Problem] = []
        for text in config.trainer.stop_when:
            try:
                problems += _without_effect(text, parse(text), config, sources)
            except ConfigError as error:
                problems += error.problems
        raise_problems(problems)

    def on_step(self, step: int, metrics: Mapping[str, float]) -> str | None:
        if step > self.history.step:
            self._add(step, metrics)
        self.history.seconds = self.run.seconds()
        for text, rule in self.rules.items():
            if (reason := rule.reason(self.history)) is not None:
                return f"trainer.stop_when has {text}: {reason}"
        return None

    def _add(self, step: int, row: Row) -> None:
        self.history.add(step, row)
        self._unknown -= set(row)
        if step == 0 or not any(name.startswith("val") for name in row) or not self._unknown:
            return
        for name in sorted(self._unknown):
            near = difflib.get_close_matches(name, self.history.values, 3, 0.5)
            hint = f"; similar: {', '.join(near)}" if near else ""
            LOG.warning("no step has the metric %s of %s so far%s", name, KEY, hint)
        self._unknown.clear()


def _without_effect(
    text: str, rule: Rule, config: schema.Config, sources: Collection[str]
) -> list[Problem]:
    """Return the problem of a rule that could never hold."""
    trainer = config.trainer
    if isinstance(rule, AlarmRule) and config.alarm_limits.get(rule.name) is None:
        message = f"the rule {text!r} never holds: the alarm is off"
        return [Problem(message, KEY, f"give trainer.alarms.{rule.name} a number")]
    for metric in rule.metrics:
        if not metric.startswith("val"):
            continue
        if not sources or trainer.test_freq == -1:
            hint = "set trainer.test_freq=N" if sources else "give data.val_files"
            return [Problem(f"the rule {text!r} never holds: nothing is validated", KEY, hint)]
        prefixes = [f"{group}{source}/" for group in _GROUPS for source in sources]
        if metric.startswith(_GROUPS) and not metric.startswith(tuple(prefixes)):
            names = " or ".join(f"val-core/{source}/acc/mean@1" for source in sources)
            message = f"the rule {text!r} never holds: no validation row has the source of {metric}"
            return [Problem(message, KEY, f"a metric such as {names}")]
    return []
