"""All trackers of a run behind one interface.

The run's record and the console are called directly; every other tracker has a thread.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Self

from rlctl.tracking.alarms import EVENT, OVER, Alarms
from rlctl.tracking.delivery import (
    MAX_FAILURES,
    Call,
    Delivery,
    TrackerTimeouts,
    log_call,
    sample_calls,
)
from rlctl.tracking.jsonl import RESPONSES
from rlctl.tracking.loggers import make_tracker
from rlctl.tracking.tracker import Event, RunInfo, Sample, ShowsPhases, Tracker

if TYPE_CHECKING:
    from rlctl.tracking.threaded import ThreadedDelivery

RECORD = "jsonl"  # every run has this tracker: its files are the source of truth

log = logging.getLogger(__name__)


@dataclass
class Trackers:
    """Fan-out to all trackers of a run.

    Errors from `start` propagate: they occur before training. Later errors never stop the run: a
    tracker that fails `MAX_FAILURES` times, hangs or lags is disabled with one warning, and `rlctl
    runs sync` can send the steps that it missed. The record is never disabled: while it cannot be
    written (a full disk), it keeps its rows in memory and retries at the next step.
    """

    trackers: Mapping[str, Tracker]
    event: Event
    timeouts: TrackerTimeouts
    alarms: Alarms | None = None
    system: Callable[[], Mapping[str, float]] | None = None  # metrics of machines, not recorded
    run: RunInfo | None = None  # from `start` on, like `threaded`
    threaded: dict[str, ThreadedDelivery] = field(default_factory=dict[str, "ThreadedDelivery"])
    num_non_finite: Counter[str] = field(default_factory=Counter[str])
    _warned: set[str] = field(default_factory=set[str])

    def __post_init__(self) -> None:
        self.direct = {
            name: Delivery(name, tracker, max_failures=math.inf if name == RECORD else MAX_FAILURES)
            for name, tracker in self.trackers.items()
            if name == RECORD or isinstance(tracker, ShowsPhases)
        }

    @classmethod
    def load(
        cls,
        names: Sequence[str],
        event: Event,
        timeouts: TrackerTimeouts,
        alarms: Alarms | None = None,
        params: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Self:
        """Build the trackers of these entry points, the record first; `params` are their settings.

        Raises ConfigError for unknown names or settings, MissingExtraError for missing packages.
        """
        names = list(dict.fromkeys([RECORD, *names]))
        trackers = {name: make_tracker(name, params or {}) for name in names}
        return cls(trackers, event, timeouts, alarms)

    def start(self, run: RunInfo) -> dict[str, str]:
        """Start the record and, in parallel, the threaded trackers; return run ids by logger.

        A resumed run's threaded trackers receive the recorded steps that they may lack.
        """
        self.run = run
        if RECORD in self.direct:
            self.trackers[RECORD].start(run)
        others = {name: each for name, each in self.trackers.items() if name not in self.direct}
        if not others:
            self._warn_once()
            return {}
        from rlctl.tracking.destination import announce
        from rlctl.tracking.threaded import start_threads

        with self._captured_output():
            self.threaded = start_threads(others, self.timeouts, run)
            ids = {name: delivery.wait_for_start() for name, delivery in self.threaded.items()}
        self._warn_once()
        started = [name for name in self.threaded if self.threaded[name].disabled_reason is None]
        announce({name: self.trackers[name] for name in started}, self._record_event)
        return {name: run_id for name, run_id in ids.items() if run_id is not None}

    def begin(self) -> None:
        """Start the trackers that show phases, after the startup of the run."""
        shown = {name: delivery for name, delivery in self.direct.items() if name != RECORD}
        self._send(Call("start", (self.run,)), shown)

    def phase(self, name: str) -> None:
        """Report the phase that begins to the trackers that show phases."""
        self._send(Call("phase", (name,)), self.direct)

    def episodes(self, states: Mapping[str, int]) -> None:
        """Report the number of episodes by state to the trackers that show it."""
        self._send(Call("episodes", (states,)), self.direct)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step; threaded trackers receive the finite ones.

        The first NaN or infinity of each metric is recorded as an event. Raises alarms.
        """
        self._send(Call("log", (step, metrics), step), self.direct)
        non_finite = [name for name, value in metrics.items() if not math.isfinite(value)]
        if first := sorted(set(non_finite) - set(self.num_non_finite)):
            self._record_event("non_finite", step=step, metrics=first)
        self.num_non_finite.update(non_finite)
        system = self.system() if self.system else {}
        self._send(log_call(step, {**metrics, **system}), self.threaded)
        if self.alarms is None:
            return
        for alarm in self.alarms.add({**metrics, "step": step}):
            fields = asdict(alarm)
            kind = EVENT
            if fields.pop("over"):
                kind = OVER
            self._record_event(kind, **fields)
            self._send(Call("alarm", (alarm,)), {**self.direct, **self.threaded})

    def trained_on(self, step: int, samples: Sequence[Sample]) -> None:
        """Record some of the responses that a step has learned from."""
        if RECORD in self.direct:
            self.direct[RECORD].send(Call("trained_on", (step, samples), step))

    def responses(self, step: int, samples: Sequence[Sample]) -> None:
        """Record all responses that a step has learned from."""
        if RECORD in self.direct:
            self.direct[RECORD].send(Call("responses", (step, samples), step))
            self._warn_once()

    @property
    def not_certain(self) -> bytes:
        """Rows of metrics that may not be on disk, for the checkpoint of their step."""
        return getattr(self.trackers.get(RECORD), "not_certain", b"")

    def generations(self, step: int, samples: Sequence[Sample]) -> None:
        """Record all validation samples of a step; send the selected few to threaded trackers."""
        self._send(Call("generations", (step, samples), step), self.direct)
        if self.run:
            for call in sample_calls(self.run, step, samples):
                self._send(call, self.threaded)

    def finish(self, state: str, exit_code: int | None = None, failure: str | None = None) -> None:
        """Close all trackers, and wait for them at most `finish_s` seconds.

        If `exit_code` is given and a tracker is stuck, the process exits with this code as soon as
        its main thread ends. `failure` is the message of the error that ended the run.
        """
        if self.num_non_finite:
            self._record_event("non_finite_total", metrics=dict(self.num_non_finite))
        self._send(Call("finish", (state,)), self.direct)
        self._report_lost()
        if self.threaded:
            self._finish_threads(state, exit_code, failure)

    def _finish_threads(self, state: str, exit_code: int | None, failure: str | None) -> None:
        from rlctl.tracking.threaded import DELIVERED, MISSED, force_exit_after_main

        deadline = time.monotonic() + self.timeouts.finish_s
        started = [delivery for delivery in self.threaded.values() if delivery.has_started]
        with self._captured_output():
            for delivery in started:
                if failure is not None:
                    delivery.send(Call("failure", (failure,)))
                delivery.send(Call("finish", (state,)))
            for delivery in started:
                delivery.wait_for_end(deadline)
        self._warn_once()
        stuck = [delivery.tracker for delivery in self.threaded.values() if delivery.is_stuck]
        if stuck and exit_code is not None:
            force_exit_after_main(exit_code, stuck)
        if complete := [delivery for delivery in started if delivery.is_complete]:
            offline = [delivery.name for delivery in complete if delivery.offline is not None]
            fields: dict[str, list[str]] = {}
            if offline:
                fields["offline"] = offline
            names = [delivery.name for delivery in complete]
            self._record_event(DELIVERED, trackers=names, **fields)
        for delivery in started:
            if not delivery.is_complete:
                self._record_event(MISSED, **delivery.shortfall())

    def _captured_output(self) -> contextlib.AbstractContextManager[None]:
        """Keep what SDKs print from stdout, which is for data, and from the console."""
        others = {name: each for name, each in self.trackers.items() if name not in self.direct}
        if not others:
            return contextlib.nullcontext()
        from rlctl.tracking.sdk_output import captured

        return captured(self.run, others)

    def _report_lost(self) -> None:
        """Report the training responses that were never written."""
        for (kind, step), reason in getattr(self.trackers.get(RECORD), "lost", {}).items():
            if kind == RESPONSES:
                log.warning("the responses of step %d are not written: %s", step, reason)
                self._record_event("rollouts_not_written", step=step, reason=reason)

    def _send(self, call: Call, deliveries: Mapping[str, Delivery]) -> None:
        for delivery in deliveries.values():
            delivery.send(call)
        self._warn_once()

    def _warn_once(self) -> None:
        """Warn once per disabled tracker, and once if the record cannot be written."""
        for name, delivery in {**self.direct, **self.threaded}.items():
            self._warn_of_tables(name)
            reason = delivery.disabled_reason
            if name == RECORD:
                reason = delivery.last_error
            if reason is None or name in self._warned:
                continue
            self._warned.add(name)
            if name == RECORD:
                text = "its rows stay in memory and each step tries again"
                log.warning("cannot write the run's record; %s: %s", text, reason)
                continue
            hint = ""
            if self.run and name in self.threaded:
                sync = f"`rlctl runs sync {self.run.name} --logger {name}`"
                hint = f"; {sync} sends the missed steps later"
            log.warning("logger %s is disabled: %s%s", name, reason, hint)
            self._record_event("tracker_off", **delivery.shortfall())

    def _warn_of_tables(self, name: str) -> None:
        apart = self.threaded[name].apart if name in self.threaded else None
        if (
            apart is None
            or apart.disabled_reason is None
            or (mark := f"{name} tables") in self._warned
        ):
            return
        self._warned.add(mark)
        log.warning("logger %s gets no more samples: %s", name, apart.disabled_reason)
        self._record_event("tracker_off", tracker=name, why=apart.disabled_reason, steps=[])

    def _record_event(self, kind: str, **fields: Any) -> None:
        with contextlib.suppress(OSError):  # the disk of the record may be full
            self.event(kind, **fields)
