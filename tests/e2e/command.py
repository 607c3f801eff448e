"""The command `rlctl` as a user runs it, and what a run leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TIMEOUT_S = 240

# What depends on the clock or the machine; everything else a seed decides.
_OF_THE_CLOCK = ("timing_s/", "timing_per_token_ms/", "perf/time_per_step", "perf/throughput", "perf/cpu_memory_used_gb", "perf/mfu/")


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "PYTHONDONTWRITEBYTECODE": ""}


def rlctl(*arguments: object, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run it to its end and check the exit code."""
    command = [sys.executable, "-m", "rlctl", *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == code, f"exit {done.returncode}, wanted {code}\n{done.stdout}\n{done.stderr}"
    return done


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def reproducible(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what depends on the clock."""
    return [{name: value for name, value in row.items() if not name.startswith(_OF_THE_CLOCK)} for row in metrics(run)]
