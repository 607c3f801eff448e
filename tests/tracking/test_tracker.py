"""The fan-out: every tracker gets everything, and none of them can stop a run."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rlctl.errors import RlctlError
from rlctl.tracking.jsonl import JsonlTracker, read_metrics
from rlctl.tracking.tracker import RunInfo, Sample, Trackers

SAMPLE = Sample("q", "a", "t", 1.0, {}, 1, "stop", "s")


@dataclass
class Notebook:
    """A tracker that writes down its calls, and fails in `log` at some steps."""

    fails_at: Sequence[int] = ()
    calls: list[Any] = field(default_factory=list)

    def start(self, run: RunInfo) -> None:
        self.calls.append(("start", run.name))

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


def test_every_tracker_gets_everything_in_order_and_phases_only_if_it_shows_them(tmp_path):
    plain, phased = Notebook(), PhaseNotebook()
    trackers = Trackers({"plain": plain, "phased": phased}, Events())
    trackers.phase("starting Ray")
    trackers.start(info(tmp_path))
    trackers.log(1, {"x": 0.5})
    trackers.generations(1, [SAMPLE], shown=[SAMPLE])
    trackers.finish("finished")
    record = [("start", "name"), ("log", 1, {"x": 0.5}), ("generations", 1, [SAMPLE]), ("finish", "finished")]
    assert plain.calls == record
    assert phased.calls == [("phase", "starting Ray"), *record]


def test_a_tracker_is_switched_off_after_three_failures_with_one_warning(tmp_path, capsys):
    events, weak, healthy = Events(), Notebook(fails_at=(2, 4, 5, 6)), Notebook()
    trackers = Trackers({"weak": weak, "healthy": healthy}, events)
    trackers.start(info(tmp_path))
    for step in range(1, 9):
        trackers.log(step, {"x": step})
    assert [call[1] for call in weak.calls if call[0] == "log"] == [1, 3]
    assert [call[1] for call in healthy.calls if call[0] == "log"] == list(range(1, 9))
    why = "log: ConnectionError: no route at 5"
    assert events.seen == [("tracker_off", {"tracker": "weak", "failures": 3, "why": why})]
    assert capsys.readouterr().err == f"warning: logger weak is switched off after 3 failures, the last in {why}\n"


def test_the_ids_that_trackers_give_the_run_are_returned(tmp_path):
    class Numbered(Notebook):
        def start(self, run: RunInfo) -> str:
            return f"{run.id}-{run.trackers.get('numbered')}-{run.resume_step}"

    resumed = RunInfo("id", "project", "name", tmp_path, 10, {}, trackers={"numbered": "old"}, resume_step=3)
    assert Trackers({"plain": Notebook(), "numbered": Numbered()}, Events()).start(resumed) == {"numbered": "id-old-3"}


def test_two_failures_are_forgiven(tmp_path, capsys):
    weak = Notebook(fails_at=(1, 3))
    trackers = Trackers({"weak": weak}, Events())
    for step in range(1, 6):
        trackers.log(step, {})
    trackers.finish("finished")
    assert weak.calls == [("log", 2, {}), ("log", 4, {}), ("log", 5, {}), ("finish", "finished")]
    assert capsys.readouterr().err == ""


def test_an_error_at_the_start_passes(tmp_path):
    class Refuses(Notebook):
        def start(self, run: RunInfo) -> None:
            raise RlctlError("no key")

    with pytest.raises(RlctlError, match="no key"):
        Trackers({"refuses": Refuses()}, Events()).start(info(tmp_path))


def test_the_first_non_finite_value_of_a_metric_is_an_event(tmp_path):
    events = Events()
    trackers = Trackers({}, events)
    trackers.log(1, {"a": 1.0, "b": math.nan, "c": math.inf})
    trackers.log(2, {"a": math.nan, "b": math.nan, "c": 1.0})
    trackers.log(3, {"a": math.nan, "b": math.nan})
    assert events.seen == [("non_finite", {"step": 1, "metrics": ["b", "c"]}), ("non_finite", {"step": 2, "metrics": ["a"]})]


def test_jsonl_is_always_there_once_and_first(tmp_path):
    trackers = Trackers.load(["console", "jsonl", "console"], Events())
    assert list(trackers.trackers) == ["jsonl", "console"]
    assert isinstance(trackers.trackers["jsonl"], JsonlTracker)


def test_an_unknown_logger_is_an_error_that_names_the_near_one():
    with pytest.raises(RlctlError, match="consol") as caught:
        Trackers.load(["consol"], Events())
    assert "console" in (caught.value.problems[0].hint or "")


def test_a_tracker_of_the_users_own_file_can_be_named_by_module(tmp_path, monkeypatch):
    (tmp_path / "my_tracker.py").write_text(
        "class Mine:\n"
        "    def start(self, run): self.path = run.folder / 'mine.txt'\n"
        "    def log(self, step, metrics): self.path.write_text(f'{step} {metrics}')\n"
        "    def generations(self, step, samples): pass\n"
        "    def finish(self, state): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    trackers = Trackers.load(["my_tracker:Mine"], Events())
    trackers.start(info(tmp_path))
    trackers.log(4, {"x": 0.5})
    trackers.finish("finished")
    assert (tmp_path / "mine.txt").read_text() == "4 {'x': 0.5}"
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 4, "x": 0.5}]


def test_the_record_gets_all_answers_and_mirrors_the_few_that_are_shown(tmp_path: Path) -> None:
    record, mirror = Notebook(), Notebook()
    trackers = Trackers({"jsonl": record, "plain": mirror}, Events())
    trackers.start(info(tmp_path))
    trackers.generations(1, [SAMPLE, SAMPLE, SAMPLE], shown=[SAMPLE])
    assert record.calls[-1] == ("generations", 1, [SAMPLE, SAMPLE, SAMPLE])
    assert mirror.calls[-1] == ("generations", 1, [SAMPLE])
