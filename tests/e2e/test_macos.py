"""Commands where Python lacks what it lacks on macOS: see `macos/sitecustomize.py`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.command import metrics, rlctl
from tests.settings import given

STAND_IN = {"PYTHONPATH": str(Path(__file__).parent / "macos")}
LEAVES = """
import subprocess

def compute_score(**_):
    subprocess.Popen(["sleep", "{seconds}"])
    return 1.0
"""


def test_what_a_reward_leaves_running_is_killed(settings: list[str], tmp_path: Path) -> None:
    seconds = f"{86_400 + os.getpid()}"
    (tmp_path / "score.py").write_text(LEAVES.format(seconds=seconds), encoding="utf-8")
    words = [*settings, *given(reward="score.py", reward_processes=1, steps=1, validate=-1)]
    done = rlctl(
        "train",
        "grpo",
        "--inline",
        "--name",
        "mac",
        *words,
        cwd=tmp_path,
        more=STAND_IN,
        process=True,
    )
    assert "Traceback" not in done.stderr
    assert metrics(tmp_path / "runs" / "quickstart" / "mac")[-1]["step"] == 1
    end = time.monotonic() + 30
    while any(seconds in _words(process) for process in psutil.process_iter()):
        assert time.monotonic() < end, "processes of the reward are left"
        time.sleep(0.1)


def test_a_limit_that_the_system_refuses_is_a_note() -> None:
    code = (
        "from rlctl.runtime.sandbox.process_limits import restrict\n"
        "from rlctl.runtime.sandbox.worker_settings import Limits\n"
        "restrict(Limits(memory=2**30))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=os.environ | STAND_IN, check=True, capture_output=True)
    assert b"note: this system does not set the limit" in done.stderr


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_a_worker_that_ends_is_noticed_without_waitid() -> None:
    """Its guard keeps the exit status that it cannot leave with the kernel."""
    code = (
        "import os\n"
        "from rlctl.runtime.sandbox.guard import fork_guarded, guard\n"
        "child = fork_guarded()\n"
        "os._exit(guard(child) if child else 7)\n"
    )
    environment = os.environ | STAND_IN
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=False, timeout=60)
    assert done.returncode == 7


@pytest.mark.soak
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(["ppo"], id="ppo"),
        pytest.param(["grpo", "--recipe", "tools"], id="tools", marks=pytest.mark.plugin("agents")),
    ],
)
@pytest.mark.parametrize("inline", [["--inline"], []], ids=["inline", "ray"])
def test_runs_train_and_resume(
    settings: list[str], tmp_path: Path, recipe: list[str], inline: list[str]
) -> None:
    own = [] if "tools" in recipe else settings
    words = ["train", *recipe, *inline, "--name", "mac", *own]
    rlctl(
        *words,
        "trainer.total_training_steps=1",
        "trainer.save_freq=1",
        cwd=tmp_path,
        more=STAND_IN,
        process=True,
    )
    words = ["resume", "mac", *inline, "trainer.total_training_steps=2"]
    done = rlctl(*words, cwd=tmp_path, more=STAND_IN, process=True)
    assert "Traceback" not in done.stderr
    (run,) = (tmp_path / "runs").glob("*/mac")
    assert metrics(run)[-1]["step"] == 2
