"""The loop of a sweep: give out trials while there is room, hear what their runs report, stop the hopeless ones, judge the ended ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rlctl.errors import ASKED, HOPELESS, ConfigError, ResourceError, RlctlError
from rlctl.monitoring.run_summary import judged_by
from rlctl.recipes.schema import Sweep
from rlctl.runs.logs import tail_of
from rlctl.runs.run_dir import RunDir
from rlctl.sweeps.child import Child
from rlctl.sweeps.record import SweepDir
from rlctl.sweeps.study import Study, Trial

POLL_S = 0.5


class Cluster(Protocol):
    """Where runs are placed."""

    def need(self, trial: Trial) -> Mapping[str, float]:
        """What one run of a trial takes. Raises ConfigError when its configuration cannot be composed, ResourceError when it asks for more
        than the whole cluster has."""
        ...

    def lacks(self, need: Mapping[str, float], pending: list[Mapping[str, float]]) -> str | None:
        """None when there is room for `need` beside what was started and has not reserved yet; otherwise a line that says what is free."""
        ...

    def overrides(self) -> list[str]:
        """The overrides that place a run here."""
        ...


@dataclass
class Scheduler:
    """Runs a sweep to its end. `on_change` is called with all children after anything happened; `say` takes one line for a person."""

    sweep: SweepDir
    settings: Sweep
    study: Study
    cluster: Cluster
    on_change: Callable[[list[Child]], None]
    say: Callable[[str], None]
    children: list[Child] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)  # trials that have been judged
    _short_since: float | None = None

    def run(self) -> None:
        """Until every trial is judged. Raises ResourceError when there is no room for a run for `wait_s` while none of ours runs,
        ConfigError when trials end without the metric that they are judged by."""
        for trial in self.study.running():  # of a sweep that died
            self._add(trial)
        while self._more() or self._live() or self._processes():
            self._hear()
            self._fill()
            self.on_change(self.children)
            if self._processes():
                time.sleep(POLL_S)

    def stop(self) -> None:
        """Stop every run, each with a checkpoint where its configuration writes any; their trials stay open and can be resumed."""
        while self._processes():
            for child in self._processes():
                child.stop(self.settings.stop_s)
                if child.poll() is not None:
                    child.state = "stopped"
            time.sleep(POLL_S / 5)
        self.on_change(self.children)

    def _processes(self) -> list[Child]:
        return [child for child in self.children if child.process is not None]

    def _live(self) -> list[Child]:
        return [
            child
            for child in self.children
            if child.state in ("waiting", "running") and child.trial.number not in self.ended
        ]

    def _more(self) -> bool:
        return (
            sum(outcome.state != "waiting" for outcome in self.study.outcomes())
            < self.study.num_trials
        )

    def _add(self, trial: Trial) -> None:
        """One child for each seed of a trial; a trial that cannot be composed has failed."""
        try:
            need = self.cluster.need(trial)
        except ConfigError as error:
            self._judge(trial, "failed", because=str(error))
            return
        first = self.sweep.record.first_seed
        for seed in range(first, first + self.settings.seeds):
            name = self.sweep.run_name(trial.number, seed)
            child = Child(trial, seed, name, self.sweep.run_folder(name), need)
            record = child.record
            if record is not None and record.state == "finished":
                child.state = "finished"
                child.read()
            self.children.append(child)
        self._judge_when_ended(trial)

    def _fill(self) -> None:
        """Start what is waiting, then ask for more, while there is room."""
        while True:
            waiting = next((child for child in self._live() if child.state == "waiting"), None)
            if waiting is None:
                if self._full() or not self._more():
                    return
                trial = self.study.ask()
                if trial is not None:
                    self._add(trial)
                continue
            if self._full() or not self._room(waiting):
                return
            waiting.start(self.sweep, self.cluster.overrides())
            self.say(f"{waiting.name} starts: {' '.join(waiting.trial.overrides)}")

    def _full(self) -> bool:
        limit = self.settings.parallel
        return (
            limit is not None and sum(child.state == "running" for child in self.children) >= limit
        )

    def _room(self, child: Child) -> bool:
        running = [each for each in self.children if each.state == "running"]
        pending = [
            each.need
            for each in running
            if (record := each.record) is None or record.state == "starting"
        ]
        lack = child.still_runs() or self.cluster.lacks(child.need, pending)
        if lack is None:
            self._short_since = None
            return True
        if running:
            self._short_since = None
            return False
        self._short_since = self._short_since or time.monotonic()
        if time.monotonic() - self._short_since > self.settings.wait_s:
            raise ResourceError(
                f"{child.name} {lack}, for {self.settings.wait_s:g} s",
                hint="sweep.wait_s sets how long to wait",
            )
        time.sleep(POLL_S)
        return False

    def _hear(self) -> None:
        for child in self.children:
            if child.state != "running":
                continue
            code = child.poll()
            if child.read():
                self._report(child.trial)
            if child.told_to_stop is not None and code is None:
                child.stop(self.settings.stop_s)
            if code is not None:
                self._ended(child, code)

    def _report(self, trial: Trial) -> None:
        """Tell the study every value that all seeds of a trial have reached, and stop the trial if that is what its rule says."""
        if trial.number in self.ended:
            return
        for step, value in sorted(self.values(trial).items()):
            self.study.report(trial, step, value)
        if self.study.should_prune(trial):
            mine = [child for child in self._of(trial) if child.state in ("waiting", "running")]
            if mine:
                self._judge(trial, "pruned")
            for child in mine:
                child.stop(self.settings.stop_s)
                child.state = "stopped" if child.state == "waiting" else child.state
                if child.record is not None:
                    RunDir(child.folder).event(
                        "pruned", sweep=self.sweep.record.name, rule=self.settings.pruner
                    )

    def _ended(self, child: Child, code: int) -> None:
        if child.told_to_stop is not None:
            child.state = "stopped"
            return
        if code == 0:
            child.state = "finished"
        else:
            retried = dict(self.sweep.record.retried)
            child.state = "failed"
            if (
                code not in (*HOPELESS, *ASKED)
                and retried.get(child.name, 0) < self.settings.retries
            ):
                retried[child.name] = retried.get(child.name, 0) + 1
                self.sweep.update(retried=retried)
                child.state = "waiting"
                self.say(f"{child.name} ended with exit code {code}; it is started again")
        self._judge_when_ended(child.trial)

    def _judge_when_ended(self, trial: Trial) -> None:
        """The last run of a trial decides: its value is the mean of the last values of all seeds, or it has failed."""
        mine = self._of(trial)
        if trial.number in self.ended or any(
            child.state in ("waiting", "running") for child in mine
        ):
            return
        failed = next((child for child in mine if child.state == "failed"), None)
        values = self.values(trial)
        if failed is not None:
            self._judge(trial, "failed", because=tail_of([self.sweep.log(failed.name)], 5))
        elif not values:
            names = sorted(
                {
                    name
                    for child in mine
                    for row in child.rows
                    for name in row
                    if name.startswith("val")
                }
            )
            because = f"no validation gave {self.settings.metric or 'a metric'}; there are: {', '.join(names) or 'none'}"
            self._judge(trial, "failed", because=because)
            if not any(outcome.values for outcome in self.study.outcomes()):
                raise ConfigError(
                    f"{because}. No other trial has one either",
                    where="sweep.metric",
                    hint="a new sweep with --metric NAME",
                )
        else:
            for step, value in sorted(values.items()):
                self.study.report(trial, step, value)
            self._judge(trial, "finished", values[max(values)])

    def _judge(
        self, trial: Trial, state: str, value: float | None = None, because: str = ""
    ) -> None:
        self.study.tell(trial, state, value)
        self.ended.add(trial.number)
        self.say(
            f"trial {trial.number} {state}{'' if value is None else f': {value:.4g}'}{because and ': ' + because}"
        )

    def _of(self, trial: Trial) -> list[Child]:
        return [child for child in self.children if child.trial.number == trial.number]

    def values(self, trial: Trial) -> dict[int, float]:
        """The mean over its seeds of a trial's metric, at the steps that every seed has validated."""
        courses = [
            child.values(metric) if (metric := judged_by(child.rows, self.settings.metric)) else {}
            for child in self._of(trial)
        ]
        shared = set.intersection(*(set(course) for course in courses)) if courses else set()
        return {step: sum(course[step] for course in courses) / len(courses) for step in shared}


def raise_if_none_finished(study: Study) -> None:
    """Raises RlctlError when not one trial has a value."""
    states = [outcome.state for outcome in study.outcomes()]
    if "finished" not in states:
        raise RlctlError(
            f"no trial finished: {states.count('failed')} failed, {states.count('pruned')} pruned",
            hint="`rlctl show` the sweep",
        )
