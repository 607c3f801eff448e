"""Ctrl-C and SIGTERM: the run says how it ended, and no process stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.command import environment


def with_marker(marker: str) -> list[psutil.Process]:
    """Every process whose environment carries the marker: Ray's daemons leave the process tree, not their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("RLCTL_TEST_MARKER") == marker:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_everything(number: int, code: int, settings: list[str], tmp_path: Path) -> None:
    marker = f"{os.getpid()}-{number}"
    settings = [*settings, "trainer.total_training_steps=100000", "trainer.total_epochs=100000", "trainer.test_freq=-1"]
    command = [sys.executable, "-m", "rlctl", "train", "ppo", "--name", "long", *settings]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment() | {"RLCTL_TEST_MARKER": marker}, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    metrics = tmp_path / "runs" / "quickstart" / "long" / "metrics.jsonl"
    deadline = time.monotonic() + 180
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < deadline, "no step in time"
        time.sleep(0.2)
    assert len(with_marker(marker)) > 2
    os.killpg(process.pid, number)
    _, talk = process.communicate(timeout=60)
    assert process.returncode == code, talk
    assert "Traceback" not in talk
    record = json.loads((tmp_path / "runs" / "quickstart" / "long" / "run.json").read_text())
    assert (record["state"], record["exit_code"]) == ("stopped", code)
    deadline = time.monotonic() + 20
    while with_marker(marker) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert with_marker(marker) == []
