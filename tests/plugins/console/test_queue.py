"""`rlctl queue`: order, devices, ends, and that each entry runs once, whatever is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlctl.errors import ConflictError, NotFoundError, ResourceError
from rlctl.plugins.console.queue.free_devices import choose, other_runs
from rlctl.plugins.console.queue.queue_file import Queue, others
from rlctl.plugins.console.queue.worker import LOCK, ensure_worker, start
from rlctl.process import is_locked
from rlctl.runs.run_dir import RunDir
from tests.plugins.console.queued import Stand, wait
from tests.processes import gone
from tests.recorded import called
from tests.small_disk import fill, small_disk


@pytest.fixture
def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stand:
    return Stand(tmp_path, monkeypatch)


def order(stand: Stand) -> list[str]:
    return [entry.order.name for entry in stand.queue.entries("waiting")]


def test_priorities_and_places_give_the_order(stand: Stand):
    a, b = stand.add("a"), stand.add("b")
    c = stand.add("c", priority=2)
    assert order(stand) == ["c", "a", "b"]
    assert stand.queue.move(b, 1).priority == 2
    assert order(stand) == ["b", "c", "a"]
    assert stand.queue.move(c, 9).priority == 0
    assert order(stand) == ["b", "a", "c"]
    stand.add("d")
    stand.queue.remove([a])
    assert order(stand) == ["b", "c", "d"]
    with pytest.raises(NotFoundError, match="no entry 99"):
        stand.queue.move(99, 1)
    with pytest.raises(ConflictError, match=f"entry {b} of the queue is for the run b"):
        stand.add("b")


def test_an_entry_that_does_not_fit_keeps_its_place(stand: Stand):
    one, two, last = stand.add("one"), stand.add("two", number=2), stand.add("last")
    limited = stand.add("limited", devices=["GPU 1"])
    large, huge = stand.add("large", number=3), stand.add("all", number=None)
    choices = {choice.entry.id: choice for choice in choose(stand.queue.entries(), [])}
    assert choices[one].devices == ["GPU 0"]
    assert choices[two].reason == f"needs 2 GPUs, 1 free: entry {one} has GPU 0"
    assert f"entry {two} (before it) has GPU 1" in choices[last].reason
    assert choices[limited].devices is None
    assert choices[large].reason == "needs 3 GPUs, and this machine has 2"
    assert choices[huge].reason.startswith("needs 2 GPUs, 0 free")


def test_an_entry_that_can_never_start_keeps_no_other_waiting(stand: Stand):
    never, after = stand.add("never", number=3), stand.add("after")
    choices = {choice.entry.id: choice for choice in choose(stand.queue.entries(), [])}
    assert choices[never].reason == "needs 3 GPUs, and this machine has 2"
    assert choices[after].devices == ["GPU 0"]


def test_a_gpu_that_another_process_uses_is_not_free(stand: Stand):
    entry = stand.add("a")
    (stand.here / "apps").write_text("GPU-a, 4711\n")
    [choice] = choose(stand.queue.entries(), [])
    assert choice.devices == ["GPU 1"]
    (stand.here / "apps").write_text("GPU-a, 4711\nGPU-b, 4712\n")
    [choice] = choose(stand.queue.entries(), [])
    assert choice.reason == "needs 1 GPU, 0 free: process 4711 has GPU 0, process 4712 has GPU 1"
    stand.queue.remove([entry])
    stand.add("now", now=True)
    [choice] = choose(stand.queue.entries(), [])
    assert choice.devices == ["GPU 0"]


def test_cores_of_a_run_that_somebody_started_are_not_free(tmp_path: Path):
    program = tmp_path / "rlctl"
    program.write_text("print('ready', flush=True); input()")
    for words, found in (
        (["train", "ppo"], True),
        (["runs"], False),
        (["train", "--dry-run"], False),
    ):
        command = [sys.executable, str(program), *words]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            runs = dict(other_runs([]))
            assert (process.pid in runs) == found
            assert not found or runs[process.pid] == psutil.Process(process.pid).cpu_affinity()
            assert process.pid not in dict(other_runs([process.pid]))
            process.communicate("\n")


def test_two_at_once_and_a_failed_one_stops_no_other(stand: Stand, monkeypatch):
    stand.hold()
    numbers = [stand.add("a", "exit3"), stand.add("b"), stand.add("c")]
    monkeypatch.setenv("MY_API_KEY", "sk-value-of-the-shell-0123456789")
    worker = stand.worker()
    stand.run(worker, lambda: len(stand.ran()) == 2)
    worker.step()
    assert stand.states() == ["running", "running", "waiting"]
    with pytest.raises(ConflictError, match="entry 1 is running"):
        stand.queue.remove([1])
    stand.hold(False)
    stand.run(worker, lambda: stand.states() == ["failed", "finished", "finished"])
    assert not worker.step()
    assert sorted(stand.ran())[:2] == ["a exit3 on 0", "b on 1"]
    failed = stand.entry(numbers[0])
    assert (failed.exit_code, failed.reason) == (3, "error: it is broken")
    assert "sk-value" in stand.queue.log(failed).read_text()  # of the process of the queue
    assert b"sk-value" not in stand.queue.file.read_bytes()
    assert stand.queue.file.stat().st_mode & 0o077 == 0


def test_a_pause_holds_all_but_those_for_now(stand: Stand):
    stand.add("a")
    stand.queue.pause(True)
    assert not stand.worker().step()
    stand.add("b", now=True)
    worker = stand.worker()
    stand.run(worker, lambda: stand.states() == ["waiting", "finished"])
    stand.queue.pause(False)
    stand.run(worker, lambda: stand.states() == ["finished", "finished"])


def test_processes_that_start_one_entry_at_once_run_it_once(stand: Stand):
    stand.add("a")
    [entry] = stand.queue.entries()
    processes = [start(stand.queue, entry, ["GPU 0"]) for _ in range(4)]
    codes = sorted(process.wait() for process in processes)
    assert (codes, stand.ran()) == ([0, 1, 1, 1], ["a on 0"])


def test_a_queue_that_is_killed_again_and_again_runs_each_entry_once(stand: Stand):
    names = [f"run{number}" for number in range(5)]
    for name in names:
        stand.add(name)
    for pause in (0.2, 0.5, 0.8, 1.1):
        ensure_worker(stand.queue)
        time.sleep(pause)
        with suppress(ValueError, OSError):
            worker = int((stand.queue.folder / LOCK).read_bytes())
            os.kill(worker, signal.SIGKILL)
            wait(partial(gone, worker))
    ensure_worker(stand.queue)
    ensure_worker(stand.queue)  # and started twice
    # A stand-in leaves no record, so its end is not known if the queue was dead by then.
    wait(lambda: {*stand.states()} <= {"finished", "failed"})
    assert sorted(line.split()[0] for line in stand.ran()) == names
    wait(lambda: not is_locked(stand.queue.folder, LOCK))  # it has ended
    later = stand.add("later")
    ensure_worker(stand.queue)
    wait(lambda: stand.entry(later).state == "finished")


def test_a_run_outlives_the_queue_and_its_end_is_noted(stand: Stand):
    stand.hold()
    number = stand.add("a")
    run = RunDir.create(stand.here / "runs", "p", "other", "ppo")
    worker = stand.worker()
    stand.run(worker, lambda: len(stand.ran()) == 1)
    process = stand.entry(number).process
    assert process is not None
    assert os.getsid(process.pid) == process.pid  # no signal of the terminal reaches it
    worker.lock.close()
    next_one = stand.worker()
    next_one.step()
    assert stand.states() == ["running"]
    run.path.rename(stand.here / "runs" / "p" / "a")  # as if the command had made it
    ended = RunDir(stand.here / "runs" / "p" / "a")
    ended.finish("failed", 1, ResourceError("no memory"))
    stand.hold(False)
    worker.children[number][0].wait()
    stand.run(next_one, lambda: stand.states() == ["failed"])
    assert stand.entry(number).reason == "no memory"


def test_an_entry_whose_process_is_killed_failed(stand: Stand):
    stand.hold()
    number = stand.add("a")
    worker = stand.worker()
    stand.run(worker, lambda: len(stand.ran()) == 1)
    child = worker.children.pop(number)[0]  # of another process of the queue
    child.kill()
    child.wait()
    stand.run(worker, lambda: stand.states() == ["failed"])
    assert stand.entry(number).reason == "its process was killed"


def test_an_entry_that_went_down_with_the_machine_is_resumed(stand: Stand):
    number = stand.add("a", "x")
    worker = stand.worker()
    stand.run(worker, lambda: stand.states() == ["finished"])
    RunDir.create(stand.here / "runs", "p", "a", "ppo").finish("stopped", 143)
    for restarts in range(1, 4):
        before = stand.entry(number)
        assert before.process is not None
        process = replace(before.process, boot_id="another")
        stand.queue.change(number, [before.state], state="running", process=process)
        worker.step()
        assert stand.entry(number).restarts == restarts
        stand.run(worker, lambda: stand.entry(number).state in ("finished", "stopped"))
    assert stand.ran() == ["a x on 0", *["resume a on 0"] * 3]
    stand.queue.change(number, ["finished"], state="running", process=process)
    worker.step()
    assert stand.entry(number).ended  # a machine that fails each time ends it


def test_a_full_disk_loses_no_entry_and_runs_none_twice(tmp_path: Path, monkeypatch):
    with small_disk(tmp_path / "small", "size=256k"):
        stand = Stand(tmp_path, monkeypatch)
        stand.queue = Queue(tmp_path / "small" / "queue")
        stand.add("a")
        filler = fill(tmp_path / "small")
        with pytest.raises(ResourceError, match="the queue cannot be used"):
            stand.add("b", environment={"LONG": "x" * 2**18})
        before = len(stand.states())
        process = start(stand.queue, stand.entry(1), ["GPU 0"])
        assert process.wait() != 0
        assert (stand.ran(), stand.entry(1).state) == ([], "waiting")
        filler.unlink()
        assert stand.states() == ["waiting"] * before
        assert start(stand.queue, stand.entry(1), ["GPU 0"]).wait() == 0
        assert stand.ran() == ["a on 0"]


def test_an_entry_without_its_folder_fails_and_others_run(stand: Stand):
    gone_folder = stand.add("a", cwd=str(stand.here / "removed"))
    stand.add("b")
    worker = stand.worker()
    stand.run(worker, lambda: stand.states() == ["failed", "finished"])
    assert "could not be started" in stand.entry(gone_folder).reason


def test_a_queue_that_others_can_write_is_refused(stand: Stand):
    stand.queue.folder.chmod(0o777)
    with pytest.raises(ResourceError, match="other users can write to it"):
        Queue()


def test_entries_of_another_host_name_are_named(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("RLCTL_QUEUE", raising=False)
    stand = Stand(tmp_path, monkeypatch)
    stand.queue = Queue(tmp_path / "queue-old")
    stand.add("a")
    assert others(tmp_path / "queue-new") == {tmp_path / "queue-old": 1}


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        (["add", "runs"], 2, "the queue runs train, sweep, resume, not runs"),
        (["add", "--cores", "9999", "train", "ppo", "--inline"], 2, "cores, not 9999"),
        (["add", "train", "ppo", "--detach"], 2, "cannot have --detach"),
        (["add", "train", "ppo", "trainer.total_step=2"], 3, "trainer.total_step"),
        (["add", "train", "ppo", "--nmae", "x"], 2, "--nmae"),
        (["add", "train", "ppo", "trainer.tracking.params.a.api_key=sk123456"], 2, "secrets"),
        (["rm", "7"], 4, "no entry 7"),
    ],
)
def test_what_cannot_run_is_refused_when_it_is_added(stand: Stand, line, code, message):
    done = called("queue", *line, cwd=stand.here, RLCTL_QUEUE=str(stand.queue.folder))
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr
    assert stand.queue.entries() == []


def queue(stand: Stand, *words: str) -> Any:
    """Call a command of the queue; return its document."""
    done = called("queue", *words, "--json", cwd=stand.here, RLCTL_QUEUE=str(stand.queue.folder))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_commands_of_the_queue(stand: Stand):
    assert queue(stand, "pause") == {"paused": True, "waiting": 0, "running": 0}
    line = "train ppo --inline --name mine --retries 2 trainer.total_training_steps=1"
    queue(stand, "add", "--cores", "1", *line.split())  # --json is at the end
    [run] = stand.queue.entries()
    folder = str(stand.here / "runs" / "quickstart" / "mine")
    assert run.order.words == [
        *("train", "ppo", "--name", "mine", "--inline", "--retries", "2"),
        "trainer.total_training_steps=1",
    ]
    assert run.order.again == ["resume", folder, "--retries", "2"]
    assert (run.order.folder, run.order.cwd) == (folder, str(stand.here))
    assert (run.order.kind, run.order.number) == ("core", 1)
    stand.add("other")
    queue(stand, "move", "2", "1")
    rows = queue(stand, "ls")
    assert [row["run"] for row in rows] == ["other", "mine"]
    assert rows[0]["reason"] == "the queue is paused"
    assert rows[1]["command"][:3] == ["rlctl", "train", "ppo"]
    assert queue(stand, "rm", "1", "2") == {"removed": [1, 2]}
    assert queue(stand, "start") == {"paused": False, "waiting": 0, "running": 0}


@pytest.mark.soak
def test_a_sweep_in_the_queue_has_a_name_and_continues(stand: Stand):
    queue(stand, "pause")
    queue(stand, "add", "-p", "2", "sweep", "ppo", "data.seed=1,2", "--parallel", "2")
    [sweep] = stand.queue.entries()
    assert sweep.order.words[:2] == ["sweep", "ppo"]
    assert sweep.order.name.startswith("ppo-sweep-")
    assert sweep.order.again == ["resume", sweep.order.folder]
    assert (sweep.priority, sweep.order.kind) == (2, "core")


def test_a_run_in_the_background_prints_why_it_did_not_begin(stand: Stand, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(stand.here / "bin" / "python"))
    words = ("train", "ppo", "--inline", "--detach", "--name", "mine")
    done = called(*words, "exit=3", cwd=stand.here, RLCTL_QUEUE=str(stand.queue.folder))
    assert done.returncode == 3
    (stand.here / "code").write_text("9")
    done = called(*words, cwd=stand.here, RLCTL_QUEUE=str(stand.queue.folder))
    assert (done.returncode, stand.states()) == (9, ["failed"]), done.stderr
    assert "error: it is broken" in done.stderr
    assert stand.ran()[0].startswith("train ppo --name mine --inline")
