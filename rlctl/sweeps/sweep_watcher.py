"""Live view of a sweep, or of one of its trials, read from the folders of its runs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from rlctl.runs.links import refuse_links
from rlctl.runs.logs import POLL_S
from rlctl.runs.run import is_run, read_run
from rlctl.runs.run_watcher import RunWatcher
from rlctl.sweeps.sweep_record import Outcome, SweepDir
from rlctl.tracking.alarms import Alarm

OPEN = ("waiting", "running")  # states of a trial without a result


class SweepWatcher:
    """Reader of the runs of a sweep; of one trial if `trial` is its number."""

    def __init__(self, sweep: SweepDir, trial: int | None) -> None:
        self.sweep = sweep
        self.trial = trial
        self.runs: dict[int, dict[str, RunWatcher]] = {}  # by number of the trial and name
        self.outcomes: Sequence[Outcome] = ()
        self.ended = False

    def follow(self) -> Iterator[tuple[RunWatcher, Alarm | None] | None]:
        """Yield each run with what its `read` yields, and None after each look at all runs."""
        while True:
            yield from self._look()
            yield None
            if self.ended:
                return
            time.sleep(POLL_S)

    def _look(self) -> Iterator[tuple[RunWatcher, Alarm | None]]:
        self.sweep = SweepDir(self.sweep.path)
        over = self.sweep.state != "running"  # before reading, so that nothing is lost
        table = self.sweep.read_table()
        self.outcomes = [
            outcome
            for outcome in (table.outcomes if table else ())
            if self.trial in (None, outcome.trial.number)
        ]
        for outcome in self.outcomes:
            self._find_runs(outcome.trial.number)
        for runs in self.runs.values():
            for watcher in runs.values():
                for alarm in watcher.look():
                    yield watcher, alarm
        has_result = all(outcome.state not in OPEN for outcome in self.outcomes)
        idle = all(watcher.ended for runs in self.runs.values() for watcher in runs.values())
        self.ended = over or (self.trial is not None and has_result and idle)

    def _find_runs(self, trial: int) -> None:
        """Add the runs of a trial that have started since the last look."""
        known = self.runs.setdefault(trial, {})
        first = self.sweep.record.first_seed
        seeds = self.sweep.record.settings["seeds"]
        for seed in range(first, first + seeds):
            name = self.sweep.run_name(trial, seed)
            folder = self.sweep.run_folder(name)
            if name not in known and is_run(folder):
                known[name] = RunWatcher(refuse_links(read_run(folder)))
