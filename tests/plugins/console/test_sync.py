"""`rlctl runs sync`: a logger gets what it missed, once, and the whole run where it has nothing."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from rlctl.errors import ConflictError, RlctlError, UsageError
from rlctl.plugins.console.sync import sync
from rlctl.runs.run_dir import RunDir
from rlctl.runs.store import RunStore
from rlctl.runs.tracked import run_info
from rlctl.tracking.json_lines import read_lines
from rlctl.tracking.jsonl import generations_file, metric_rows
from tests.recorded import record
from tests.tracking.real import tensorboard_curves

NAME = "noted_down:Notes"
# Writes each call to a file, as `step` or `=step` for samples; raises at the steps in `refused`.
NOTES = """
from pathlib import Path
class Notes:
    def start(self, run):
        self.folder = run.folder
        print("hello")
        self.say("start")
        return (run.folder / "id").read_text()
    def say(self, what):
        with (self.folder / "notes").open("a") as file:
            print(what, file=file)
    def log(self, step, metrics):
        refused = self.folder / "refused"
        if refused.exists() and str(step) in refused.read_text().split():
            raise ConnectionError("no route")
        self.say(step)
    def generations(self, step, samples): self.say(f"={step}")
    def finish(self, state): self.say(state)
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run of steps 0 to 9 whose logger missed step 1, and was switched off after step 3."""
    (tmp_path / "noted_down.py").write_text(NOTES)
    monkeypatch.syspath_prepend(tmp_path)
    made = RunDir.create(tmp_path / "runs", "house", "first", "ppo")
    tracking = {"modes": {}, "tags": [], "description": None, "queue_size": 1}
    tracking |= {"start_s": 10.0, "call_s": 10.0, "finish_s": 10.0}
    trainer = {"seed": 1, "log_val_generations": 0, "tracking": tracking}
    trainer["logger"] = ["console", NAME]
    made.write_config(yaml.safe_dump({"trainer": trainer}), {})
    record(made.path, {step: {"x": float(step)} for step in range(10)})
    (made.path / "id").write_text("known")
    made.update(total_steps=9, trackers={NAME: "known"})
    made.event("tracker_off", tracker=NAME, why="a test", steps=[[1, 1], [4, 5]])
    made.event("tracker_missed", tracker=NAME, why="a test", steps=[[1, 1], [4, 9]])
    return made


def sent_by(run: RunDir, **choices: int) -> list[str]:
    """Return the calls that the logger receives in one sync."""
    notes = run.path / "notes"
    notes.unlink(missing_ok=True)
    sync(RunStore(run.path.parent.parent).find("first"), NAME, **choices)
    return notes.read_text().split() if notes.exists() else []


def test_sync_sends_all_steps_of_an_attempt_whose_logger_was_switched_off(run, capsys):
    with pytest.raises(ConflictError, match="first is starting"):
        sent_by(run)
    run.finish("finished", 0)
    assert sent_by(run) == ["start", *map(str, range(10)), "finished"]
    assert sent_by(run) == []
    assert sent_by(run, first=8) == ["start", "8", "9", "finished"]
    assert capsys.readouterr().out == "", "stdout is for data, whatever a logger prints"


@pytest.mark.parametrize("logger", ["jsonl", "console"])
def test_sync_refuses_the_record_and_the_console(run, logger):
    run.finish("finished", 0)
    rows = run.metrics.read_text()
    with pytest.raises(UsageError, match=f"{logger} shows the run's record"):
        sync(RunStore(run.path.parent.parent).find("first"), logger, first=0)
    assert run.metrics.read_text() == rows


def test_sync_repeats_steps_of_a_killed_attempt(run):
    run.event("resume", step=7)
    run.finish("stopped", 130)
    assert sent_by(run) == ["start", *map(str, range(10)), "stopped"]
    run.event("resume", step=7)
    run.event("trackers_told", trackers=["other"])
    assert sent_by(run) == ["start", "8", "9", "stopped"]
    run.event("resume", step=7)
    run.event("trackers_told", trackers=["other", NAME])
    assert sent_by(run) == []


def test_interrupted_replay_is_completed_by_the_next_sync(run):
    run.finish("finished", 0)
    (run.path / "id").write_text("other")
    (run.path / "refused").write_text("2 3 4")
    with pytest.raises(RlctlError, match="3 failures"):
        sent_by(run)
    (run.path / "refused").unlink()
    assert sent_by(run) == ["start", *map(str, range(10)), "finished"]
    run.event("resume", step=5)
    run.event("tracker_missed", tracker=NAME, why="off", steps=[], exact=False, first=6)
    assert sent_by(run) == ["start", *map(str, range(6, 10)), "finished"]


def test_samples_that_cannot_be_read_are_skipped(run, caplog):
    run.finish("finished", 0)
    config = yaml.safe_load((run.path / "config.yaml").read_text())
    config["trainer"]["log_val_generations"] = 1
    (run.path / "config.yaml").write_text(yaml.safe_dump(config))
    for step, line in ((3, '{"input": "1 + 1", "output": "2"}'), (4, '{"episode": "none"}')):
        generations_file(run.path, step).parent.mkdir(exist_ok=True)
        generations_file(run.path, step).write_text(line + "\n")
    assert sent_by(run) == ["start", *map(str, range(10)), "finished"]
    assert [text.split(":")[0] for text in caplog.messages] == [
        f"the samples of step {step} are not replayed" for step in (3, 4)
    ]


def test_steps_that_cannot_be_replayed_are_reported(run, monkeypatch):
    run.finish("finished", 0)

    def unreadable(path: Path):
        if threading.current_thread() is not threading.main_thread():
            yield {"step": 1, "x": 1.0}
            raise PermissionError(path)
        yield from metric_rows(path)

    monkeypatch.setattr("rlctl.tracking.threaded.metric_rows", unreadable)
    with pytest.raises(RlctlError, match="did not accept all steps"):
        sent_by(run)
    monkeypatch.undo()
    events = list(read_lines(run.path / "events.jsonl"))[-2:]
    assert [event["kind"] for event in events] == ["tracker_synced", "tracker_missed"]
    assert (events[0]["num_steps"], events[1]["steps"]) == (1, [[0, 0], [2, 9]])


def test_refused_steps_are_sent_by_the_next_sync(run):
    run.finish("failed", 1)
    (run.path / "refused").write_text("5 7")
    with pytest.raises(
        RlctlError, match="did not accept all steps: log: ConnectionError: no route"
    ):
        sent_by(run)
    (run.path / "refused").unlink()
    assert sent_by(run) == ["start", *map(str, range(5, 10)), "failed"]
    assert sent_by(run) == []


@pytest.mark.plugin("bridges")
def test_tensorboard_curves_are_in_order_of_steps(run):
    from rlctl.plugins.bridges.tensorboard import TensorBoardTracker

    tracker = TensorBoardTracker()
    config = yaml.safe_load((run.path / "config.yaml").read_text())
    run.update(trackers={"tensorboard": tracker.start(run_info(run.record, run.path, config, 9))})
    for step in (0, 2, 3, 4, 5):
        tracker.log(step, {"x": float(step)})
    tracker.finish("stopped")
    run.event("tracker_missed", tracker="tensorboard", why="a test", steps=[[1, 1], [6, 9]])
    run.finish("stopped", 130)
    sync(RunStore(run.path.parent.parent).find("first"), "tensorboard")
    assert list(tensorboard_curves(run.path)["scalars"]["x"].items()) == [
        (step, float(step)) for step in range(10)
    ]


@pytest.mark.parametrize(("given", "tags"), [("wide", ["wide"]), (["a", "b"], ["a", "b"])])
def test_a_single_tag_is_not_divided_into_letters(run, given, tags):
    config = yaml.safe_load((run.path / "config.yaml").read_text())
    config["trainer"]["tracking"]["tags"] = given
    assert run_info(run.record, run.path, config, 9).tags == tags


SHOWS = """
class Blind:
    start = log = finish = None

class Shows(Blind):
    shows_samples = True
"""


def test_samples_go_by_default_to_loggers_that_show_them(run, tmp_path, monkeypatch):
    (tmp_path / "showing.py").write_text(SHOWS)
    blind = ["console", "showing:Blind"]
    config = yaml.safe_load((run.path / "config.yaml").read_text())
    for number, loggers, expected in (
        (None, blind, 0),
        (None, "console", 0),
        (None, [*blind, "showing:Shows"], 8),
        (None, "showing:Shows", 8),
        (0, "showing:Shows", 0),
        (3, blind, 3),
    ):
        config["trainer"] |= {"log_val_generations": number, "logger": loggers}
        assert run_info(run.record, run.path, config, 9).num_samples == expected


def test_trackers_receive_the_provenance_of_a_run(run):
    git = {"commit": "c0ffee", "diff_sha256": None}
    record = replace(run.record, sweep="lrs", attempts=2, git=git)
    config = yaml.safe_load((run.path / "config.yaml").read_text())
    info = run_info(record, run.path, config, 9)
    assert (info.recipe, info.sweep, info.attempt, info.commit) == ("ppo", "lrs", 2, "c0ffee")
    assert run_info(replace(record, git=None), run.path, config, 9).commit is None


def test_a_logger_learns_which_of_its_runs_were_killed(run, tmp_path):
    dead = replace(run.record.process, pid=2**22 + 1)
    killed = RunDir.create(tmp_path / "runs", "house", "second", "ppo")
    killed.update(trackers={NAME: "s"}, process=dead)
    RunDir.create(tmp_path / "runs", "house", "third", "ppo").update(process=dead)
    config = yaml.safe_load((run.path / "config.yaml").read_text())
    assert run_info(run.record, run.path, config, 9).lost(NAME) == ["s"]


ALERTS = (
    NOTES.replace("class Notes", "class Alerts")
    + """
    def alarm(self, alarm): self.say(f"{alarm.name}{'-' if alarm.over else '+'}{alarm.step}")
"""
)


def test_replayed_steps_have_their_alarms_once(run, tmp_path):
    (tmp_path / "alerting.py").write_text(ALERTS)
    fields = {"value": 1.0, "limit": 0.5, "message": "high", "hint": "lower it"}
    run.event("alarm", name="kl", step=2, **fields)
    run.event("alarm", name="length", step=6, **fields)  # of an attempt that was killed
    run.event("resume", step=5)
    run.event("alarm_over", name="kl", step=7, **fields)
    run.finish("finished", 0)
    sync(RunStore(run.path.parent.parent).find("first"), "alerting:Alerts")
    said = (run.path / "notes").read_text().split()
    assert said == ["start", *"012", "kl+2", *"34567", "kl-7", *"89", "finished"]
