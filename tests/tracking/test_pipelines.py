"""`rlctl train … 2>&1 | cat` ends when rlctl ends, whatever the server of a tracker does."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import run_python
from tests.tracking.faults import Switch
from tests.tracking.real import in_a_home
from tests.tracking.swanlab_server import swanlab_server
from tests.tracking.wandb_server import wandb_server

SERVICE = """
import os, subprocess, sys
from pathlib import Path
from rlctl.tracking.child_processes import end_children, silent_children
with silent_children():
    silent = subprocess.Popen(["sleep", "300"])
    piped = subprocess.Popen(["sleep", "300"], stdout=subprocess.PIPE)
files = [os.readlink(f"/proc/{silent.pid}/fd/{number}") for number in range(3)]
kept = os.readlink(f"/proc/{piped.pid}/fd/1").partition(":")[0]
outer = subprocess.Popen(["bash", "-c", "sleep 301 & echo $!; wait"], stdout=subprocess.PIPE)
inner = int(outer.stdout.readline())
end_children("sleep")
print(files, kept, silent.wait(), piped.wait(), Path(f"/proc/{inner}").exists(), outer.poll())
end_children("bash", "sleep")
print(outer.wait())
import time
end = time.monotonic() + 60
while Path(f"/proc/{inner}").exists():
    assert time.monotonic() < end, "the child of a killed child is left"
    time.sleep(0.01)
"""


def test_services_have_no_file_of_the_console_and_are_ended():
    done = run_python("-c", SERVICE)
    first, second = done.stdout.splitlines()
    assert first == "['/dev/null', '/dev/null', '/dev/null'] pipe -9 -9 True None", done.stderr
    assert second == "-9"
    assert done.returncode == 0, done.stderr


@pytest.mark.soak
@pytest.mark.parametrize("fault", ["hang", "500"])
def test_a_pipeline_ends_with_the_run(tmp_path: Path, fault: str):
    """Train with SwanLab and W&B, whose servers fail once the run has started."""
    switches = Switch(), Switch()
    with wandb_server(switches[0]) as (wandb, _), swanlab_server(switches[1]) as (swanlab, _):
        hosts = {"WANDB_BASE_URL": wandb, "SWANLAB_API_HOST": swanlab, "SWANLAB_WEB_HOST": swanlab}
        keys = {"WANDB_API_KEY": "k" * 40, "SWANLAB_API_KEY": "k" * 21}
        words = [sys.executable, "-m", "rlctl", "train", "grpo", "--inline", "--name", "piped"]
        words += ["--logger", "wandb", "--logger", "swanlab", "trainer.total_training_steps=4"]
        words += ["trainer.test_freq=2", "trainer.log_val_generations=2"]
        words += ["trainer.tracking.call_s=6", "trainer.tracking.finish_s=8"]
        for switch in switches:
            switch.set(fault, after=9)
        marked = f"({shlex.join(words)}; echo code $?; date +%s.%N > ended) 2>&1 | cat"
        done = subprocess.run(
            ["bash", "-c", marked],
            cwd=tmp_path,
            env=in_a_home(tmp_path) | hosts | keys | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        after = time.time() - float((tmp_path / "ended").read_text())
        for switch in switches:
            switch.set("")
    assert "code 0" in done.stdout
    assert after < 5, done.stdout
    assert "swanlab.sdk" not in done.stdout, done.stdout
    assert "urllib3" not in done.stdout, done.stdout
