"""Reading of files that a run is still writing."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from rlctl.process import DriverProcess
from rlctl.runs import logs
from rlctl.runs.logs import Tail
from rlctl.runs.record import RunRecord
from rlctl.runs.run_dir import RunDir
from rlctl.runs.run_watcher import RunWatcher
from rlctl.runs.stop import StopTarget, request_stop
from rlctl.runs.store import RunStore


def test_follow_yields_what_was_written_just_before_the_end(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "p", "r", "ppo")
    log = run.attempt / "main-0.log"
    log.write_text("first\n")
    lines = logs.follow(RunStore(tmp_path).find("r"), [log], None)
    assert next(lines) == ("main-0", "first")
    with log.open("a") as file:
        file.write("second\nthird, unterminated")
    run.finish("finished", 0)
    assert [line for _, line in lines] == ["second", "third, unterminated"]


def test_tail_restarts_in_a_replaced_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    tail = Tail(path)
    assert list(tail.lines()) == []
    path.write_text("a\nb")
    assert list(tail.lines()) == ["a"]
    (tmp_path / "new").write_text("a\nbcd\n")
    (tmp_path / "new").replace(path)
    assert list(tail.lines()) == ["a", "bcd"]
    path.write_text("x\n")
    assert list(tail.lines()) == ["x"]


def test_run_that_finishes_during_a_look_is_not_lost(tmp_path: Path, monkeypatch) -> None:
    """Its record is read while it is running, its process is looked for after it has exited."""
    run = RunDir.create(tmp_path, "p", "r", "ppo")
    gone = dataclasses.replace(run.record.process, started=run.record.process.started + 1)
    run.update(state="running", process=gone)
    assert RunStore(tmp_path).find("r").state == "lost"
    alive = DriverProcess.alive

    def finish_first(process: DriverProcess, folder: Path) -> bool | None:
        monkeypatch.setattr(DriverProcess, "alive", alive)
        run.finish("finished", 0)
        return process.alive(folder)

    for find in (lambda: RunStore(tmp_path).find("r"), lambda: RunStore(tmp_path).runs()[0]):
        run.update(state="running")
        monkeypatch.setattr(DriverProcess, "alive", finish_first)
        found = find()
        assert (found.state, found.record and found.record.exit_code) == ("finished", 0)
        assert RunRecord.read(run.path / "run.json").state == "finished"


def test_request_to_a_run_that_has_just_exited_leaves_no_file(tmp_path: Path) -> None:
    here = DriverProcess.current()
    gone, elsewhere = (
        dataclasses.replace(here, started=here.started + 1),
        dataclasses.replace(here, host="elsewhere"),
    )
    request = tmp_path / "stop"
    for now in (False, True):
        request_stop(StopTarget("r", tmp_path, gone, lambda: "running", request), now)
        assert not request.exists()
    request_stop(StopTarget("r", tmp_path, elsewhere, lambda: "running", request), now=False)
    assert request.exists()


def test_step_is_shown_before_its_alarm(tmp_path: Path, monkeypatch) -> None:
    """Also where the run writes both between the two files that a watcher reads."""
    run = RunDir.create(tmp_path, "p", "r", "ppo")
    watcher = RunWatcher(RunStore(tmp_path).find("r"))
    lines = Tail.lines

    def write_after_the_first_read(tail: Tail) -> Iterator[str]:
        monkeypatch.setattr(Tail, "lines", lines)
        yield from list(tail.lines())
        run.metrics.write_text('{"step": 1, "critic/score/mean": 0.5}\n')
        run.event("alarm", name="kl", step=1, value=1.0, limit=0.5, message="", hint="")

    monkeypatch.setattr(Tail, "lines", write_after_the_first_read)
    seen = [*watcher.read(), *watcher.read()]
    assert [item.name if item else "step" for item in seen] == ["step", "kl"]
