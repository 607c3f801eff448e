"""Scheduling loop of a sweep: starts trials while resources are free, prunes and completes them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rlctl.errors import PERMANENT_FAILURES, REQUESTED_STOPS, ConfigError, ResourceError, RlctlError
from rlctl.recipes.schema import Sweep
from rlctl.runs.logs import format_tails
from rlctl.runs.run_dir import RunDir
from rlctl.sweeps.child import Child
from rlctl.sweeps.cluster import RayCluster
from rlctl.sweeps.study import Study
from rlctl.sweeps.sweep_record import SweepDir, Trial, TrialTable
from rlctl.tracking.run_summary import primary_metric

POLL_S = 0.5

log = logging.getLogger(__name__)


@dataclass
class Scheduler:
    """Scheduler of all runs of a sweep. `on_change` is called with all children after each poll."""

    sweep: SweepDir
    settings: Sweep
    study: Study
    cluster: RayCluster
    on_change: Callable[[list[Child]], None]
    children: list[Child] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)  # numbers of trials with a result
    _table: TrialTable | None = None  # as written last
    _short_since: float | None = None

    def run(self) -> None:
        """Run until every trial has a result.

        Raises ResourceError if a run does not fit for `wait_s` seconds while no other run of the
        sweep is active, and ConfigError if trials end without the objective metric.
        """
        for trial in self.study.running():  # started by an earlier process of this sweep
            self._add(trial)
        self._show()  # their runs may have been resumed by themselves, and have ended
        while self._more() or self._active() or self._processes():
            self._poll()
            self._start_runs()
            self._show()
            if self._processes():
                time.sleep(POLL_S)

    def stop(self) -> None:
        """Stop every run, which saves a checkpoint; the sweep can be resumed."""
        while self._processes():
            for child in self._processes():
                child.stop(self.settings.stop_s)
                if child.poll() is not None:
                    child.state = "stopped"
            time.sleep(POLL_S / 5)
        self._show()

    def _show(self) -> None:
        """Write the table of all trials if it has changed, and call `on_change`."""
        outcomes = self.study.outcomes()
        if self._table is None or self._table.outcomes != outcomes:
            self._table = TrialTable(outcomes, self.study.importances())
            self.sweep.write_table(self._table)
        self.on_change(self.children)

    def _processes(self) -> list[Child]:
        return [child for child in self.children if child.process is not None]

    def _active(self) -> list[Child]:
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
        """Add one child per seed of a trial; a trial that cannot be composed fails."""
        try:
            need = self.cluster.need(trial)
        except ConfigError as error:
            self._complete(trial, "failed", reason=str(error))
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
        self._complete_if_ended(trial)

    def _start_runs(self) -> None:
        """Start waiting runs, then those of new trials, while resources are free."""
        while True:
            waiting = next((child for child in self._active() if child.state == "waiting"), None)
            if waiting is None:
                if self._full() or not self._more():
                    return
                trial = self.study.ask()
                if trial is not None:
                    self._add(trial)
                continue
            if self._full() or not self._fits(waiting):
                return
            waiting.start(self.sweep, self.cluster)
            log.info("%s starts: %s", waiting.name, " ".join(waiting.trial.overrides))

    def _full(self) -> bool:
        limit = self.settings.parallel
        return (
            limit is not None and sum(child.state == "running" for child in self.children) >= limit
        )

    def _fits(self, child: Child) -> bool:
        """Return True if the run fits now; raise ResourceError after waiting `wait_s` in vain."""
        running = [child for child in self.children if child.state == "running"]
        pending = [
            child.need
            for child in running
            if (record := child.record) is None or record.state == "starting"
        ]
        shortage = child.old_process() or self.cluster.shortage(child.need, pending)
        if shortage is None:
            self._short_since = None
            return True
        if running:
            self._short_since = None
            return False
        self._short_since = self._short_since or time.monotonic()
        if time.monotonic() - self._short_since > self.settings.wait_s:
            raise ResourceError(
                f"{child.name} {shortage}, for {self.settings.wait_s:g} s",
                hint="free resources, or wait longer with sweep.wait_s",
            )
        time.sleep(POLL_S)
        return False

    def _poll(self) -> None:
        """Read the metrics and exit codes of all running children."""
        for child in self.children:
            if child.state != "running":
                continue
            code = child.poll()
            if child.read():
                self._report(child.trial)
            if child.stop_requested_at is not None and code is None:
                child.stop(self.settings.stop_s)
            if code is not None:
                self._ended(child, code)

    def _report(self, trial: Trial) -> None:
        """Report the values that all seeds of a trial have reached, and stop it if it is pruned."""
        if trial.number in self.ended:
            return
        for step, value in sorted(self.values(trial).items()):
            if step > 0:  # the validation before training says nothing about the trial's values
                self.study.report(trial, step, value)
        if self.study.should_prune(trial):
            open_runs = [
                child for child in self._runs_of(trial) if child.state in ("waiting", "running")
            ]
            if open_runs:
                self._complete(trial, "pruned", reason=f"by the rule {self.settings.pruner}")
            for child in open_runs:
                child.stop(self.settings.stop_s)
                if child.state == "waiting":
                    child.state = "stopped"
                if child.record is not None:
                    RunDir(child.folder).event(
                        "pruned", sweep=self.sweep.record.name, rule=self.settings.pruner
                    )

    def _ended(self, child: Child, code: int) -> None:
        if child.stop_requested_at is not None:
            child.state = "stopped"
            return
        if code == 0:
            child.state = "finished"
        else:
            retried = dict(self.sweep.record.retried)
            child.state = "failed"
            if (
                code not in (*PERMANENT_FAILURES, *REQUESTED_STOPS)
                and retried.get(child.name, 0) < self.settings.retries
            ):
                retried[child.name] = retried.get(child.name, 0) + 1
                self.sweep.update(retried=retried)
                child.state = "waiting"
                log.info("%s ended with exit code %d and is restarted", child.name, code)
        self._complete_if_ended(child.trial)

    def _complete_if_ended(self, trial: Trial) -> None:
        """Complete a trial if all runs have ended; its value is the mean of their last values."""
        runs = self._runs_of(trial)
        if trial.number in self.ended or any(
            child.state in ("waiting", "running") for child in runs
        ):
            return
        failed = next((child for child in runs if child.state == "failed"), None)
        values = self.values(trial)
        if failed is not None:
            self._complete(trial, "failed", reason=format_tails([self.sweep.log(failed.name)], 5))
        elif not values:
            self._fail_without_metric(trial)
        else:
            for step, value in sorted(values.items()):
                self.study.report(trial, step, value)
            last = values[max(values)]
            if math.isfinite(last):
                self._complete(trial, "finished", last)
            else:
                self._complete(trial, "failed", reason="its last value is not finite")

    def _fail_without_metric(self, trial: Trial) -> None:
        """Fail a trial without values; raise ConfigError if no other trial has a value either."""
        names = sorted(
            {
                name
                for child in self._runs_of(trial)
                for row in child.rows
                for name in row
                if name.startswith("val")
            }
        )
        reason = (
            f"no validation logged {self.settings.metric or 'a metric'}; "
            f"validation metrics: {', '.join(names) or 'none'}"
        )
        self._complete(trial, "failed", reason=reason)
        if not any(outcome.values for outcome in self.study.outcomes()):
            raise ConfigError(
                f"{reason}, and no other trial has a value",
                where="sweep.metric",
                hint="start a new sweep with --metric NAME",
            )

    def _complete(
        self, trial: Trial, state: str, value: float | None = None, reason: str = ""
    ) -> None:
        """Record the result of a trial and log it."""
        self.study.tell(trial, state, value, reason)
        self.ended.add(trial.number)
        detail = "" if value is None else f": {value:.4g}"
        log.info("trial %d %s%s%s", trial.number, state, detail, reason and ": " + reason)

    def _runs_of(self, trial: Trial) -> list[Child]:
        return [child for child in self.children if child.trial.number == trial.number]

    def values(self, trial: Trial) -> dict[int, float]:
        """Return a trial's objective by step: the mean over seeds, at steps that all have."""
        per_seed: list[dict[int, float]] = []
        for child in self._runs_of(trial):
            values: dict[int, float] = {}
            if metric := primary_metric(child.rows, self.settings.metric):
                values = child.values(metric)
            per_seed.append(values)
        if not per_seed:
            return {}
        common = set.intersection(*(set(values) for values in per_seed))
        return {step: sum(values[step] for values in per_seed) / len(per_seed) for step in common}


def raise_if_none_finished(study: Study) -> None:
    """Raise RlctlError if no trial has finished."""
    states = [outcome.state for outcome in study.outcomes()]
    if "finished" not in states:
        raise RlctlError(
            f"no trial finished: {states.count('failed')} failed, {states.count('pruned')} pruned",
            hint="run `rlctl show SWEEP` for the reasons",
        )
