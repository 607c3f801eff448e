"""Ctrl-C and SIGTERM: the run records how it ended and no process remains."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.e2e.command import (
    metrics,
    rlctl,
    start,
    wait_for_steps,
    wait_until_gone,
    with_marker,
)
from tests.e2e.killed_runs import KILL_AT, LOGGER, WRITTEN, events
from tests.settings import given

ENDLESS = given(steps=100000, epochs=100000, validate=-1)

# An engine that never responds.
ENGINE = """
import time
from rlctl.runtime.rollout.hf import HFEngine

class Engine(HFEngine):
    def generate(self, prompts, params):
        time.sleep(1000)
"""


def record(run: Path) -> tuple[str, int]:
    told = json.loads((run / "run.json").read_text())
    return told["state"], told["exit_code"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.soak)],
)
def test_signal_stops_every_process(
    number: int, code: int, settings: list[str], tmp_path: Path
) -> None:
    """Signal `python -m rlctl` by Ctrl-C, and a fork with SIGTERM."""
    marker, run = f"{os.getpid()}-{number}", tmp_path / "runs" / "quickstart" / "long"
    command = ["train", "ppo", "--name", "long", *settings, *ENDLESS]
    process = start(*command, cwd=tmp_path, marker=marker, process=number == signal.SIGINT)
    wait_for_steps(process, run, 2)
    processes = with_marker(marker)
    assert len(processes) > 2
    opened = [Path(file.path) for file in psutil.Process(process.pid).open_files()]
    locks = [path.parent for path in opened if path.name == "lock"]
    (session,) = [folder for folder in locks if folder.name.startswith("rlctl-ray-")]
    shared: set[Path] = set()
    for each in processes:
        with suppress(psutil.NoSuchProcess):  # Ray has replaced it
            maps = (Path(file.path) for file in each.memory_maps())
            shared |= {path for path in maps if path.is_relative_to("/dev/shm")}
    os.killpg(process.pid, number)
    _, talk = process.communicate(timeout=600)
    assert process.returncode == code, talk
    assert "Traceback" not in talk
    assert record(run) == ("stopped", code)
    wait_until_gone(marker)
    assert not session.exists()
    assert [path for path in shared if path.exists()] == []


@pytest.mark.slow
def test_stop_from_another_shell_and_host(settings: list[str], tmp_path: Path) -> None:
    run = tmp_path / "runs" / "quickstart" / "long"
    words = ("train", "grpo", "--inline", "--name", "long", *settings, *ENDLESS)
    process = start(*words, cwd=tmp_path)
    wait_for_steps(process, run, 2)
    assert rlctl("stop", "lo", cwd=tmp_path).stderr == "note: long: stopped\n"
    assert process.wait(1) == 143
    assert record(run) == ("stopped", 143)
    step = metrics(run)[-1]["step"]
    assert (run / "checkpoints" / f"step_{step:06d}").is_dir()
    assert rlctl("stop", "long", cwd=tmp_path).stderr == "note: long: stopped\n"  # nothing to do
    process = start("resume", "long", cwd=tmp_path)  # in one process, as it was started
    wait_for_steps(process, run, step + 2)
    placed = events(run, "placed")
    assert placed[1]["main"] == placed[0]["main"]
    assert not (run / "stop").exists()
    (run / "stop").touch()  # what `rlctl stop` does if it cannot send a signal
    assert process.wait(60) == 143
    assert record(run) == ("stopped", 143)
    assert not (run / "stop").exists()


@pytest.mark.slow
def test_max_time_stops_a_run_that_resumes(settings: list[str], tmp_path: Path) -> None:
    """The reward waits, so that the seconds cost the machine nothing."""
    (tmp_path / "score.py").write_text(
        "import time\n\ndef compute_score(**_):\n    time.sleep(0.1)\n    return 1.0\n"
    )
    own = [*settings, *ENDLESS, *given(reward="score.py", reward_processes=1)]
    run = tmp_path / "runs" / "quickstart" / "long"
    words = ["train", "grpo", "--inline", "--name", "long", "--max-time", "4s", *own]
    done = rlctl(*words, cwd=tmp_path, fork=True)
    assert "finishing the step and saving" in done.stderr
    assert record(run) == ("stopped", 0)
    rows = metrics(run)
    step = rows[-1]["step"] if rows else 0
    # A slow machine may have no time for a step.
    assert step == 0 or (run / "checkpoints" / f"step_{step:06d}").is_dir()
    rlctl("resume", "long", "--inline", f"trainer.total_training_steps={step + 1}", cwd=tmp_path)
    assert [row["step"] for row in metrics(run)] == list(range(step + 2))


@pytest.mark.slow
def test_retries_restart_a_crashed_run(settings: list[str], tmp_path: Path) -> None:
    """Restart a run killed in its second step, but not one with an invalid configuration."""
    settings = [*settings, LOGGER, "trainer.save_freq=1"]
    run = tmp_path / "runs" / "quickstart" / "harried"
    command = ["train", "grpo", "--inline", "--name", "harried", "--retries", "1", *settings]
    done = rlctl(*command, cwd=tmp_path, more={KILL_AT: f"26:{WRITTEN}"})
    assert "harried failed with exit code 137; retry 1 of 1" in done.stderr
    assert [event["exit_code"] for event in events(run, "retry")] == [137]
    recorded = json.loads((run / "run.json").read_text())["command"]
    assert sum(word.startswith("trainer.experiment_name=") for word in recorded) == 1
    assert [event["step"] for event in events(run, "resume")] == [1]
    assert [row["step"] for row in metrics(run)] == [0, 1, 2]
    wrong = ["train", "grpo", "--inline", "--retries", "3", "trainer.nodes=2"]
    assert "started again" not in rlctl(*wrong, cwd=tmp_path, code=3).stderr


@pytest.mark.slow
@pytest.mark.parametrize("inline", [pytest.param(True, marks=pytest.mark.soak), False])
def test_hung_call_ends_with_stacks(inline: bool, settings: list[str], tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text(ENGINE)
    marker, run = f"{os.getpid()}-hangs-{inline}", tmp_path / "runs" / "quickstart" / "hangs"
    settings = [*settings, *given(engine="hanging:Engine"), "trainer.timeouts.call_s=10"]
    command = ["train", "grpo", "--name", "hangs", *settings, *(["--inline"] if inline else [])]
    process = start(*command, cwd=tmp_path, marker=marker)
    _, talk = process.communicate(timeout=600)
    assert process.returncode == 1, talk
    assert record(run) == ("failed", 1)
    log = run / "attempts" / "1" / ("stacks.txt" if inline else "main-0.log")
    call = "gen did not finish within 20 s" if inline else "sequences did not finish within 10 s"
    assert call in talk
    assert str(log.relative_to(tmp_path)) in talk
    assert f'File "{tmp_path}/hanging.py", line 7 in generate' in log.read_text()
    wait_until_gone(marker)


# An engine that asks for a stop while the last step runs, and makes its dump impossible.
LAST = """
import shutil
from pathlib import Path
from rlctl.runtime.rollout.hf import HFEngine

class Engine(HFEngine):
    def generate(self, prompts, params):
        shutil.rmtree("elsewhere")
        Path("runs/quickstart/last/stop").touch()
        return super().generate(prompts, params)
"""


def test_run_finishes_whatever_happens_in_its_last_step(settings: list[str], tmp_path: Path):
    (tmp_path / "last.py").write_text(LAST)
    words = ["train", "grpo", "--inline", "--name", "last", *settings, "data.val_files=null"]
    words += ["trainer.total_training_steps=1", "actor_rollout_ref.rollout.name=last:Engine"]
    done = rlctl(*words, "trainer.rollout_data_dir=elsewhere", cwd=tmp_path)
    run = tmp_path / "runs" / "quickstart" / "last"
    assert record(run) == ("finished", 0)
    assert "the responses of step 1 are not written" in done.stderr
    assert [event["step"] for event in events(run, "rollouts_not_written")] == [1]
