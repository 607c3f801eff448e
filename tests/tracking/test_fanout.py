"""Tests of the fan-out: every tracker receives everything, and none can stop or block a run."""

import json
import math
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from rlctl.errors import ConfigError, ResourceError, RlctlError
from rlctl.tracking.delivery import TrackerTimeouts
from rlctl.tracking.fanout import Trackers
from rlctl.tracking.jsonl import METRICS_FILE, JsonlTracker, read_metrics
from rlctl.tracking.loggers import preflight
from rlctl.tracking.threaded import first_missing_step
from rlctl.tracking.tracker import RunInfo, Sample, Tracker
from tests.processes import run_python
from tests.recorded import record

SAMPLE = Sample("q", "a", "t", 1.0, {}, 1, "stop", "s")


@dataclass
class Notebook:
    """Tracker that records its calls, and fails in `log` at some steps."""

    fails_at: Sequence[int] = ()
    calls: list[Any] = field(default_factory=list)

    def start(self, run: RunInfo) -> str | None:
        self.calls.append(("start", run.name))
        return None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step in self.fails_at:
            raise ConnectionError(f"no route at {step}")
        self.calls.append(("log", step, dict(metrics)))

    def generations(self, step: int, samples: Sequence[Sample]) -> None:
        self.calls.append(("generations", step, list(samples)))

    def finish(self, state: str) -> None:
        self.calls.append(("finish", state))


@dataclass
class PhaseNotebook(Notebook):
    def phase(self, name: str) -> None:
        self.calls.append(("phase", name))


@dataclass
class Events:
    seen: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def __call__(self, kind: str, /, **fields: Any) -> None:
        self.seen.append((kind, fields))


def info(folder: Path) -> RunInfo:
    return RunInfo("id", "project", "name", folder, 10, {})


LONG = TrackerTimeouts(queue_size=100, start_s=300, call_s=300, finish_s=300)


def trackers_of(
    trackers: Mapping[str, Tracker],
    events: Events | None = None,
    timeouts: TrackerTimeouts = LONG,
) -> Trackers:
    return Trackers(trackers, events or Events(), timeouts)


def logged(notebook: Notebook) -> list[int]:
    return [call[1] for call in notebook.calls if call[0] == "log"]


def test_trackers_receive_everything_in_order_and_phases_only_if_they_show_them(tmp_path):
    plain, phased = Notebook(), PhaseNotebook()
    trackers = trackers_of({"plain": plain, "phased": phased})
    trackers.phase("starting Ray")
    trackers.start(replace(info(tmp_path), num_samples=5))
    trackers.phase("building the actor")
    trackers.begin()
    trackers.log(1, {"x": 0.5})
    trackers.generations(1, [SAMPLE])
    trackers.finish("finished")
    record = [
        ("start", "name"),
        ("log", 1, {"x": 0.5}),
        ("generations", 1, [SAMPLE]),
        ("finish", "finished"),
    ]
    assert plain.calls == record
    assert phased.calls == [("phase", "starting Ray"), ("phase", "building the actor"), *record]


def test_a_failure_reaches_the_trackers_that_show_it_before_the_end(tmp_path):
    class Shows(Notebook):
        def failure(self, message: str) -> None:
            self.calls.append(("failure", message))

    plain, shows = Notebook(), Shows()
    events = Events()
    trackers = trackers_of({"plain": plain, "shows": shows}, events)
    trackers.start(info(tmp_path))
    trackers.finish("failed", failure="out of memory")
    assert plain.calls == [("start", "name"), ("finish", "failed")]
    assert shows.calls == [("start", "name"), ("failure", "out of memory"), ("finish", "failed")]
    assert events.seen == [("trackers_told", {"trackers": ["plain", "shows"]})]


def test_tracker_is_disabled_after_three_failures_with_one_warning(tmp_path, caplog):
    events, weak, healthy = Events(), Notebook(fails_at=(2, 4, 5, 6)), Notebook()
    trackers = trackers_of({"weak": weak, "healthy": healthy}, events)
    trackers.start(info(tmp_path))
    for step in range(1, 9):
        trackers.log(step, {"x": step})
    trackers.finish("finished")
    assert logged(weak) == [1, 3]
    assert logged(healthy) == list(range(1, 9))
    (off, off_fields), delivered, (missed, missed_fields) = events.seen
    assert delivered == ("trackers_told", {"trackers": ["healthy"]})
    # The notebook is users' code, so that the warning names its line.
    place = f"{__file__}:{Notebook.log.__code__.co_firstlineno + 2}"
    why = f"3 failures, the last in log: ConnectionError: no route at 5 ({place})"
    assert (off, off_fields["tracker"], off_fields["why"]) == ("tracker_off", "weak", why)
    assert (missed, missed_fields["steps"]) == ("tracker_missed", [(2, 2), (4, 8)])
    (warning,) = caplog.messages
    assert warning.startswith(f"logger weak is disabled: {why}")
    assert "rlctl runs sync name --logger weak" in warning


def test_a_tracker_that_was_not_finished_is_stuck(tmp_path):
    """Its SDK may wait at exit for its server, although no call is being made."""
    release = threading.Event()

    class Confirms(Notebook):
        confirms = True

        def received(self, names: Sequence[str]) -> dict[str, set[int]]:
            release.wait()
            return {}

    weak, slow = Notebook(fails_at=(1, 2, 3)), Confirms()
    timeouts = TrackerTimeouts(100, start_s=300, call_s=300, finish_s=0.2)
    trackers = trackers_of({"weak": weak, "slow": slow}, timeouts=timeouts)
    trackers.start(info(tmp_path))
    for step in (1, 2, 3):
        trackers.log(step, {"x": 1.0})
    trackers.threaded["weak"].wait_for_end(math.inf)
    trackers.finish("finished")
    stuck = {name: delivery.is_stuck for name, delivery in trackers.threaded.items()}
    release.set()
    assert stuck["weak"]
    assert stuck["slow"]


@pytest.mark.parametrize("hangs_in", ["log", "finish"])
def test_hanging_tracker_neither_stops_nor_blocks_the_run(tmp_path, caplog, hangs_in):
    class Hangs(Notebook):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            threading.Event().wait(None if hangs_in == "log" and step == 2 else 0)

        def finish(self, state: str) -> None:
            threading.Event().wait(None if hangs_in == "finish" else 0)

    events, healthy = Events(), Notebook()
    trackers = trackers_of(
        {"hangs": Hangs(), "healthy": healthy},
        events,
        TrackerTimeouts(100, start_s=300, call_s=4.0, finish_s=8.0),
    )
    trackers.start(info(tmp_path))
    began = time.monotonic()
    for step in (1, 2, 3):
        trackers.log(step, {"x": 1.0})
    assert time.monotonic() - began < 4.0  # it did not wait for the call
    trackers.finish("finished")
    assert healthy.calls[-1] == ("finish", "finished")
    assert f"logger hangs is disabled: {hangs_in} took longer than 4 s" in caplog.text
    missed = [fields for kind, fields in events.seen if kind == "tracker_missed"]
    assert [fields["steps"] for fields in missed] == [[(2, 3)] if hangs_in == "log" else []]
    assert [(fields["exact"], fields["first"]) for fields in missed] == [(False, 0)]


def test_an_attempt_that_did_not_finish_has_delivered_nothing(tmp_path):
    """SDKs keep steps in memory, so that a call that returned is not a step that arrived."""

    class Unfinished(Notebook):
        def finish(self, state: str) -> None:
            raise ConnectionError("no route")

    class Off(Notebook):
        def generations(self, step: int, samples: Sequence[Sample]) -> None:
            raise ConnectionError("no table")

    events = Events()
    trackers = trackers_of(
        {"unfinished": Unfinished(), "off": Off(), "one": Notebook(fails_at=(2,))}, events
    )
    trackers.start(replace(info(tmp_path), num_samples=1))
    for step in (1, 2, 3):
        trackers.log(step, {"x": 1.0})
        trackers.generations(step, [SAMPLE])
    trackers.finish("finished")
    (tmp_path / "events.jsonl").write_text(
        "".join(json.dumps({"kind": kind, **fields}) + "\n" for kind, fields in events.seen)
    )
    assert [kind for kind, _ in events.seen].count("tracker_missed") == 3
    assert first_missing_step(tmp_path, "unfinished", 4) == 0
    assert first_missing_step(tmp_path, "off", 4) == 0
    assert first_missing_step(tmp_path, "one", 4) == 2


def test_tracker_with_a_full_queue_is_disabled(tmp_path, caplog):
    release = threading.Event()

    class Slow(Notebook):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            release.wait()
            super().log(step, metrics)

    slow = Slow()
    trackers = trackers_of({"slow": slow}, timeouts=TrackerTimeouts(3, 300, 300, 300))
    trackers.start(info(tmp_path))
    for step in range(1, 10):
        trackers.log(step, {})
    release.set()
    trackers.finish("finished")
    assert len(logged(slow)) <= 1
    assert caplog.text.count("3 calls are waiting (trainer.tracking.queue_size)") == 1


def test_a_full_queue_accepts_the_end_of_the_run(tmp_path):
    taken, release = threading.Event(), threading.Event()

    class Slow(Notebook):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            taken.set()
            release.wait()
            super().log(step, metrics)

    events, slow = Events(), Slow()
    trackers = trackers_of({"slow": slow}, events, TrackerTimeouts(1, 300, 300, 300))
    trackers.start(info(tmp_path))
    trackers.log(1, {})
    taken.wait()
    trackers.log(2, {})
    threading.Timer(0.5, release.set).start()
    trackers.finish("finished")
    assert logged(slow) == [1, 2]
    assert slow.calls[-1] == ("finish", "finished")
    assert events.seen == [("trackers_told", {"trackers": ["slow"]})]


def test_errors_and_timeouts_of_start_propagate(tmp_path):
    class Refuses(Notebook):
        def start(self, run: RunInfo) -> None:
            raise RlctlError("no key")

    class Breaks(Notebook):
        def start(self, run: RunInfo) -> None:
            raise OSError("no route")

    class Hangs(Notebook):
        def start(self, run: RunInfo) -> None:
            threading.Event().wait()

    for name, tracker, kind, message in [
        ("refuses", Refuses(), RlctlError, "no key"),
        ("breaks", Breaks(), RlctlError, "logger breaks failed to start: OSError: no route"),
        ("hangs", Hangs(), ResourceError, "logger hangs did not start within 0.2 s"),
    ]:
        start_s = 0.2 if name == "hangs" else 300
        trackers = trackers_of({name: tracker}, timeouts=TrackerTimeouts(10, start_s, 10, 10))
        with pytest.raises(kind, match=message):
            trackers.start(info(tmp_path))
        trackers.finish("failed")


HANGS = """
import atexit, sys, threading
from rlctl.tracking.fanout import Trackers
from rlctl.tracking.delivery import TrackerTimeouts
from rlctl.tracking.tracker import RunInfo
class Hangs:
    def start(self, run): atexit.register(threading.Event().wait)
    def log(self, step, metrics): threading.Event().wait()
    def finish(self, state): pass
trackers = Trackers({"hangs": Hangs()}, lambda *_, **__: None, TrackerTimeouts(10, 300, 0.2, 0.2))
trackers.start(RunInfo("id", "project", "name", None, 1, {}))
trackers.log(1, {"x": 1.0})
trackers.finish("finished", 3)
sys.exit(3)
"""


def test_process_exits_although_a_tracker_hangs():
    done = run_python("-c", HANGS)
    assert done.returncode == 3
    assert "logger hangs is disabled" in done.stderr


STEPS = """
import sys
from pathlib import Path
from rlctl.tracking.fanout import Trackers
from rlctl.tracking.delivery import TrackerTimeouts
from rlctl.tracking.tracker import RunInfo
timeouts = TrackerTimeouts(10000, 300, 300, 300)
trackers = Trackers.load(["tensorboard"], lambda *_, **__: None, timeouts)
trackers.start(RunInfo("id", "project", "name", Path(sys.argv[1]), 10**6, {}))
for step in range(10**6):
    trackers.log(step, {f"metric/{i}": step / (i + 1) for i in range(50)})
    print(step, flush=True)
"""


@pytest.mark.plugin("bridges")
def test_kill_9_loses_no_step_of_the_record(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", STEPS, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    printed = [int(process.stdout.readline()) for _ in range(100)]
    process.kill()
    printed += [
        int(line) for line in process.stdout.read().splitlines(keepends=True) if line.endswith("\n")
    ]
    process.wait()
    rows = read_metrics(tmp_path / METRICS_FILE)
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert len(rows) > max(printed) >= 99
    for row in (rows[99], rows[-1]):
        step = row["step"]
        assert row == {"step": step} | {f"metric/{i}": step / (i + 1) for i in range(50)}


class Numbered(Notebook):
    """Tracker that always returns the id `run_id`."""

    run_id = "new"

    def start(self, run: RunInfo) -> str:
        super().start(run)
        return self.run_id


def test_missing_steps_are_replayed_and_all_steps_under_a_new_id(tmp_path):
    """A tracker without a delivery event may lack any step, as after a killed attempt."""
    first = trackers_of({"jsonl": JsonlTracker()})
    run = replace(info(tmp_path), num_samples=1)
    first.start(run)
    for step in (0, 1, 2, 3):
        if step == 2:
            first.generations(step, [SAMPLE])
        first.log(step, {"x": step / 3, "bad": math.nan})
    first.finish("failed")
    delivered = {"kind": "trackers_told", "trackers": ["fresh", "known", "unnamed"]}
    missed = {"kind": "tracker_missed", "tracker": "weak", "steps": [[2, 2]], "exact": True}
    (tmp_path / "events.jsonl").write_text(json.dumps(delivered) + "\n" + json.dumps(missed) + "\n")
    fresh, known, unnamed, weak, killed = Numbered(), Numbered(), Notebook(), Notebook(), Notebook()
    again = trackers_of(
        {"fresh": fresh, "known": known, "unnamed": unnamed, "weak": weak, "killed": killed}
    )
    ids = again.start(replace(run, trackers={"known": "new", "fresh": "old"}, resume_step=2))
    again.log(3, {"x": 1.0})
    again.finish("finished")
    assert ids == {"fresh": "new", "known": "new"}
    assert fresh.calls[1:-1] == [
        ("log", 0, {"x": 0.0}),
        ("log", 1, {"x": 1 / 3}),
        ("generations", 2, [SAMPLE]),
        ("log", 2, {"x": 2 / 3}),
        ("log", 3, {"x": 1.0}),
    ]
    assert logged(known) == logged(unnamed) == [3]
    assert logged(weak) == [2, 3]
    assert logged(killed) == [0, 1, 2, 3]


def test_a_step_without_a_row_is_not_missed(tmp_path):
    record(tmp_path, {1: {"x": 1.0}})  # the run was not validated before its first step
    events, plain = Events(), Notebook()
    trackers = trackers_of({"plain": plain}, events)
    trackers.start(replace(info(tmp_path), resume_step=1))
    trackers.finish("finished")
    assert logged(plain) == [1]
    assert events.seen == [("trackers_told", {"trackers": ["plain"]})]


def test_non_finite_values_are_counted_and_not_sent_to_trackers(tmp_path):
    events, plain = Events(), Notebook()
    trackers = trackers_of({"plain": plain}, events)
    trackers.start(info(tmp_path))
    trackers.log(1, {"a": 1.0, "b": math.nan, "c": math.inf})
    trackers.log(2, {"a": math.nan, "b": math.nan, "c": 1.0})
    trackers.finish("finished")
    assert plain.calls[1:3] == [("log", 1, {"a": 1.0}), ("log", 2, {"c": 1.0})]
    assert events.seen == [
        ("non_finite", {"step": 1, "metrics": ["b", "c"]}),
        ("non_finite", {"step": 2, "metrics": ["a"]}),
        ("non_finite_total", {"metrics": {"b": 2, "c": 1, "a": 1}}),
        ("trackers_told", {"trackers": ["plain"]}),
    ]


def test_preflight_rejects_unknown_loggers_and_modes():
    with pytest.raises(RlctlError, match="consol") as caught:
        preflight("consol", None)
    assert "console" in (caught.value.problems[0].hint or "")
    assert preflight("console", None) == ""
    with pytest.raises(ConfigError, match="logger console has no modes"):
        preflight("console", "offline")


def test_record_gets_all_samples_and_trackers_the_selected_ones(tmp_path):
    samples = [replace(SAMPLE, prompt=str(i)) for i in range(20)]
    plain = Notebook()
    trackers = trackers_of({"jsonl": JsonlTracker(), "plain": plain})
    trackers.start(replace(info(tmp_path), num_samples=3, sample_seed=7))
    trackers.generations(1, samples)
    trackers.generations(2, samples)
    trackers.finish("finished")
    assert len((tmp_path / "generations" / "step_000001.jsonl").read_text().splitlines()) == 20
    (_, one, first), (_, two, second) = plain.calls[1:3]
    assert (one, two) == (1, 2)
    assert len(first) == 3
    assert first == second


@contextmanager
def max_file_size(size: int) -> Iterator[None]:
    """Limit every file of this process to `size` bytes, so that writes fail as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)


def test_full_disk_of_the_record_loses_no_row(tmp_path, caplog):
    trackers = trackers_of({"jsonl": JsonlTracker()})
    trackers.start(info(tmp_path))
    trackers.log(1, {"x": 1.0})
    with max_file_size((tmp_path / METRICS_FILE).stat().st_size + 7):  # room for a partial row
        trackers.log(2, {"x": 2.0})
        trackers.log(3, {"x": 3.0})
        assert [
            json.loads(line)["step"] for line in (tmp_path / METRICS_FILE).read_text().splitlines()
        ] == [1]
    trackers.finish("finished")
    assert read_metrics(tmp_path / METRICS_FILE) == [
        {"step": step, "x": float(step)} for step in (1, 2, 3)
    ]
    assert caplog.text.count("cannot write the run's record") == 1
