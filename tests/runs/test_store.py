"""The registry: order, selectors, runs that died without a word, and folders that are damaged."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlctl.errors import ConflictError, NotFoundError, UsageError
from rlctl.process import DriverProcess
from rlctl.runs import stop
from rlctl.runs.details import details
from rlctl.runs.listing import overview
from rlctl.runs.run import Run
from rlctl.runs.run_dir import RunDir
from rlctl.runs.stop import request_stop, run_target
from rlctl.runs.store import RunStore
from rlctl.runs.trash import check_removable
from rlctl.tracking.tracker import Sample
from tests.progress import wait_until
from tests.recorded import record

ACC = "val-core/x/acc/mean@1"


def make(
    root: Path, name: str, state: str, minute: int, project: str = "p", run_id: str | None = None
) -> RunDir:
    run = RunDir.create(root, project, name, "ppo")
    run.update(
        state=state, created=f"2026-01-01T10:{minute:02d}:00+00:00", id=run_id or f"id{minute}"
    )
    return run


def names(runs: list[Run]) -> list[str]:
    return [run.name for run in runs]


def test_active_runs_are_listed_first(tmp_path):
    make(tmp_path, "old", "finished", 1)
    make(tmp_path, "mine", "running", 2)
    make(tmp_path, "new", "failed", 4)
    make(tmp_path, "other", "stopped", 3, project="q")
    assert names(RunStore(tmp_path).runs()) == ["mine", "new", "other", "old"]


def test_missing_folder_has_no_runs(tmp_path):
    assert RunStore(tmp_path / "none").runs() == []
    with pytest.raises(NotFoundError, match="there are no runs"):
        RunStore(tmp_path / "none").find("@last")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> RunStore:
    root = tmp_path_factory.mktemp("runs")
    make(root, "ppo-a", "finished", 1, run_id="aaaa1111")
    make(root, "ppo-ab", "failed", 2, run_id="bbbb2222")
    make(root, "grpo", "finished", 3, run_id="cccc3333")
    make(root, "grpo", "finished", 4, project="q", run_id="dddd4444")
    make(root, "active", "running", 0, run_id="eeee5555")
    return RunStore(root)


@pytest.mark.parametrize(
    ("selector", "found"),
    [
        ("@last", "q/grpo"),
        ("@failed", "p/ppo-ab"),
        ("ppo-a", "p/ppo-a"),  # a whole name is not ambiguous, though another begins with it
        ("ppo-ab", "p/ppo-ab"),
        ("act", "p/active"),
        ("q/g", "q/grpo"),
        ("p/grpo", "p/grpo"),
        ("cccc", "p/grpo"),
    ],
)
def test_selectors(store, selector, found):
    run = store.find(selector)
    assert f"{run.project}/{run.name}" == found


def test_folder_selects_a_run(store):
    assert store.find(str(store.root / "q" / "grpo")).record.id == "dddd4444"


def test_ambiguous_selector_lists_the_matches(store):
    with pytest.raises(UsageError, match="'pp' names 2 runs") as caught:
        store.find("pp")
    assert caught.value.problems[0].hint == "one of: p/ppo-ab, p/ppo-a"
    with pytest.raises(UsageError, match="'grpo' names 2 runs"):
        store.find("grpo")


def test_unknown_selector_suggests_similar_names(store):
    with pytest.raises(NotFoundError, match="no run is named 'gprpo'") as caught:
        store.find("gprpo")
    assert "grpo" in (caught.value.problems[0].hint or "")
    with pytest.raises(UsageError, match="unknown selector '@best'"):
        store.find("@best")


DRIVER = """
import sys, time
from pathlib import Path
from rlctl.runs.run_dir import RunDir
RunDir.create(Path(sys.argv[1]), "p", "r", "ppo").update(state="running")
print("ready", flush=True)
time.sleep(3600)
"""


def test_killed_run_is_lost(tmp_path):
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    driver.stdout.readline()
    assert RunStore(tmp_path).find("r").state == "running"
    os.kill(driver.pid, signal.SIGKILL)
    os.waitid(os.P_PID, driver.pid, os.WEXITED | os.WNOWAIT)  # dead, but still a zombie
    assert RunStore(tmp_path).find("r").state == "lost"
    driver.wait()
    assert RunStore(tmp_path).find("r").state == "lost"
    assert RunStore(tmp_path).find("@failed").name == "r"


def test_process_is_alive(tmp_path):
    me = DriverProcess.current()
    assert me.alive(tmp_path) is True
    replace = dataclasses.replace
    assert replace(me, started=me.started + 1).alive(tmp_path) is False  # another process's number
    assert replace(me, boot_id="before the reboot").alive(tmp_path) is False
    assert replace(me, host="elsewhere").alive(tmp_path) is None
    assert replace(me, pid_namespace="pid:[1]").alive(tmp_path) is None  # no locks
    later = {**dataclasses.asdict(me), "field_of_a_later_version": 1}
    assert DriverProcess.from_dict(later) == me


CONTAINED = """
import sys, time
from dataclasses import replace
from pathlib import Path
from rlctl.runs.naming import unfinished
from rlctl.process import lock_folder
from rlctl.runs.run_dir import RunDir
run = RunDir.create(Path(sys.argv[1]), "p", "r", "ppo")
process = run.record.process
if sys.argv[2] == "record":
    process = replace(process, pid=99999999, pid_namespace="pid:[1]")
run.update(state="running", process=process)
aside = unfinished(run.path.parent)
aside.mkdir()
lock = lock_folder(aside)
print("ready", flush=True)
time.sleep(3600)
"""
UNSHARE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


@pytest.mark.parametrize("how", ["record", "namespace"])
def test_driver_in_another_container_is_alive_while_it_holds_its_lock(tmp_path, how):
    prefix = UNSHARE if how == "namespace" else []
    if prefix and (not shutil.which("unshare") or subprocess.run([*prefix, "true"]).returncode):
        pytest.skip("this user cannot create a PID namespace")
    driver = subprocess.Popen(
        [*prefix, sys.executable, "-c", CONTAINED, str(tmp_path), how], stdout=-1, text=True
    )
    assert driver.stdout is not None
    driver.stdout.readline()
    run = RunStore(tmp_path).find("r")
    assert run.record is not None
    assert not run.record.process.is_visible
    assert run.state == "running"
    for force in (False, True):
        with pytest.raises(ConflictError, match="'r' is running"):
            RunDir.reopen(run.path, force)
    with pytest.raises(ConflictError, match="the run r is running"):
        check_removable(run)
    request_stop(run_target(run), now=False)  # no signal: the number is that of another process
    assert (run.path / "stop").exists()
    RunDir.create(tmp_path, "p", "other", "ppo").finish("finished", 0)
    assert len(list((tmp_path / "p").glob(".new-*"))) == 1
    driver.kill()
    driver.wait()
    wait_until(lambda: RunStore(tmp_path).find("r").state == "lost", driver.pid, "the end")
    RunDir.create(tmp_path, "p", "soon", "ppo").finish("finished", 0)
    (abandoned,) = (tmp_path / "p").glob(".new-*")  # perhaps not locked yet: it is too new to tell
    os.utime(abandoned, (time.time() - 3600,) * 2)
    RunDir.create(tmp_path, "p", "another", "ppo").finish("finished", 0)
    assert list((tmp_path / "p").glob(".new-*")) == []
    RunDir.reopen(run.path).finish("finished", 0)


def test_of_two_processes_that_resume_a_run_one_succeeds(tmp_path):
    run = make(tmp_path, "r", "failed", 1)
    run.finish("failed", 1)
    code = (
        "import sys\nfrom pathlib import Path\nfrom rlctl.runs.run_dir import RunDir\n"
        "try: run = RunDir.reopen(Path(sys.argv[1]))\n"
        "except Exception as error: print(type(error).__name__, flush=True)\n"
        "else: print('driving', flush=True)\ninput()"
    )
    command = [sys.executable, "-c", code, str(run.path)]
    both = [subprocess.Popen(command, stdin=-1, stdout=-1, text=True) for _ in range(2)]
    results = [process.stdout.readline().strip() for process in both if process.stdout]
    for process in both:
        process.communicate("\n")
    assert sorted(results) == ["ConflictError", "driving"]
    assert RunDir(run.path).record.attempts == 2


def test_damaged_folders_are_listed_as_broken(tmp_path):
    make(tmp_path, "good", "finished", 1)
    (make(tmp_path, "no-record", "finished", 2).path / "run.json").unlink()
    (make(tmp_path, "bad-record", "finished", 3).path / "run.json").write_text("{")
    (make(tmp_path, "bad-metrics", "finished", 4).path / "metrics.jsonl").write_text(
        '{"step": 1}\nnonsense\n{"step": 2}\n'
    )
    (tmp_path / "p" / "unrelated").mkdir()
    (tmp_path / "p" / "notes.txt").write_text("")
    found = {run.name: overview(run) for run in RunStore(tmp_path).runs()}
    assert {name: each["state"] for name, each in found.items()} == {
        "good": "finished",
        "no-record": "broken",
        "bad-record": "broken",
        "bad-metrics": "finished",
    }
    assert found["good"]["problem"] is None
    assert "not a run record" in found["bad-record"]["problem"]
    assert found["no-record"]["problem"].startswith("not a run record: the file is missing")
    assert "metrics.jsonl:2" in found["bad-metrics"]["problem"]
    assert found["bad-metrics"]["step"] == 2
    for run in RunStore(tmp_path).runs():
        details(run)


def train(folder: Path) -> None:
    costs = {"timing_s/step": 2.0, "perf/total_num_tokens": 100}
    steps = {step: {"critic/score/mean": 0.25 * step} | costs for step in (1, 2, 3)}
    last = {ACC: 0.5, "critic/score/mean": float("nan")}
    samples = [Sample("q", "a", "t", float(score), {}, 1, "stop", "s") for score in (0, 1, 0)]
    record(folder, {0: {ACC: 0.25}, **steps, 4: last}, {0: samples, 4: samples})


def test_overview_and_details(tmp_path):
    run = make(tmp_path, "r", "finished", 1)
    train(run.path)
    run.checkpoint(4).mkdir()
    run.update(total_steps=4, ended="2026-01-01T10:02:30+00:00")
    found = RunStore(tmp_path).find("r")
    brief = overview(found)
    expected = {"metric": ACC, "first": 0.25, "last": 0.5, "best": 0.5, "best_step": 4}
    expected |= {"step": 4, "total_steps": 4, "tokens": 300}
    assert {name: brief[name] for name in expected} == expected
    assert found.seconds == run.record.seconds
    full = details(found)
    assert full["metrics"]["critic/score/mean"] == {
        "first": 0.25,
        "last": 0.75,
        "min": 0.25,
        "max": 0.75,
        "count": 3,
    }
    assert (full["generations"], full["checkpoints"]) == ([0, 4], ["step_000004"])


def test_a_retry_repeats_the_command_until_an_attempt_has_begun(tmp_path, monkeypatch):
    run = make(tmp_path, "r", "failed", 1)
    run.finish("failed", 1)
    commands: list[list[str]] = []

    def crash(words: list[str]) -> int:
        commands.append(words)
        if len(commands) == 2:
            RunDir.reopen(run.path).finish("failed", 1)
        return 7

    monkeypatch.setattr(stop, "_run", crash)
    first, again = ["resume", "r", "--from-step", "40", "lr=1"], ["resume", "r"]
    stop.supervise(first, again, list, run.path, 2, lambda _: None)
    assert commands == [first, first, again]
