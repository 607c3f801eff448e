"""`rlctl watch` and `rlctl logs` of a run that another process executes."""

from __future__ import annotations

import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest

from rlctl.runs.run_dir import RunDir
from tests.forks import Forked
from tests.progress import wait_until
from tests.recorded import called, plain_environment, record

ACC = "val-core/x/acc/mean@1"
TIMEOUT_S = 300  # reached only if a command hangs

# Logs three steps and waits for a line on stdin after each. Like a worker, it writes its log before
# the run's record is marked as finished.
DRIVER = """
import sys
import termios
from pathlib import Path
from rlctl.runs.run_dir import RunDir
from rlctl.tracking.alarms import Alarms
from rlctl.tracking.fanout import Trackers
from rlctl.tracking.jsonl import JsonlTracker
from rlctl.tracking.delivery import TrackerTimeouts
from rlctl.tracking.tracker import RunInfo
run = RunDir.create(Path(sys.argv[1]), "p", "r", "ppo")
timeouts, alarms = TrackerTimeouts(10, 1.0, 1.0, 1.0), Alarms({"skipped_updates": 1})
trackers = Trackers({"jsonl": JsonlTracker()}, run.event, timeouts, alarms)
trackers.start(RunInfo("id", "p", "r", run.path, 3, {}))
run.update(state="running", total_steps=3)
log = (run.attempt / "main-0.log").open("a", buffering=1)
for step in (1, 2, 3):
    log.write(f"worker at {step}\\n")
    metrics = {"critic/score/mean": step / 4, "timing_s/step": 2.0}
    trackers.log(step, metrics | {"actor/skipped_updates": float(step == 2)})
    print("logged", flush=True)
    sys.stdin.readline()
log.write("the last word")
log.close()
run.finish("finished", 0)
"""


class Driver:
    """Process that executes a run of three steps, one per call of `next_step`."""

    def __init__(self, root: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.wait()

    def wait(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "logged\n"

    def next_step(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    driver = Driver(tmp_path / "runs")
    yield driver
    driver.process.kill()
    driver.process.wait()


def environment() -> dict[str, str]:
    return plain_environment(TERM="xterm-256color")


def start(folder: Path, *arguments: str) -> Forked:
    return Forked([*arguments], folder, environment())


def next_line(process: Forked) -> str:
    """Wait for the next line of the process's output and return it."""
    line = ""

    def read() -> bool:
        nonlocal line
        line += process.stdout.readline()
        return line.endswith("\n")

    wait_until(read, process.pid, "a line")
    return line


def rlctl(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return called(*arguments, cwd=folder)


@pytest.mark.soak
def test_watch_and_logs_follow_a_run_to_its_end(driver: Driver, tmp_path: Path) -> None:
    watching, reading = (
        start(tmp_path, "watch", "r"),
        start(tmp_path, "logs", "r", "--role", "main", "-f"),
    )
    assert next_line(watching) == "step 1/3  reward 0.250  2.0 s/step\n"
    assert next_line(reading) == "worker at 1\n"
    driver.next_step()
    driver.wait()
    assert next_line(watching) == "step 2/3  reward 0.500  2.0 s/step  eta 2.0 s\n"
    assert next_line(watching).startswith("alarm: step 2: 1 updates skipped")
    assert next_line(reading) == "worker at 2\n"
    assert watching.poll() is None
    driver.next_step()
    driver.wait()
    driver.next_step()
    out, err = watching.communicate(timeout=TIMEOUT_S)
    assert sorted(out.splitlines()) == [
        "alarm over: step 3: no more updates are skipped",
        "step 3/3  reward 0.750  2.0 s/step",
    ]
    assert watching.returncode == 0
    assert err.startswith("note: r is finished")
    assert reading.communicate(timeout=TIMEOUT_S)[0] == "worker at 3\nthe last word\n"
    assert reading.returncode == 0


def test_watch_and_logs_end_when_the_run_is_killed(driver: Driver, tmp_path: Path) -> None:
    watching, reading = start(tmp_path, "watch", "r"), start(tmp_path, "logs", "r", "-f")
    for each in (watching, reading):
        next_line(each)
    driver.process.send_signal(signal.SIGKILL)
    driver.process.wait()
    assert "note: r is lost" in watching.communicate(timeout=TIMEOUT_S)[1]
    reading.communicate(timeout=TIMEOUT_S)
    assert (watching.returncode, reading.returncode) == (0, 0)


def on_a_terminal(*words: str, cwd: Path) -> pexpect.spawn[str]:
    command = ["-m", "rlctl", *words]
    return pexpect.spawn(
        sys.executable,
        command,
        cwd=str(cwd),
        env=environment(),
        encoding="utf-8",
        dimensions=(24, 110),
        timeout=TIMEOUT_S,
    )


def test_watch_shows_a_live_panel_on_a_terminal(driver: Driver, tmp_path: Path) -> None:
    child = on_a_terminal("watch", "r", cwd=tmp_path)
    child.expect("step 1/3")
    child.expect(r"last step [\d.]+ s ago")
    driver.next_step()
    driver.wait()
    child.expect("alarm")
    child.sendintr()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130
    assert driver.process.poll() is None  # the run continues
    assert (child.before or "").rindex("\x1b[?25h") > 0  # the cursor is visible again


def stored(root: Path) -> RunDir:
    """Write a finished run of two attempts, with roles on two pools."""
    run = RunDir.create(root, "p", "r", "ppo")
    (run.path / "config.yaml").write_text(
        "trainer: {placement: {actor: main, critic: value, reward: main, pools: {}}}"
    )
    (run.attempt / "main-0.log").write_text("first attempt\n")
    run.new_attempt()
    for name, text in (
        ("main-0", "a\nb\n"),
        ("main-10", "ten\n"),
        ("main-1", "c\r\n\n"),
        ("value-0", "v1\nv2\nv3"),
    ):
        (run.attempt / f"{name}.log").write_text(text)
    run.finish("finished", 0)
    return run


def test_logs_by_role_rank_and_attempt(tmp_path: Path) -> None:
    stored(tmp_path / "runs")
    lines = rlctl(tmp_path, "logs", "r").stdout.splitlines()
    assert [line.split(" | ")[0].strip() for line in lines] == ["main-0"] * 2 + ["main-1"] * 2 + [
        "main-10"
    ] + ["value-0"] * 3
    assert rlctl(tmp_path, "logs", "r", "--role", "critic").stdout == "v1\nv2\nv3\n"
    assert rlctl(tmp_path, "logs", "r", "--role", "value", "-n", "1").stdout == "v3\n"
    assert rlctl(tmp_path, "logs", "r", "--role", "actor", "--rank", "10").stdout == "ten\n"
    assert rlctl(tmp_path, "logs", "r", "--attempt", "1").stdout == "first attempt\n"
    assert (
        rlctl(tmp_path, "logs", "r", "--rank", "0", "-f").returncode == 0
    )  # -f does not wait for a finished run


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["--attempt", "9"], "no attempt 9", "there are: 1, 2"),
        (
            ["--role", "reference"],
            "no process of role 'reference'",
            "there are: actor, critic, reward, main, value",
        ),
        (["--rank", "7"], "no process of rank 7", "there are: 0, 1, 10, 0"),
    ],
)
def test_missing_logs_are_not_found(
    tmp_path: Path, arguments: list[str], message: str, hint: str
) -> None:
    stored(tmp_path / "runs")
    done = rlctl(tmp_path, "logs", "r", *arguments)
    assert (done.returncode, done.stdout) == (4, "")
    assert message in done.stderr
    assert hint in done.stderr


def test_the_panel_restarts_when_a_run_resumes_from_an_earlier_step(tmp_path: Path) -> None:
    from rlctl.runs.run_watcher import RunWatcher
    from rlctl.runs.store import RunStore

    run = RunDir.create(tmp_path, "p", "r", "ppo")
    record(run.path, {step: {"critic/score/mean": float(step)} for step in (1, 2, 3)})
    watched = RunWatcher(RunStore(tmp_path).find("r"))
    assert len(list(watched.read())) == 3
    kept = run.metrics.read_text().splitlines(keepends=True)[:1]
    (run.path / "aside").write_text(
        "".join(kept) + '{"step": 2, "critic/score/mean": 7.0}\n{"step": 3, "critic'
    )
    (run.path / "aside").replace(run.metrics)
    assert len(list(watched.read())) == 2
    assert watched.panel.step == 2
    assert next(series for series in watched.panel.series if series.name == "reward").values == [
        1.0,
        7.0,
    ]
    assert time.monotonic() - watched.panel.began < 60


def test_runs_watch_refreshes_until_ctrl_c(driver: Driver, tmp_path: Path) -> None:
    """Show new steps and new runs, and restore the terminal at the end."""
    child = on_a_terminal("runs", "-w", cwd=tmp_path)
    before = termios.tcgetattr(child.child_fd)
    child.expect(r"running.*1/3")
    driver.next_step()
    driver.wait()
    child.expect(r"running.*2/3")
    RunDir.create(tmp_path / "runs", "p", "another", "grpo").finish("finished", 0)
    child.expect(r"another.*finished")
    child.sendintr()
    child.expect(pexpect.EOF)
    assert termios.tcgetattr(child.child_fd) == before
    child.close()
    assert child.exitstatus == 130
    assert (child.before or "").rindex("\x1b[?25h") > 0  # the cursor is visible again
    assert driver.process.poll() is None
